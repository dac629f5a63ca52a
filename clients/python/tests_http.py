"""Locks of a `leasehold serve` under faults of the network and the server. LEASEHOLD_COMMAND is the path of the command.

Each test has a twin of the same name in ../node/test-http.js. The behavior of both clients is tested by tests.py with
LEASEHOLD_OVER=http.
"""

import contextlib
import hashlib
import http.client
import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import unittest

import leasehold
import tests
from leasehold import _http
from tests import Server, command, eventually


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to the server at this socket. `rule` gets the method and a function that passes the request on
    and returns the answer. It returns the answer for the client, or None to close the connection."""

    daemon_threads = True

    def __init__(self, test, path, rule, tls=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.path, self.rule = path, rule
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.store = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        test.addCleanup(self.server_close)
        test.addCleanup(self.shutdown)

    def handle_error(self, *_):
        """The client has closed the connection."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        method, path = self.command, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def forward():
            connection = _http._UnixConnection("localhost", timeout=60)
            connection.path = self.server.path
            with contextlib.closing(connection):
                connection.request(method, path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, response.read()

        try:
            answer = self.server.rule(method, forward)
            if answer:
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])
                return
        except OSError:
            pass
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, *_):
        pass


class OverHttp(tests.Case):
    def setUp(self):
        super().setUp()
        if not tests.OVER_HTTP:
            self.serve(self.store)

    def through(self, rule, **options):
        """Returns the lock over a proxy."""
        return leasehold.lock("x y", store=Proxy(self, self.path, rule).store, **options)

    def assert_lost_in_time(self, held, lease):
        """Checks a lock that was just acquired and is never renewed: it is lost before its lease ends at the server."""
        deadline = held.deadline
        self.assertLess(deadline, time.time() + 0.99 * lease)
        self.assertTrue(held.lost.wait(30))
        # The machine may be busy with other tests.
        self.assertLess(time.time(), deadline + 5)

    def test_a_lost_reply_neither_loses_nor_leaves_a_lock(self):
        dropped = []

        def rule(method, forward):
            answer = forward()
            # Drops the first answer to each method, and then every second one.
            dropped.append(method)
            return answer if dropped.count(method) % 2 == 0 else None

        lock = self.through(rule, lease=8)
        with lock as held:
            self.assertEqual(self.claims(), 1)
            time.sleep(10)
            held.check()
        self.assertEqual((held.state, self.claims()), ("released", 0))
        with self.assertRaises(leasehold.NotAcquired), self.lock(), self.through(rule, wait=0):
            pass
        self.assertTrue({"POST", "PUT", "DELETE"} <= set(dropped))

    def test_a_repeated_request_changes_nothing(self):
        def rule(_, forward):
            answer = forward()
            forward()
            return answer

        lock = self.through(rule, lease=8)
        with lock as held:
            self.assertEqual(self.claims(), 1)
            time.sleep(10)
            held.check()
            with self.assertRaises(leasehold.NotAcquired):
                self.through(rule, wait=0.3).acquire()
            self.assertEqual(self.claims(), 1)
        self.assertEqual((held.state, self.claims()), ("released", 0))

    def test_a_late_request_makes_no_second_holder(self):
        joins = []

        def rule(method, forward):
            if method == "POST":
                joins.append(forward)
            return forward()

        held = self.through(rule, lease=10).acquire()
        held.release()
        # The network delivers another copy of the join now.
        joins[0]()
        self.assertEqual((held.state, self.claims()), ("released", 1))
        # No client renews that claim, so it expires.
        with self.lock(wait=30) as later:
            self.assertGreater(later.token, held.token)

    def test_a_late_reply_never_extends_a_hold(self):
        late, delay = [], 10

        def rule(method, forward):
            answer = forward()
            # Delays all answers to renewals, and the first one to a join.
            if method == "PUT" or (method == "POST" and not late):
                late.append(method)
                time.sleep(delay)
            return answer

        began = time.monotonic()
        held = self.through(rule, lease=6).acquire()
        # A repeated join acquired the lock.
        self.assertLess(time.monotonic() - began, delay)
        self.assert_lost_in_time(held, 6)
        # The server has renewed it, so no other client can hold it yet.
        self.assertTrue(self.is_held())
        self.assertIn("PUT", late)
        time.sleep(delay)
        self.assertEqual(held.state, "lost")
        with self.assertRaisesRegex(leasehold.Lost, "expired"):
            held.release()

    def test_a_wait_longer_than_a_lease_leaves_no_claim(self):
        with self.lock():
            waiter = threading.Thread(target=lambda: self.lock(lease=4).acquire().release())
            waiter.start()
            with self.assertRaises(leasehold.NotAcquired):
                self.lock(lease=4, wait=5).acquire()
            self.assertEqual(self.claims(), 2)
        waiter.join(60)
        self.assertEqual(self.claims(), 0)

    def test_an_abandoned_claim_is_released(self):
        left = []

        def rule(method, forward):
            answer = forward()
            if method == "POST" and self.claims() < 3:
                # Drops the answers until the client joins with another ID.
                return None
            if method == "DELETE":
                left.append(self.claims())
            return answer

        with self.lock():
            with self.assertRaises(leasehold.NotAcquired):
                self.through(rule, lease=4, wait=10).acquire()
            # The first release is that of the abandoned claim.
            self.assertEqual(left, [2, 1])

    def test_a_late_copy_of_a_join_is_released(self):
        joins, left = [], []

        def rule(method, forward):
            if method == "POST":
                joins.append(forward)
            answer = forward()
            if method == "DELETE":
                left.append(self.claims())
            return answer

        held = self.through(rule).acquire()
        self.assertEqual(command("evict", "x y", store=self.store).returncode, 0)
        joins[0]()
        self.assertEqual(self.claims(), 1)
        # The next renewal finds another token.
        self.assertTrue(held.lost.wait(30))
        eventually(lambda: left)
        self.assertEqual(left, [0])
        with self.assertRaises(leasehold.Lost):
            held.release()

    def test_an_invalid_answer_leaves_no_claim(self):
        def rule(method, forward):
            if method == "GET":
                return 200, b'{"status": "waiting", "lock": {"claims": [{"standing": "holding"}]}}'
            return forward()

        with self.lock():
            with self.assertRaises(leasehold.Error):
                self.through(rule, wait=0.3).acquire()
            self.assertEqual(self.claims(), 1)
            # A call that does not wait must not poll.
            with self.assertRaises(leasehold.NotAcquired):
                self.through(lambda method, forward: (202, b'{"status": "waiting", "ahead": 1}'), wait=0).acquire()

    def test_a_wait_that_ends_reports_the_last_error(self):
        def ends(method, answer):
            with self.assertRaises(leasehold.Error) as ended:
                self.through(lambda each, forward: answer if each == method else forward(), wait=2).acquire()
            return ended.exception

        full = 429, b'{"kind": "full", "detail": "over quota"}'
        self.assertRegex(str(ends("POST", full)), r"\[full\]")
        self.assertRegex(str(ends("POST", None)), r"\[unreachable\]")
        with self.lock():
            self.assertRegex(str(ends("POST", full)), r"\[full\]")
            self.assertRegex(str(ends("GET", None)), r"\[unreachable\]")
            timeout = ends("POST", None)
            self.assertIsInstance(timeout, leasehold.NotAcquired)
            self.assertRegex(str(timeout), "held by")

    def test_a_wait_continues_while_the_server_is_full(self):
        full = 429, b'{"kind": "full", "detail": "over quota", "retry_after_ms": 100}'
        # Longer than the outage of a server that a wait survives.
        end = time.monotonic() + 17
        with self.through(lambda _, forward: full if time.monotonic() < end else forward(), wait=60):
            self.assertEqual(self.claims(), 1)

    def test_a_request_lasts_no_longer_than_the_wait(self):
        answered = threading.Event()
        self.addCleanup(answered.set)
        with self.assertRaisesRegex(leasehold.Error, r"within 1s \[unreachable\]"):
            self.through(lambda *_: answered.wait(60) and None, wait=1.9).acquire()

    def test_a_caller_does_not_wait_for_a_rejected_release(self):
        denied = 403, b'{"kind": "denied", "detail": "no right to hold"}'
        held = self.through(lambda method, forward: denied if method == "DELETE" else forward()).acquire()
        began = time.monotonic()
        held.release()
        self.assertLess(time.monotonic() - began, _http._FAREWELL)

    def test_a_hold_survives_a_restart_of_the_server(self):
        self.server.kill()
        store = f"sqlite:{self.directory}/locks.db"
        self.serve(store)
        with self.lock(lease=10) as held:
            waiter = threading.Thread(target=lambda: self.lock().acquire().release())
            waiter.start()
            eventually(lambda: self.claims() == 2)
            self.server.kill()
            time.sleep(1)
            self.serve(store)
            # Longer than the lease.
            time.sleep(11)
            held.check()
            self.assertEqual(command("verify", held.sequencer, store=store).returncode, 0)
        self.assertEqual(held.state, "released")
        waiter.join(60)
        self.assertFalse(waiter.is_alive())
        self.assertEqual(self.claims(), 0)

    def test_a_paused_server_loses_the_lock_before_its_lease_ends(self):
        called = threading.Event()
        held = self.lock(lease=2, on_lost=lambda held: called.set()).acquire()
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            self.assert_lost_in_time(held, 2)
            self.assertTrue(called.wait(30))
            with self.assertRaises(leasehold.Lost):
                held.check()
            with self.assertRaises(leasehold.Unavailable):
                self.lock(wait=0, lease=1).acquire()
        finally:
            self.server.process.send_signal(signal.SIGCONT)
        with self.lock(wait=30) as later:
            self.assertGreater(later.token, held.token)

    def test_a_release_is_repeated_until_the_server_answers(self):
        rejected = []

        def rule(method, forward):
            if method == "DELETE" and len(rejected) < 4:
                rejected.append(method)
                return (502, b"<html>") if len(rejected) % 2 else None
            return forward()

        with self.through(rule) as held:
            pass
        self.assertEqual((held.state, len(rejected), self.claims()), ("released", 4, 0))
        # A caller does not wait for a server that is gone.
        held = self.lock().acquire()
        self.server.kill()
        began = time.monotonic()
        held.release()
        self.assertLess(time.monotonic() - began, 12)
        self.assertEqual(held.state, "released")

    def tokens(self, *tokens):
        """A server on TCP that accepts these tokens."""
        hashes = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
        identity = {"name": "ci", "token_sha256": hashes, "prefixes": ["ci/"], "rights": ["hold", "inspect"]}
        path = f"{self.directory}/tokens.json"
        with open(path, "w", encoding="utf8") as file:
            json.dump({"identities": [identity]}, file)
        server = Server(self, f"file:{self.directory}/other", "--listen", "127.0.0.1:0", "--tokens", path)
        return server.address

    def test_a_rejected_token_is_an_error_without_the_token(self):
        address = self.tokens("accepted")
        for name, query in (("ci/x", "token=sekret"), ("ci/x", ""), ("x", "token=accepted")):
            with self.subTest(query), self.assertRaises(leasehold.Unavailable) as refused:
                leasehold.lock(name, store=f"{address}/?{query}").acquire()
            self.assertEqual(refused.exception.code, 69)
            self.assertIn("[denied]", str(refused.exception))
            self.assertNotRegex(str(refused.exception), "sekret|accepted|[0-9a-f]{32}")
        store = f"{address}/?prefix=ci/&token=accepted"
        with leasehold.lock("x", store=store) as held:
            self.assertEqual(held.name, "x")
            self.assertEqual(command("verify", held.sequencer, store=store).returncode, 0)

    def test_a_token_file_is_read_for_each_request(self):
        address, path = self.tokens("first", "second"), f"{self.directory}/token"
        lock = leasehold.lock("ci/x", store=f"{address}/?token_file={path}", lease=8)
        with self.assertRaisesRegex(leasehold.Unavailable, "cannot read token_file=.*No such file"):
            lock.acquire()

        def write(token):
            with open(f"{path}.new", "w", encoding="utf8") as file:
                print(token, file=file)
            os.rename(f"{path}.new", path)

        write("first")
        with lock as held:
            write("second")
            time.sleep(10)
            held.check()
        held = lock.acquire()
        write("wrong")
        self.assertTrue(held.lost.wait(30))
        self.assertIn("expired", held.reason)

    def test_invalid_urls_are_rejected_without_their_secrets(self):
        for url in (
            "http:",
            "http:h",
            "http://",
            "http://a,a",
            "http://h:0",
            "http://user:sekret@h/",
            "http://sekret@h/",
            "http://h/?tokn=sekret",
            "http://h/?sekret",
            "http://h/?token=sek%0aret",
            "http://h/?ca=/x",
            "http://h/a%20b",
            "http://h/a&token=sekret",
            "http+unix://h/socket",
            "http+unix:///",
            "https://h?cert=/x",
            "https://h?ca=/nowhere",
        ):
            with self.subTest(url), self.assertRaises(leasehold.Error) as refused:
                leasehold.lock("x", store=url, wait=0).acquire()
            self.assertEqual(refused.exception.code, 2)
            self.assertNotIn("sekret", str(refused.exception))

    def test_the_next_replica_takes_over(self):
        proxies = [Proxy(self, self.path, lambda _, forward: forward()) for _ in range(2)]
        hosts = ",".join(proxy.store.split("/")[2] for proxy in proxies)
        with leasehold.lock("x y", store=f"http://127.0.0.1:1,{hosts}", lease=8) as held:
            for proxy in proxies:
                # Each proxy in turn closes all connections for longer than a lease.
                proxy.rule = lambda *_: None
                time.sleep(10)
                held.check()
                proxy.rule = lambda _, forward: forward()
        self.assertEqual((held.state, self.claims()), ("released", 0))

    def test_replicas_of_different_stores_are_rejected(self):
        other = self.directory + "/other"
        Server(self, f"file:{self.directory}/other-store", "--listen", f"unix:{other}")
        down = []

        def rule(name):
            return lambda _, forward: None if name in down else forward()

        proxies = {path: Proxy(self, path, rule(path)) for path in (self.path, other)}
        store = "http://" + ",".join(proxy.store.split("/")[2] for proxy in proxies.values())
        lock, held = leasehold.lock("x y", store=store, lease=5), None
        while not held:
            # A slow replica makes the client use the next one, which is rejected.
            with contextlib.suppress(leasehold.Error):
                held = lock.acquire()
        # The server that granted the lock goes down.
        down.append(self.path if self.is_held() else other)
        self.assertTrue(held.lost.wait(30))
        down.clear()

    def test_all_kinds_and_times_of_locks(self):
        with self.lock(shared=True), self.lock(shared=True):
            with self.assertRaises(leasehold.NotAcquired):
                self.lock(exclusive=True, wait=0).acquire()
        with self.lock(exclusive=True), self.assertRaises(leasehold.NotAcquired):
            self.lock(shared=True, wait=0.1).acquire()

        def semaphore(**options):
            return leasehold.lock("s", store=self.store, of=3, **options)

        with semaphore(permits=2), semaphore(), self.assertRaises(leasehold.NotAcquired):
            semaphore(wait=0).acquire()
        with self.assertRaises(leasehold.Error) as refused:
            self.lock(of=2, permits=3).acquire()
        self.assertEqual(refused.exception.code, 2)
        held = self.lock(max_hold=0.5).acquire()
        self.assertTrue(held.lost.wait(30))
        self.assertIn("max_hold", held.reason)
        eventually(lambda: not self.is_held())
        began = time.monotonic()
        with self.lock(min_hold=1):
            pass
        with self.assertRaisesRegex(leasehold.NotAcquired, "in cooldown"):
            self.lock(wait=0.1).acquire()
        with self.lock(wait=30):
            self.assertGreater(time.monotonic() - began, 1)

    def test_a_frozen_lock_is_not_acquired(self):
        self.assertEqual(command("freeze", "x y", "--for", "1h", "--reason", "repairs", store=self.store).returncode, 0)
        for wait in (0, 0.2):
            with self.assertRaisesRegex(leasehold.NotAcquired, "repairs"):
                self.lock(wait=wait).acquire()

    def test_https_needs_the_right_certificate(self):
        made = f"{self.directory}/server"
        words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
        keys = ["-keyout", f"{made}.key", "-out", f"{made}.pem"]
        subprocess.run([*words.split(), *keys], check=True, capture_output=True)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(f"{made}.pem", f"{made}.key")
        # The client must send a certificate, too.
        tls.load_verify_locations(f"{made}.pem")
        tls.verify_mode = ssl.CERT_REQUIRED
        store = Proxy(self, self.path, lambda _, forward: forward(), tls).store
        ours = f"cert={made}.pem&key={made}.key"
        with leasehold.lock("x y", store=f"{store}?ca={made}.pem&{ours}", lease=8) as held:
            time.sleep(10)
            held.check()
        for query in (ours, f"ca={made}.pem"):
            with self.assertRaises(leasehold.Unavailable):
                leasehold.lock("x y", store=f"{store}?{query}", wait=0).acquire()

    def test_a_busy_program_does_not_hide_a_loss(self):
        held = self.lock(lease=1).acquire()
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        # No other thread of this process runs during the loop.
        sys.setswitchinterval(1000)
        end = time.monotonic() + 1.1
        while time.monotonic() < end:
            pass
        self.assertTrue(held.lost.is_set())
        with self.assertRaises(leasehold.Lost):
            held.check()
        sys.setswitchinterval(interval)
        with self.assertRaises(leasehold.Lost):
            held.release()


if __name__ == "__main__":
    unittest.main(verbosity=2)
