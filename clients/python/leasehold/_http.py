"""Locks of a `leasehold serve`, over HTTP.

There are never two holders because of the network:

- **A lost reply, a repeated request.** The client draws the claim's ID, and every call is about this claim. A second copy
  of a join, a renewal or a release finds what the first one did. So after an error, the client repeats the call.
- **A late request.** A renewal never joins. A join that arrives after its claim was released makes a claim that no client
  renews or uses: it expires within its lease. An ID is used again neither after a release, nor after the server has
  lost its claim, nor six seconds after its first join. The client releases the claim of an abandoned ID.
- **A late reply.** A lease is counted from before its request was sent, so the delay only shortens it. The reply of a
  request that was given up is dropped with its connection.
- **No reply.** The lock is lost when the lease ends by this machine's clock, which is before it ends at the server. A
  thread watches the clock. Another one sends requests, so no request can delay the loss.
"""

import http.client
import json
import os
import queue
import secrets
import socket
import ssl
import threading
import time
import urllib.parse

_PORT = 8484
# The longest wait for an answer, in seconds: from the only replica, and from one of several.
_ANSWER = (5, 1.5)
# How long a join may take at least, in seconds, even if the wait ends before.
_SHORTEST_ANSWER = 1
# The first and the longest pause before a call is repeated.
_PAUSE = (0.05, 1)
# How long a claim is requested from a server that does not answer. A longer lease extends it.
_PATIENCE = 15
# How long `release` waits for the server. After that, releasing continues in the background.
_FAREWELL = 5
# The range of leases and the default, in milliseconds.
_LEASES, _LEASE = (50, 86_400_000), 15_000
# How long a queue position lasts without a call. The server has the same default.
_WAITER_LEASE = 6
# The longest answer, in bytes.
_LONGEST = 16 << 20
# How many waiters at the front request the holders whenever their positions change.
_NEAR = 3

_USAGE, _UNAVAILABLE, _NOT_ACQUIRED = 2, 69, 75
# The exit code of `leasehold hold` for each kind of problem. All other kinds mean that the store cannot be used.
_CODES = {
    "contended": _NOT_ACQUIRED,
    "timeout": _NOT_ACQUIRED,
    "lost": _NOT_ACQUIRED,
    "invalid_name": _USAGE,
    "config": _USAGE,
    "unsupported": _USAGE,
    "mismatch": _USAGE,
}
# After these, the call is repeated.
_TRANSIENT = ("unreachable", "full", "closed")

_EXPIRED = "its lease expired before a renewal was acknowledged"
_GONE = "the store no longer has this hold (evicted, expired or its data was lost)"
_MAX_HOLD = "its max_hold has elapsed"


def now():
    """Seconds on a clock that continues while the machine is suspended, and cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Failed(Exception):
    """No lock is held, and none will be: the code and the message of the event `failed`."""

    def __init__(self, code, message, is_transient=False):
        super().__init__(message)
        self.code = code
        self.is_transient = is_transient


class _Url:
    """The parts of a store's URL. Errors show no part of it that may be a token."""

    def __init__(self, url):
        scheme, slashes, rest = url.partition("://")
        if not slashes:
            raise _Failed(_USAGE, 'invalid store URL: missing "//" after the scheme')
        place, _, query = rest.partition("?")
        self.parameters = {}
        for pair in query.split("&") if query else []:
            key, _, value = pair.partition("=")
            self.parameters[key] = _decoded(value)
        known = {"prefix", "token", "token_file"} | ({"ca", "cert", "key"} if scheme == "https" else set())
        for key in self.parameters.keys() - known:
            # A parameter without a name, or with a strange one, may be a token.
            shown = key if key.isidentifier() and len(key) < 20 and f"{key}=" in query else "without a name"
            raise _Failed(_USAGE, f"invalid store URL: unknown parameter {shown}; known: {', '.join(sorted(known))}")
        hosts, _, path = place.partition("/")
        self.hosts, self.base, self.prefix = [], "", self.parameters.get("prefix", "")
        if "@" in hosts:
            what = "it cannot contain a user name or a password; use ?token_file=/path/to/file"
            raise _Failed(_USAGE, f"invalid store URL: {what}")
        if scheme == "http+unix":
            path = _decoded(path)
            if hosts or not path:
                raise _Failed(_USAGE, "invalid store URL: use http+unix:///a/socket")
            self.hosts = [f"/{path}"]
        else:
            self.base = f"/{path}".rstrip("/")
            if not all(c.isascii() and (c.isalnum() or c in "/-._~") for c in self.base):
                raise _Failed(_USAGE, "invalid store URL: its path contains characters that leasehold does not send")
            self.hosts = [_host(host) for host in hosts.split(",")]
            if len(set(self.hosts)) < len(self.hosts):
                raise _Failed(_USAGE, "invalid store URL: it names a replica twice")
        self.tls = self._tls() if scheme == "https" else None
        self._check_token(self.parameters.get("token", ""))

    def _tls(self):
        ca, cert, key = (self.parameters.get(name) for name in ("ca", "cert", "key"))
        if (cert is None) != (key is None):
            raise _Failed(_USAGE, "invalid store URL: cert= and key= need each other")
        try:
            context = ssl.create_default_context(cafile=ca)
            if cert is not None:
                # Without a password, so that OpenSSL does not ask for one on the terminal.
                context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            names = ", ".join(f"{name}={file}" for name, file in (("ca", ca), ("cert", cert), ("key", key)) if file)
            raise _Failed(_USAGE, f"cannot use {names}: {_why(error)}") from None
        return context

    @staticmethod
    def _check_token(token):
        if not all("!" <= c <= "~" for c in token):
            raise _Failed(_USAGE, "the token contains characters that a header cannot have")
        return token

    def headers(self):
        """The headers of a request, with the token as it is now."""
        token, file = self.parameters.get("token"), self.parameters.get("token_file")
        if file is not None:
            try:
                with open(file, encoding="utf8") as text:
                    token = text.read(1 << 16).strip()
            except (OSError, ValueError) as error:
                raise _Failed(_UNAVAILABLE, f"cannot read token_file={file}: {_why(error)}") from None
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        return {**headers, "Authorization": f"Bearer {self._check_token(token)}"} if token else headers

    def connect(self, number, timeout):
        """Returns a connection to this replica."""
        host = self.hosts[number]
        if isinstance(host, str):
            connection = _UnixConnection("localhost", timeout=timeout)
            connection.path = host
        elif self.tls:
            connection = http.client.HTTPSConnection(*host, timeout=timeout, context=self.tls)
        else:
            connection = http.client.HTTPConnection(*host, timeout=timeout)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


class _UnixConnection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _host(text):
    """The name and the port of one replica."""
    name, _, port = text.rpartition(":")
    if not name or port.endswith("]"):
        name, port = text, str(_PORT)
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if not name or any(c in name for c in "[]% \t") or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _Failed(_USAGE, "invalid store URL: use http://host1,host2:8484/ or http+unix:///a/socket")
    return name, int(port)


def _decoded(text):
    try:
        return urllib.parse.unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _Failed(_USAGE, "invalid store URL: it is not UTF-8") from None


def _why(error):
    """The reason of an error, without anything that was sent or received."""
    return getattr(error, "strerror", None) or type(error).__name__


class _Sender:
    """Sends the requests of one claim on a thread of its own, one after another, and passes the answers on."""

    def __init__(self, url, answers):
        self.url = url
        self.answers = answers
        self.requests = queue.SimpleQueue()
        # Clients are spread over the replicas.
        self.number = secrets.randbelow(len(url.hosts))
        self.connection = None
        # The store of the replicas, if there are several.
        self.identity = None
        # The last request that was given up.
        self.given_up = 0

    def run(self):
        while True:
            request = self.requests.get()
            if request is None:
                self.close()
                return
            self.answers.put((request[0], self._send(*request)))

    def close(self):
        connection, self.connection = self.connection, None
        if connection:
            connection.close()

    def give_up(self, number):
        """Ends a request that runs. Its answer is dropped with its connection."""
        self.given_up = number
        sock = getattr(self.connection, "sock", None)
        try:
            # The method of the base class, because that of TLS would remove an object that the other thread uses.
            if sock:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        except OSError:
            pass

    def _send(self, number, until, method, path, body):
        """Returns the status and the fields of the answer. Without an answer, returns the status 0 and the reason."""
        unsent = True
        try:
            headers = self.url.headers()
            if not self.connection:
                self._connect(until)
            unsent = False
            status, fields = self._exchange(until, method, path, body, headers, number)
            kind = fields.get("kind")
            # Another replica may reach the store.
            if status >= 500 and (kind is None or kind in _TRANSIENT):
                self._next()
            return status, fields
        except _Failed as failed:
            kind = "denied" if failed.code == _UNAVAILABLE else "config"
            return 0, {"kind": kind, "detail": str(failed), "unsent": True}
        except Exception as error:
            # The network failed, or the answer is not a server's.
            self._next()
            return 0, {"kind": "unreachable", "detail": f"no answer from the server: {_why(error)}", "unsent": unsent}

    def _connect(self, until):
        self.connection = self.url.connect(self.number, max(until - now(), 0.001))
        if len(self.url.hosts) == 1:
            return
        # Replicas over different stores would grant one lock twice.
        status, store = self._exchange(until, "GET", "/v1/store", None, self.url.headers(), None)
        if status == 200:
            self.identity = self.identity or store["identity"]
            if store["identity"] != self.identity:
                self._next()
                raise _Failed(_USAGE, "the servers of the URL have different stores")
        elif status in (401, 403):
            self.close()
            raise _Failed(_UNAVAILABLE, store.get("detail", "the server rejected the token"))
        else:
            raise OSError(None, f"HTTP status {status}")

    def _exchange(self, until, method, path, body, headers, number):
        connection = self.connection
        connection.sock.settimeout(max(until - now(), 0.001))
        if number is not None and self.given_up >= number:
            raise OSError(None, "given up")
        connection.request(method, self.url.base + path, body, headers)
        response = connection.getresponse()
        text = response.read(_LONGEST)
        if not response.isclosed():
            raise ValueError("the answer is too long")
        if connection.sock is None:
            # The server closes this connection.
            self.connection = None
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            # The answer is not from the service but from a proxy. Its text is not shown.
            if response.status < 300:
                raise ValueError("not JSON")
            fields = {}
        return response.status, fields

    def _next(self):
        self.close()
        self.number = (self.number + 1) % len(self.url.hosts)


class Keeper:
    """Acquires, renews and releases the lock of a `Held`. Reports the events of `leasehold hold --json` to it."""

    what = "a thread"
    ends_with_process = False

    def __init__(self, held, store, options):
        self._held = held
        self._store = store
        self._options = options
        # Answers, and () to wake up the thread. It can be used in signal handlers.
        self._inbox = queue.SimpleQueue()
        self._sender = None
        self._asked = 0
        self._is_leaving = self._is_held = self._is_lost = self._is_at_risk = self._is_reported = False
        # Until when the hold is certain, from when it is at risk, and when `max_hold` ends.
        self._deadline = self._risk = self._ends = float("inf")
        # Until when the lock stays unavailable after a release.
        self._keep_until = 0
        # Until when the server may have the claim without a further call.
        self._lives = 0
        # The claims of earlier IDs that the server may still have, and until when.
        self._abandoned = []

    # For the threads of the caller.

    def start(self):
        threading.Thread(target=self._run, name=f"leasehold {self._held.name}", daemon=True).start()

    def release(self):
        """Releases the lock, or leaves the queue, in the background. Safe in signal handlers."""
        self._is_leaving = True
        self._inbox.put(())

    def kill(self):
        """The thread reports an end in time, whatever the server does."""

    def is_over(self):
        """Whether the hold has ended by the clock, perhaps before any thread has noticed."""
        return self._is_held and now() >= min(self._deadline, self._ends)

    def disown(self):
        """In a fork: closes its copy of the connection. The parent's stays open."""
        sock = getattr(self._sender and self._sender.connection, "sock", None)
        if sock:
            sock.close()

    # For the thread of this keeper.

    def _run(self):
        self._held._begin()
        try:
            last = self._keep()
        except _Failed as failed:
            last = {"event": "failed", "code": failed.code, "message": str(failed)}
        except BaseException as error:
            # Only the type, because the text may contain what was received.
            what = f"the thread of the lock has failed: {_why(error)}"
            last = {"event": "failed", "code": _UNAVAILABLE, "message": what}
            if self._is_held:
                # Before it is released.
                self._lose(what)
        try:
            self._leave(last)
        finally:
            if self._sender:
                self._sender.requests.put(None)
            self._report(last)

    def _keep(self):
        """Returns the last event. The claim may still be at the server."""
        url, self._body = _Url(self._store), self._claim()
        self._prefix = url.prefix
        self._body["name"] = url.prefix + self._body["name"]
        self._tries = len(url.hosts) + 1
        self._limit = max(min(_ANSWER[len(url.hosts) > 1], self._lease / 3), 0.02)
        self._new_claim()
        self._sender = _Sender(url, self._inbox)
        try:
            threading.Thread(target=self._sender.run, name=f"leasehold {self._held.name} HTTP", daemon=True).start()
        except RuntimeError as error:
            raise _Failed(71, f"cannot start a thread: {error}") from error
        taken = None if self._is_leaving else self._take()
        if taken is None:
            return {"event": "failed", "code": None, "message": "the wait was cancelled"}
        self._hold(*taken)
        if not self._is_lost:
            return {"event": "released"}
        if self._held.reason == _MAX_HOLD:
            # The holder may still work, so the lock stays unavailable for the lock delay.
            self._keep_until = max(self._keep_until, now() + self._body["lock_delay_ms"] / 1000)
        else:
            # A claim that the server may still have ends when its lease expires.
            self._lives = 0
        return {"event": "lost", "message": self._held.reason}

    def _claim(self):
        """The fields of the claim. `Lock` has checked some of them, and the server checks the others."""
        options = self._options
        shared, exclusive, of, permits = (options[name] for name in ("shared", "exclusive", "max", "permits"))
        lease = options["lease"]
        lease = _LEASE if lease is None else lease
        if not _LEASES[0] <= lease <= _LEASES[1]:
            raise _Failed(_USAGE, f"invalid lease {lease} ms: expected 50 ms to 1 day")
        self._lease = lease / 1000
        claim = {"name": self._held.name, "lease_ms": lease, "waiter_lease_ms": min(lease, _WAITER_LEASE * 1000)}
        claim.update(host=socket.gethostname(), pid=os.getpid(), label=options["label"] or "")
        claim["lock_delay_ms"] = options["lock-delay"] or 0
        if shared or exclusive:
            claim.update(kind="rwlock", **({"weight": 1} if shared else {}))
        elif of is not None:
            claim.update(kind="semaphore", capacity=of, weight=permits or 1)
        return claim

    def _new_claim(self):
        self._abandon()
        self._id = secrets.token_hex(16)
        self._born = now()

    def _abandon(self):
        """Stops using the claim. `_withdraw` releases it."""
        if self._lives:
            self._abandoned.append((self._id, self._lives))
        self._lives = 0

    def _sleep(self, until):
        """Waits until then, or for an answer or a call of `release`. Meanwhile, reports what the clock changes."""
        moment = now()
        while True:
            self._look_at_clock(moment)
            if moment >= until:
                return None
            news = self._deadline if self._is_at_risk else min(self._deadline, self._risk)
            pause = min(until, news, self._ends) - moment if self._is_held else until - moment
            try:
                # The queue's clock does not count a suspend, so not longer than a second.
                return self._inbox.get(timeout=min(max(pause, 0.0005), 1))
            except queue.Empty:
                moment = now()

    def _look_at_clock(self, moment):
        if not self._is_held:
            return
        if self.is_over():
            self._lose(_MAX_HOLD if moment >= self._ends else _EXPIRED)
        elif self._is_at_risk != (moment >= self._risk):
            self._is_at_risk = not self._is_at_risk
            self._say("at_risk" if self._is_at_risk else "recovered")

    def _pause(self, until):
        """Sleeps until then, or until the lock is lost or to be released."""
        while not (self._is_leaving or self._is_lost) and now() < until:
            self._sleep(until)

    def _lose(self, reason):
        self._is_held, self._is_lost = False, True
        self._held._apply({"event": "lost", "reason": reason})

    def _say(self, event, **fields):
        left = min(self._deadline, self._ends) - now()
        deadline = None if left == float("inf") else time.time() + left
        self._held._apply({"event": event, "deadline": deadline, **fields})

    def _report(self, last):
        """Reports the last event, once."""
        if not self._is_reported:
            self._is_reported = True
            self._held._end(last, None, "")

    def _ask(self, method, path, body=None, limit=None, gives_way=False):
        """Sends a request. Returns a time before it was sent, the status and the fields of the answer.

        With `gives_way`, a call of `release` ends it.
        """
        self._asked += 1
        number, sent = self._asked, now()
        until = sent + (limit or self._limit)
        self._sender.requests.put((number, until, method, path, body and json.dumps(body)))
        while True:
            news = None if gives_way and self._is_leaving else self._sleep(until)
            if news is None:
                self._sender.give_up(number)
                what = f"no answer from the server within {_short(until - sent)}"
                status, fields = 0, {"kind": "unreachable", "detail": what}
                break
            if news and news[0] == number:
                status, fields = news[1]
                break
        # A poll renews the claim, too.
        is_kept = path.startswith("/v1/claims") and method != "DELETE"
        is_refused = 400 <= status < 500 and self._lives == 0
        if is_kept and not fields.get("unsent") and not is_refused:
            self._lives = now() + self._lease
        return sent, status, fields

    def _path(self, id_, **more):
        query = {**self._body, **more}
        query = {key: value for key, value in query.items() if value not in ("", 0)}
        return f"/v1/claims/{id_}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}"

    def _take(self):
        """Waits for the lock. Returns a time before the grant was requested, and its fields. None: `release` was called."""
        wait = self._options["wait"]
        heard = now()
        end = float("inf") if wait is None else heard + wait / 1000
        if self._options["min-hold"]:
            self._check_min_hold()
        step, failures, early, error = self._join, 0, 0, None
        self._place = self._others = None
        while True:
            sent, status, fields = step(end)
            if self._is_leaving:
                return None
            moment, pause = now(), 0
            state = fields.get("status") if 200 <= status < 300 else None
            if state in ("held", "waiting", "lost"):
                heard, failures, error = moment, 0, None
            if state == "held":
                if _deadline(sent, fields) - moment > self._lease / 3:
                    return sent, fields
                # Too little time is left. A renewal never joins, so its answer contains the state of the claim.
                step, pause = self._renew, 0.01
            elif state == "waiting":
                if wait == 0:
                    raise _Failed(_NOT_ACQUIRED, f"{json.dumps(self._held.name)} is not free [contended]")
                self._withdraw()
                self._waits(fields, end)
                # A server that shuts down answers early. It must not be polled in a tight loop.
                early = early + 1 if step == self._poll and moment - sent < self._poll_time(end) / 2 else 0
                step, pause = self._poll, _pause(early + 1)
            elif state == "lost":
                self._new_claim()
                step, pause = self._join, 0.01
            else:
                failures += 1
                error = _problem(status, fields)
                if fields.get("retry_after_ms") is not None:
                    # A server that states when to retry is reachable.
                    heard = moment
                # A server that is full has answered, and the lock may be free.
                is_full_at_end = fields.get("kind") == "full" and moment >= end
                is_final = is_full_at_end or moment - heard > max(_PATIENCE, self._lease)
                if wait == 0:
                    is_final = failures >= self._tries
                if is_final or not error.is_transient:
                    raise error
                pause = _pause(failures)
                if step == self._join and moment - self._born > self._body["waiter_lease_ms"] / 1000:
                    # A queue position may have expired unseen. One claim never gets two positions.
                    self._new_claim()
            if moment >= end and wait != 0:
                raise self._timeout(wait, error)
            self._pause(min(moment + pause, end))

    def _check_min_hold(self):
        _, status, store = self._ask("GET", "/v1/store")
        if status == 200 and not store["guarantees"]["min_hold"]:
            raise _Failed(_USAGE, "this store does not support min_hold: it cannot keep a released lock unavailable")

    def _join(self, end):
        mode, limit = "wait", min(self._limit, max(end - now(), _SHORTEST_ANSWER))
        if self._options["wait"] == 0:
            mode, limit = "try", self._limit
        return self._ask("POST", "/v1/claims", {"id": self._id, "mode": mode, "claim": self._body}, limit)

    def _renew(self, _=None):
        body = self._body
        if self._ends < float("inf"):
            # The lease ends soon after `max_hold`, even if this process is paused.
            left = max(self._ends, self._keep_until) - now()
            body = {**body, "lease_ms": min(body["lease_ms"], int(max(left, 0) * 1020) + 5)}
        return self._ask("PUT", f"/v1/claims/{self._id}", body)

    def _poll(self, end):
        wait = self._poll_time(end)
        return self._ask("GET", self._path(self._id, wait=f"{int(wait * 1000)}ms"), None, wait + self._limit, True)

    def _poll_time(self, end):
        # Short enough to poll the next replica before the queue position expires.
        return max(min(self._body["waiter_lease_ms"] / 3000, end - now()), 0)

    def _waits(self, fields, end):
        """Reports the position if it has changed, and the holders to the first waiters."""
        ahead = fields["ahead"]
        if ahead == self._place:
            return
        is_near = self._others is None or "head_remaining_ms" in fields or ahead - self._others < _NEAR
        lock = self._lock(end) if is_near else None
        if self._is_leaving:
            return
        self._place, claims = ahead, (lock or {}).get("claims", [])
        self._others = max(len(claims), 1)
        holders = [_holder(claim) for claim in claims if claim["standing"] == "holding"]
        self._held._apply({"event": "waiting", "ahead": ahead, "held_by": _held_by(lock), "holders": holders})

    def _lock(self, end):
        """The holders of the lock, if the server answers soon."""
        path = f"/v1/locks/{_escaped(self._body['name'])}/holders"
        limit = max(min(1, self._limit, end - now()), 0.02)
        _, status, fields = self._ask("GET", path, None, limit, True)
        return fields.get("lock") if status == 200 else None

    def _timeout(self, wait, error):
        """The error of a wait that has ended. `error` is that of the last request, or None if it succeeded."""
        held_by = _held_by(self._lock(float("inf")))
        if error and not held_by:
            return error
        state = held_by or "not free"
        return _Failed(_NOT_ACQUIRED, f"timed out after {_short(wait / 1000)}: {json.dumps(self._held.name)} is {state}")

    def _hold(self, sent, fields):
        """Renews the lock until it is lost or `release` is called."""
        token, moment, failures = fields["token"], now(), 0
        max_hold, min_hold = self._options["max-hold"], self._options["min-hold"]
        if max_hold is not None:
            self._ends = moment + max_hold / 1000
        if min_hold:
            self._keep_until = moment + min_hold / 1000
        renewal = self._granted(sent, fields)
        self._is_held = True
        self._say("held", token=token, sequencer=self._sequencer(fields["sequencer"]))
        self._withdraw()
        while True:
            self._pause(renewal)
            self._look_at_clock(now())
            if self._is_leaving or self._is_lost:
                return
            sent, status, fields = self._renew()
            state = fields.get("status") if status == 200 else None
            self._look_at_clock(now())
            if self._is_lost:
                # A loss is final, whatever the answer is.
                return
            if state == "held" and fields["token"] == token:
                renewal, failures = self._granted(sent, fields), 0
            elif state in ("held", "waiting", "lost"):
                if state != "lost":
                    # A late copy of the join has made another claim with this ID.
                    self._abandon()
                self._lose(_GONE)
            else:
                # Whether the lease was renewed is unknown, so the deadline stays.
                failures += 1
                renewal = now() + min(_pause(failures), self._lease / 10)

    def _sequencer(self, text):
        """The sequencer as all clients of this URL write it. To them, a prefix is part of the store."""
        if not self._prefix:
            return text
        version, side, token, store, _ = text.split(":")
        return ":".join((version, side, token, store + _escaped(f"/{self._prefix}"), _escaped(self._held.name)))

    def _granted(self, sent, fields):
        """Notes until when a grant is certain. Returns when to renew it."""
        remaining = fields.get("remaining_ms")
        deadline, lease = _deadline(sent, fields), self._lease if remaining is None else remaining / 1000
        self._deadline = max(deadline, self._deadline) if self._is_held else deadline
        self._risk = float("inf") if remaining is None else sent + lease * 2 / 3
        if self._ends < float("inf"):
            self._risk = min(self._risk, self._ends - min(self._lease, self._options["max-hold"] / 1000) / 3)
        return sent + lease / 3

    def _leave(self, last):
        """Releases the claim and the abandoned ones, and then reports the last event.

        Repeats the release until the lease is over. If the server does not answer, the caller does not wait that long.
        """
        self._is_held, self._is_leaving = False, True
        began, failures = now(), 0
        while now() < self._lives or self._abandoned:
            if now() < self._lives:
                keep = int(max(self._keep_until - now(), 0) * 1000)
                _, status, fields = self._ask("DELETE", self._path(self._id, keep_ms=keep))
                if status == 200:
                    self._lives = 0
                    # If the call was repeated, an earlier copy may have released the lock.
                    if last["event"] == "released" and not fields.get("left") and not failures:
                        self._lose(_GONE)
                        last.update(event="lost", message=_GONE)
                elif status not in (0, 401) and not _problem(status, fields).is_transient:
                    # The server has rejected the release, and not only the token, which may change. The caller does
                    # not wait for the next attempts.
                    self._report(last)
            self._withdraw()
            failures += 1
            if now() - began >= _FAREWELL:
                self._report(last)
            until = now() + _pause(failures)
            while now() < until:
                self._sleep(until)

    def _withdraw(self):
        """Releases the abandoned claims, until a request fails."""
        while self._abandoned:
            id_, lives = self._abandoned[0]
            if now() < lives and self._ask("DELETE", self._path(id_))[1] != 200:
                return
            self._abandoned.pop(0)


def _deadline(sent, fields):
    """Until when a grant is certain. Two clocks may run at different rates, so the time is shortened by 1 % and 2 ms."""
    remaining = fields.get("remaining_ms")
    return float("inf") if remaining is None else sent + remaining / 1000 * 0.99 - 0.002


def _pause(failures):
    """How long to wait before a call is repeated. The first time 0, because the connection may have been an old one."""
    return 0 if failures == 1 else min(_PAUSE[0] * 2 ** min(failures - 2, 9), _PAUSE[1])


def _problem(status, fields):
    """The error of an answer, or of a missing one."""
    kind = fields.get("kind")
    if not isinstance(kind, str):
        # The answer is not from the service, but perhaps from a proxy.
        kind = "denied" if status in (401, 403, 407) else "config"
        if status in (408, 425, 429) or status >= 500:
            kind = "unreachable"
        fields = {"detail": f"the server answered with the HTTP status {status}"}
    what = f"{fields.get('detail') or fields.get('title')} [{kind}]"
    return _Failed(_CODES.get(kind, _UNAVAILABLE), what, kind in _TRANSIENT)


def _escaped(name):
    """The name as one segment of a path: every byte that is not a letter or digit is escaped, also the dots."""
    return "".join(c if c.isascii() and c.isalnum() else urllib.parse.quote(c, safe="") for c in name).replace(".", "%2E")


def _holder(claim):
    """A holder as in `leasehold show --json`."""
    remaining = claim.get("remaining_ms")
    return {
        "state": claim["standing"],
        **{key: claim.get(key) for key in ("host", "pid", "token", "weight")},
        "label": claim.get("label", ""),
        "since_seconds": claim["since_ms"] / 1000,
        "remaining_seconds": None if remaining is None else remaining / 1000,
    }


def _held_by(lock):
    """Returns words that follow "is": the holder, or the reason why the lock is unavailable. None if that is unknown."""
    claims = (lock or {}).get("claims", [])
    holders = [claim for claim in claims if claim["standing"] == "holding"]
    departed = [claim for claim in claims if claim["standing"] == "departed"]
    if holders:
        others = f", and by {len(holders) - 1} more" if len(holders) > 1 else ""
        return f"held by {_client(holders[0])} for {_short(holders[0]['since_ms'] / 1000)}{others}"
    if not departed:
        return None
    remaining = departed[0].get("remaining_ms")
    left = "" if remaining is None else f" for {_short(remaining / 1000)} more"
    frozen = lock.get("frozen")
    if frozen is None:
        return f"in cooldown{left}; last held by {_client(departed[0])}"
    return f"frozen{left} by {_printable(departed[0]['host'])}" + (f": {_printable(frozen)}" if frozen else "")


def _client(claim):
    label = claim.get("label")
    return f"{_printable(claim['host'])} pid {claim['pid']}" + (f" ({_printable(label)})" if label else "")


def _printable(text):
    return "".join(c if c.isprintable() else f"\\u{{{ord(c):x}}}" for c in text)


def _short(seconds):
    whole = int(seconds)
    if whole < 1:
        return f"{int(seconds * 1000)}ms"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    return f"{whole // 3600}h {whole % 3600 // 60}m"
