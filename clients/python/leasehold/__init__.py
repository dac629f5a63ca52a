"""Distributed locks with fencing tokens.

    import leasehold

    with leasehold.lock("nightly-report", store="postgres://db/app", wait=30) as held:
        write_report(token=held.token)

    async with leasehold.lock("nightly-report") as held:
        ...

This module starts the command ``leasehold hold`` for each lock. The command waits in the queue and renews the lease.
It releases the lock on request, and when this process ends for whatever reason. The default of ``store`` is
LEASEHOLD_STORE, or ``file:``, a directory on this machine.

Nothing stops a thread when its lock is lost. Check ``held.lost`` before critical steps, or send ``held.token`` to a
resource that rejects smaller tokens than it has seen. A ``with`` block raises ``Lost`` at its end if the lock was lost.

A child created by ``os.fork`` (or by ``multiprocessing`` with fork) inherits the lock's pipes. The lock is then
released when both processes have ended, or when the parent releases it.
"""

import asyncio
import concurrent.futures
import contextvars
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time

__all__ = ["Election", "Error", "Held", "Lock", "Lost", "NotAcquired", "Unavailable", "elect", "lock"]


class Error(Exception):
    """The command failed. ``code`` is its exit code, ``status`` an HTTP status for web services."""

    status = 500

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


class NotAcquired(Error):
    """Another client held the lock during the whole wait (75)."""

    status = 423


class Unavailable(Error):
    """The store is unreachable or unusable (69)."""

    status = 503


class Lost(Error):
    """The lock was held and then lost (74)."""


_ERRORS = {69: Unavailable, 74: Lost, 75: NotAcquired}
# Seconds that the command has to release. It gives up earlier on a store that does not answer.
_FAREWELL = 30
# The first and the longest pause before a candidate rejoins the queue, in seconds.
_PAUSE = (0.1, 10)


def lock(name, **options):
    """Returns a lock of this name: see :class:`Lock`."""
    return Lock(name, **options)


def elect(name, **options):
    """Returns an election for this name: see :class:`Election`."""
    return Election(name, **options)


class Election:
    """Leader election: one candidate leads, and another takes over when it is gone. Options as for :class:`Lock`.

        election = leasehold.elect("books", store=URL)
        for term in election:           # waits until it leads; term is a Held, its token is the term's number
            while election.leads(0.1):  # sleeps 0.1 s; False when the term has ended or `stop` was called
                write_entry(token=term.token)

    At the end of the loop's body, the candidate releases the lock and rejoins the queue, after a pause that grows while
    terms are short. It retries through outages of any length. An exception in the body ends the loop and the term.
    """

    def __init__(self, name, **options):
        self._lock = Lock(name, **options)
        #: The :class:`Held` of the current term, or None.
        self.term = None
        self._stopped = threading.Event()
        self._candidate = None

    def stop(self):
        """Ends the loop. A wait ends immediately, a term when its body calls :meth:`leads`. Safe in any thread and in signal handlers."""
        self._stopped.set()
        candidate = self._candidate
        if candidate and not self.term:
            candidate._abandon()

    def leads(self, pause=0):
        """Sleeps this many seconds and returns whether the term continues. Returns earlier if `stop` is called."""
        self._stopped.wait(pause)
        return not self._stopped.is_set() and self.term is not None and not self.term.lost.is_set()

    def __iter__(self):
        pause, longest = _PAUSE
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                yield from self._one_term()
            except Error as error:
                # A command that was killed can be restarted. One that does not exist, or rejects its options, cannot.
                may_pass = error.code in _ERRORS or (error.code or 0) < 0
                if not may_pass and not self._stopped.is_set():
                    raise
            if time.monotonic() - began > longest:
                pause = _PAUSE[0]
            self._stopped.wait(pause)
            pause = min(2 * pause, longest)

    def _one_term(self):
        candidate = self._candidate = self._lock._start()
        try:
            if self._stopped.is_set():
                return
            self.term = candidate._granted.result()
            yield self.term
            self.term = None
            candidate.release()
        finally:
            self.term = None
            candidate._abandon()


class Lock:
    """A lock with its options. It can be acquired repeatedly, and by several threads at once.

    All times are in seconds.

    - ``store``: the URL of the store
    - ``wait``: the longest wait; None: no limit; 0: do not wait
    - ``lease``: the time until the lock of a crashed machine is freed
    - ``max_hold``: the longest hold
    - ``at_least``: the shortest hold: the lock stays taken for this long even if it is released earlier
    - ``lock_delay``: how long the lock stays unavailable after a crash
    - ``shared``, ``exclusive``: the two sides of a read-write lock
    - ``of``, ``permits``: the size of a semaphore, and how many permits to take
    - ``label``: text that other clients see for this holder
    - ``on_waiting``: called with the :class:`Held` when it joins the queue and whenever its place changes
    - ``on_lost``: called with the :class:`Held` when the lock is lost
    - ``command``: the path of the ``leasehold`` program

    The callbacks run in a background thread.
    """

    def __init__(
        self,
        name,
        *,
        store=None,
        wait=None,
        lease=None,
        max_hold=None,
        at_least=None,
        lock_delay=None,
        shared=False,
        exclusive=False,
        of=None,
        permits=None,
        label=None,
        on_waiting=None,
        on_lost=None,
        command=None,
    ):
        seconds = {"wait": wait, "lease": lease, "max-hold": max_hold, "min-hold": at_least, "lock-delay": lock_delay}
        # The command reads durations to the millisecond.
        words = [f"--{option}={round(value * 1000)}ms" for option, value in seconds.items() if value is not None]
        words += ["--shared"] if shared else []
        words += ["--exclusive"] if exclusive else []
        numbers = {"max": of, "permits": permits, "label": label}
        words += [f"--{option}={value}" for option, value in numbers.items() if value is not None]
        self.name = name
        self._words = [command or _command(), "hold", "--json", *words, "--", name]
        # In the environment, because all users can read command lines, and a URL may contain a password.
        self._environment = {**os.environ, **({"LEASEHOLD_STORE": store} if store is not None else {})}
        self._on_waiting = on_waiting
        self._on_lost = on_lost
        # Entered and not yet left, for code that leaves in another context than it entered in.
        self._entries = []
        self._entries_lock = threading.Lock()

    def acquire(self):
        """Acquires the lock and returns a :class:`Held`."""
        held = self._start()
        try:
            return held._granted.result()
        except BaseException:
            held._abandon()
            raise

    async def acquire_async(self):
        """Like :meth:`acquire`, for asyncio. If it is cancelled, no lock is taken."""
        held = self._start()
        try:
            return await asyncio.wrap_future(held._granted)
        except BaseException:
            held._abandon()
            raise

    def _start(self):
        return Held(self.name, self._words, self._environment, self._on_waiting, self._on_lost)

    def __enter__(self):
        return self._entered(self.acquire())

    def __exit__(self, kind, error, trace):
        try:
            self._left().release()
        except Lost:
            # An exception from the body is more useful.
            if kind is None:
                raise

    async def __aenter__(self):
        return self._entered(await self.acquire_async())

    async def __aexit__(self, kind, error, trace):
        try:
            # The release continues if the task is cancelled again.
            await asyncio.shield(asyncio.wrap_future(self._left()._leave()))
        except Lost:
            if kind is None:
                raise

    def _entered(self, held):
        _ENTERED.set((*_ENTERED.get(), held))
        with self._entries_lock:
            self._entries.append(held)
        return held

    def _left(self):
        with self._entries_lock:
            ours = [held for held in _ENTERED.get() if held in self._entries]
            held = (ours or self._entries)[-1]
            self._entries.remove(held)
        _ENTERED.set(tuple(other for other in _ENTERED.get() if other is not held))
        return held


# The locks that this thread or task has entered: several may enter one lock at once. (A generator that leaves in another
# context than it entered in finds its own lock only if no other has entered: give each its own `Lock`.)
_ENTERED = contextvars.ContextVar("leasehold", default=())


class Held:
    """An acquired lock, until it is released or lost."""

    def __init__(self, name, words, environment, on_waiting, on_lost):
        self.name = name
        #: The fencing token: each holder gets a higher one.
        self.token = None
        #: The hold as a string, for ``leasehold verify``.
        self.sequencer = None
        #: ``waiting``, ``held``, ``at_risk``, ``lost`` or ``released``.
        self.state = "waiting"
        #: How many claims are ahead in the queue, while it waits.
        self.ahead = None
        #: Who holds the lock, or why it is unavailable, in words, when the place in the queue last changed. None
        #: further back in the queue than the first three waiters, except when the wait begins.
        self.held_by = None
        #: The holders, as dictionaries like in ``leasehold show --json`` (host, pid, label, token, since_seconds, …).
        #: Empty if ``held_by`` is None.
        self.holders = []
        #: The time until which the lock is guaranteed even if no further renewal succeeds, in seconds since 1970, as
        #: of the last event (``held``, ``at_risk``, ``recovered``). None: no limit.
        self.deadline = None
        #: Set when the lock is lost.
        self.lost = threading.Event()
        #: Why it was lost.
        self.reason = None
        self._on_waiting = on_waiting
        self._on_lost = on_lost
        self._granted = concurrent.futures.Future()
        self._ended = concurrent.futures.Future()
        self._leaving = False
        self._owner = os.getpid()
        try:
            # In a session of its own: Ctrl-C must reach only this process, which may have to clean up under the lock.
            self._process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Error(f"cannot start {words[0]}: {error}") from error
        threading.Thread(target=self._follow, name=f"leasehold {name}", daemon=True).start()

    def check(self):
        """Raises ``Lost`` if the lock was lost. Does not contact the store."""
        if self.lost.is_set():
            raise self._loss()

    def release(self):
        """Releases the lock. Raises ``Lost`` if it was lost before. A second call has the same result."""
        if os.getpid() != self._owner:
            # A fork of the process that acquired it must not release it.
            return self._abandon()
        return self._leave().result()

    async def until_lost(self):
        """Returns when the lock is lost or released."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._ended))
        except Lost:
            pass

    def _loss(self):
        return Lost(f"lost {self.name!r}: {self.reason}", 74)

    def _leave(self):
        self._abandon()
        # If the command hangs, it is killed, and the lease ends its hold.
        timer = threading.Timer(_FAREWELL, self._process.kill)
        timer.daemon = True
        timer.start()
        self._ended.add_done_callback(lambda _: timer.cancel())
        return self._ended

    def _abandon(self):
        """Makes the command release the lock or leave the queue."""
        self._leaving = True
        try:
            if os.getpid() == self._owner:
                # A fork may have the command's stdin open as well, so closing it is not enough.
                self._process.stdin.write(b"release\n")
            self._process.stdin.close()
        except (OSError, ValueError):
            pass

    def _follow(self):
        last, said = {}, ""
        try:
            for line in self._process.stdout:
                last = json.loads(line)
                if not isinstance(last, dict):
                    last = {}
                    raise ValueError(line)
                self._apply(last)
            said = self._process.stderr.read().decode(errors="replace").strip()
        except (ValueError, KeyError, TypeError):
            said = f"unexpected output from {self._process.args[0]}: it is not the leasehold command"
            self._process.kill()
        finally:
            code = self._process.wait()
            self._process.stdout.close()
            self._process.stderr.close()
            self._end(last, code, said)

    def _apply(self, line):
        event = line["event"]
        if event == "waiting":
            self.ahead, self.held_by, self.holders = line["ahead"], line.get("held_by"), line.get("holders", [])
            if self._on_waiting:
                _call(self._on_waiting, self)
        elif event == "held":
            self.token, self.sequencer, self.state = line["token"], line["sequencer"], "held"
            self.deadline = line.get("deadline")
            # If the wait was cancelled, stdin is closed already, and the command releases the lock.
            if self._granted.set_running_or_notify_cancel():
                self._granted.set_result(self)
        elif event in ("at_risk", "recovered") and self.state != "lost":
            self.state = "at_risk" if event == "at_risk" else "held"
            self.deadline = line.get("deadline")
        elif event == "lost":
            # Immediately: the command may take a while to end if the store does not answer.
            self._lose(line["reason"])

    def _end(self, last, code, said):
        if self.token is None:
            # It was never held.
            message = last.get("message") or said or f"leasehold exited with {code}"
            if not self._granted.cancelled() and self._granted.set_running_or_notify_cancel():
                self._granted.set_exception(_ERRORS.get(code, Error)(message, code))
            self._ended.set_result(None)
        elif last.get("event") == "released":
            self.state = "released"
            self._ended.set_result(None)
        else:
            # No last line: the command was killed, and the lock is no longer renewed.
            self._lose(said or f"the leasehold process exited with {code}")

    def _lose(self, reason):
        if self.state == "lost":
            return
        self.state, self.reason = "lost", reason
        self.lost.set()
        self._ended.set_exception(self._loss())
        if self._on_lost and not self._leaving:
            _call(self._on_lost, self)

    def __repr__(self):
        return f"<leasehold.Held {self.name!r} {self.state} token={self.token}>"


def _call(callback, held):
    """Runs a callback. Its exceptions are reported like those of a thread."""
    try:
        callback(held)
    except Exception:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _command():
    named = os.environ.get("LEASEHOLD_COMMAND")
    beside = os.path.join(sysconfig.get_path("scripts"), "leasehold")
    found = named or (beside if os.access(beside, os.X_OK) else shutil.which("leasehold"))
    if not found:
        raise Error("the leasehold command is not in the PATH: install it, or set LEASEHOLD_COMMAND to its path")
    return found
