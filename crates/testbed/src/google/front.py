"""A proxy that adds the XML API of Google Cloud Storage to fake-gcs-server, whose JSON API alone supports conditions.

Arguments: the port of this proxy, the port of the server, the server's program, the bucket.
It starts the server and creates the bucket. The server keeps all data in memory, because with files a read may return
a partially written object. A PUT is translated into a multipart upload, and a DELETE into that of the JSON API. Reads
and lists are forwarded unchanged.
"""

import http.client
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse

port, behind, program, bucket = sys.argv[1:]
local = threading.local()


def ask(method, path, body=None, headers=None):
    """Sends a request to the server. Repeats a read once on a new connection if the connection was closed."""
    for is_last in (False, True):
        if getattr(local, "link", None) is None:
            local.link = http.client.HTTPConnection("127.0.0.1", int(behind), timeout=20)
        try:
            local.link.request(method, path, body, {"Host": "127.0.0.1", **(headers or {})})
            answer = local.link.getresponse()
            return answer.status, answer.headers, answer.read()
        except (http.client.RemoteDisconnected, ConnectionError):
            local.link = None
            if is_last or method not in ("GET", "HEAD"):
                raise


class Front(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def say(self, status, headers=(), body=b""):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def which(self):
        parts = self.path.split("?")[0].split("/", 2)
        return parts[1], urllib.parse.unquote(parts[2]) if len(parts) > 2 else ""

    def do_GET(self):
        wanted, name = self.which()
        query = self.path.split("?", 1)[1] if "?" in self.path else ""
        path = f"/{wanted}" + (f"/{urllib.parse.quote(name, safe='')}" if name else "")
        status, headers, body = ask("GET", f"{path}?{query}" if query else path)
        kept = ("Etag", "Last-Modified", "X-Goog-Generation", "Content-Type")
        self.say(status, [(n, headers[n]) for n in kept if headers[n]], body)

    do_HEAD = do_GET

    def do_PUT(self):
        wanted, name = self.which()
        value = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        about = {"name": name, "cacheControl": self.headers.get("Cache-Control", "")}
        edge = "an-edge-that-is-in-no-value"
        body = (
            f"--{edge}\r\nContent-Type: application/json\r\n\r\n{json.dumps(about)}\r\n"
            f"--{edge}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode() + value + f"\r\n--{edge}--\r\n".encode()
        query = {"uploadType": "multipart", "name": name}
        if (version := self.headers.get("x-goog-if-generation-match")) is not None:
            query["ifGenerationMatch"] = version
        path = f"/upload/storage/v1/b/{wanted}/o?{urllib.parse.urlencode(query)}"
        kind = {"Content-Type": f"multipart/related; boundary={edge}"}
        status, _, told = ask("POST", path, body, kind)
        if status != 200:
            return self.say(status, body=told)
        told = json.loads(told)
        headers = [("ETag", '"' + told["etag"] + '"'), ("x-goog-generation", told["generation"])]
        self.say(200, headers)

    def do_DELETE(self):
        wanted, name = self.which()
        status, _, told = ask("DELETE", f"/storage/v1/b/{wanted}/o/{urllib.parse.quote(name, safe='')}")
        self.say(204 if status == 200 else status, body=b"" if status == 200 else told)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


# The package installs the program without the permission to execute it.
os.chmod(program, 0o755)
subprocess.Popen(
    [program, "-scheme", "http", "-host", "127.0.0.1", "-port", behind, "-public-host", "127.0.0.1",
     "-backend", "memory"]
)
for _ in range(400):
    try:
        made = ask("POST", "/storage/v1/b", json.dumps({"name": bucket}), {"Content-Type": "application/json"})
        break
    except ConnectionError:
        time.sleep(0.05)
else:
    sys.exit("fake-gcs-server does not start")
if made[0] not in (200, 409):
    sys.exit(made)
Server(("127.0.0.1", int(port)), Front).serve_forever()
