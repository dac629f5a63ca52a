"""The small bank of examples/service, in Python. Any number of instances can run on one PostgreSQL.

    pip install ./clients/python pg8000
    DATABASE_URL=postgres://user@host/db LISTEN=127.0.0.1:8080 python bank.py
"""
import os, signal, subprocess, sys, threading, time, urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import leasehold, pg8000.native

URL = os.environ["DATABASE_URL"]
FENCE = """INSERT INTO leasehold_fence AS f (name, seen) VALUES (:name, :token)
    ON CONFLICT (name) DO UPDATE SET seen = GREATEST(f.seen, EXCLUDED.seen) RETURNING seen"""
TABLES = """CREATE TABLE IF NOT EXISTS py_orders (key TEXT PRIMARY KEY, id BIGSERIAL, item TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS py_accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL DEFAULT 0);
    CREATE TABLE IF NOT EXISTS py_books (term BIGINT NOT NULL, entry BIGSERIAL)"""
books = leasehold.elect("books", store=URL)

def transaction(work, fenced_by=None):
    url = urllib.parse.urlsplit(URL)
    db = pg8000.native.Connection(url.username, url.hostname, url.path[1:], url.port or 5432, url.password)
    try:  # Work that is not committed when the connection ends is rolled back.
        db.run("BEGIN")
        if fenced_by and db.run(FENCE, name=fenced_by.name, token=fenced_by.token)[0][0] > fenced_by.token:
            return 409, "a later holder has written"  # this process was paused for longer than its lease
        answer = work(db)
        db.run("COMMIT")
        return answer
    finally:
        db.close()

def order(key, item):  # Once per key, however often it is sent: a second request waits for the first.
    def work(db):
        new = db.run("INSERT INTO py_orders (key, item) VALUES (:key, :item) ON CONFLICT DO NOTHING RETURNING id", key=key, item=item)
        return (201, new[0][0]) if new else (200, db.run("SELECT id FROM py_orders WHERE key = :key", key=key)[0][0])
    return transaction(work) if key else (400, "the header Idempotency-Key is missing")

def deposit(account, amount):  # Reads, computes and writes: under a lock, with a fenced write.
    def work(db):
        db.run("INSERT INTO py_accounts (id) VALUES (:id) ON CONFLICT DO NOTHING", id=account)
        after = db.run("SELECT balance FROM py_accounts WHERE id = :id", id=account)[0][0] + amount
        return 200, db.run("UPDATE py_accounts SET balance = :b WHERE id = :id RETURNING balance", id=account, b=after)[0][0]
    with leasehold.lock(f"account:{account}", store=URL, wait=2) as held:
        return transaction(work, fenced_by=held)

def report():  # At most two at once on all machines: a third request is rejected.
    with leasehold.lock("reports", store=URL, of=2, wait=0):
        time.sleep(1)
        return 200, "all is well"

def close_the_books():  # Only the leader does this. Another instance takes over when it is gone.
    for term in books:
        try:
            while books.leads(0.1):
                transaction(lambda db: db.run("INSERT INTO py_books (term) VALUES (:t)", t=term.token), fenced_by=term)
        except Exception as error:
            print(f"term ended: {error}", file=sys.stderr)

class Bank(BaseHTTPRequestHandler):
    def answer(self):
        path, _, query = self.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        try:
            match [self.command, *path.split("/")[1:]]:
                case ["POST", "orders"]: status, text = order(self.headers["Idempotency-Key"], asked["item"])
                case ["POST", "accounts", account, "deposit"]: status, text = deposit(int(account), int(asked["amount"]))
                case ["POST", "reports"]: status, text = report()
                case ["GET", "leader"] if (term := books.term): status, text = 200, term.token
                case ["GET", "ready"]: status, text = transaction(lambda db: (200, "ready"))
                case _: status, text = 404, ""
        except (KeyError, ValueError): status, text = 400, "bad request"
        except Exception as error: status, text = getattr(error, "status", 500), (print(error, file=sys.stderr), "")[1]
        self.send_response(status), self.end_headers(), self.wfile.write(str(text).encode())
    do_GET = do_POST = answer

if __name__ == "__main__":
    schema = subprocess.run([os.environ.get("LEASEHOLD_COMMAND", "leasehold"), "schema", "--tables", "transactions", "--store", URL], capture_output=True, text=True, check=True)
    with leasehold.lock("bank:install", store=URL):  # two at once would fail
        transaction(lambda db: (db.run(schema.stdout), db.run(TABLES)))
    host, port = os.environ.get("LISTEN", "127.0.0.1:0").rsplit(":", 1)
    server, leading = ThreadingHTTPServer((host, int(port)), Bank), threading.Thread(target=close_the_books)
    signal.signal(signal.SIGTERM, lambda *_: (books.stop(), threading.Thread(target=server.shutdown).start()))
    leading.start()
    print("listening on %s:%d" % server.server_address, flush=True)
    server.serve_forever()
    leading.join()
