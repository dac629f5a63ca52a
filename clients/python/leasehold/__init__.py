"""Distributed locks with fencing tokens.

    import leasehold

    with leasehold.lock("nightly-report", store="postgres://db/app", wait=30) as held:
        write_report(token=held.token)

    async with leasehold.lock("nightly-report") as held:
        ...

This module starts the command ``leasehold hold`` for each lock. The command waits in the queue and renews the lease.
It releases the lock on request, and when this process ends for whatever reason. The default of ``store`` is
LEASEHOLD_STORE, or ``file:``, a directory on this machine.

If the store is the URL of a ``leasehold serve`` (``http:``, ``https:`` or ``http+unix:``), this module connects to it and
needs no command. Two threads of this process keep each lock. If the process is killed, the lease ends the hold.

Nothing stops a thread when its lock is lost. Check ``held.lost`` before critical steps, or send ``held.token`` to a
resource that rejects smaller tokens than it has seen. A ``with`` block raises ``Lost`` at its end if the lock was lost.

A lock belongs to the process that acquired it. In a child created by ``os.fork`` (or by ``multiprocessing`` with fork)
the lock counts as lost, ``release`` has no effect, and the child does not keep the lock when its parent ends.

A lock that no variable refers to stays held until it is released or the process ends.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import errno
import io
import json
import operator
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import threading
import time

__all__ = ["Election", "Error", "Held", "Lock", "Lost", "NotAcquired", "Unavailable", "elect", "lock"]


class Error(Exception):
    """The lock was not acquired or was lost. ``code`` is the exit code of the command, ``status`` an HTTP status for web services.

    A negative code is the signal that killed the command. None: it could not be started, or its exit code is unknown.
    """

    status = 500
    # Whether a candidate retries after this error.
    _passes = False

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


class NotAcquired(Error):
    """Another client held the lock during the whole wait (75)."""

    status = 423
    _passes = True


class Unavailable(Error):
    """The store is unreachable or unusable (69)."""

    status = 503
    _passes = True


class Lost(Error):
    """The lock was held and then lost (74)."""

    _passes = True


_ERRORS = {69: Unavailable, 74: Lost, 75: NotAcquired}
# The exit code when the system has no more processes, files or memory, and the errors that mean the same.
_SYSTEM = 71
_SHORTAGES = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Seconds that the command has to release. It gives up earlier on a store that does not answer.
_FAREWELL = 30
# Seconds that all servers together have to release locks at exit.
_AT_EXIT = 5
# The longest time in seconds. The command counts nanoseconds in 64 bits.
_CENTURY = 100 * 365 * 86400
# The largest number of permits.
_MOST = 2**32 - 1
# Why a `Held` ends that was not released by this process, and why a wait ends that this process gave up.
_ENDED = "another process ended the leasehold process"
_CANCELLED = "the wait was cancelled"
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
        self._stopped = False
        # Not an `Event`: a signal handler that sets one may interrupt its wait, and then waits forever for its lock.
        self._wakeups = queue.SimpleQueue()
        self._candidate = None

    def stop(self):
        """Ends the loop. A wait ends immediately, a term when its body calls :meth:`leads`. Safe in any thread and in signal handlers."""
        self._stopped = True
        self._wakeups.put(None)
        candidate = self._candidate
        if candidate and not self.term:
            candidate._abandon()

    def leads(self, pause=0):
        """Sleeps this many seconds and returns whether the term continues. Returns earlier if `stop` is called."""
        self._sleep(pause)
        term = self.term
        return not self._stopped and term is not None and not term.lost.is_set()

    def _sleep(self, pause):
        endless = pause is None or pause > _CENTURY
        try:
            self._wakeups.get(timeout=None if endless else max(pause, 0))
            # For other threads, and for the next call.
            self._wakeups.put(None)
        except queue.Empty:
            pass

    def __iter__(self):
        pause, longest = _PAUSE
        while not self._stopped:
            began = time.monotonic()
            try:
                yield from self._one_term()
            except Error as error:
                # A command that was killed can be restarted. One that does not exist, or rejects its options, cannot.
                if not error._passes and not self._stopped:
                    raise
            if time.monotonic() - began > longest:
                pause = _PAUSE[0]
            self._sleep(pause)
            pause = min(2 * pause, longest)

    def _one_term(self):
        candidate = self._candidate = self._lock._claim()
        try:
            if self._stopped:
                return
            candidate._start()
            if self._stopped:
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

    All times are in seconds. They are rounded to milliseconds.

    - ``store``: the URL of the store
    - ``wait``: the longest wait; None or infinity: no limit; 0: do not wait
    - ``lease``: the time until the lock of a crashed machine is freed
    - ``max_hold``: the longest hold; None or infinity: no limit
    - ``min_hold``: the shortest hold: the lock stays taken for this long even if it is released earlier
    - ``lock_delay``: how long the lock stays unavailable after a crash
    - ``shared``, ``exclusive``: the two sides of a read-write lock
    - ``of``, ``permits``: the size of a semaphore, and how many permits to take
    - ``label``: text that other clients see for this holder
    - ``on_waiting``: called with the :class:`Held` when it joins the queue and whenever its place changes
    - ``on_lost``: called with the :class:`Held` when the lock is lost
    - ``command``: the path of the ``leasehold`` program; it is used for servers too, if it is given

    The callbacks run in a background thread. `on_waiting` may call ``release`` to end the wait: ``acquire`` then raises
    :class:`Error`.

    Raises ``ValueError`` or ``TypeError`` with the name of an invalid option.
    """

    def __init__(
        self,
        name,
        *,
        store=None,
        wait=None,
        lease=None,
        max_hold=None,
        min_hold=None,
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
        options = {
            "wait": _milliseconds("wait", wait, endless=True),
            "lease": _milliseconds("lease", lease, positive=True),
            "max-hold": _milliseconds("max_hold", max_hold, endless=True, positive=True),
            "min-hold": _milliseconds("min_hold", min_hold),
            "lock-delay": _milliseconds("lock_delay", lock_delay),
            "max": _whole("of", of),
            "permits": _whole("permits", permits),
            "label": _unicode("label", label),
        }
        options.update(shared=bool(shared), exclusive=bool(exclusive))
        if options["shared"] and options["exclusive"]:
            raise ValueError("shared and exclusive exclude each other: set one of them")
        if of is not None and (shared or exclusive):
            raise ValueError(f"of and {'shared' if shared else 'exclusive'} exclude each other: set one of them")
        if permits is not None and of is None:
            raise ValueError("permits requires of, the size of the semaphore")
        if name is None:
            raise TypeError("name must be a string, not None")
        self.name = _unicode("name", name)
        _text("store", store, is_secret=True)
        if store == "":
            raise ValueError("store is empty: is the variable set? For this machine's locks, use file:")
        url = _store() if store is None else store
        if command is None and url.startswith(("http:", "https:", "http+unix:")):
            # Imported only when it is needed, because it loads TLS.
            from . import _http

            self._keeper = lambda held: _http.Keeper(held, url, options)
        else:
            program = command or _command()
            self._keeper = lambda held: _Command(held, program, store, options)
        self._on_waiting = on_waiting
        self._on_lost = on_lost
        # Locks whose `with` block has not ended, for code that leaves the block in another context.
        self._entries = []

    def acquire(self):
        """Acquires the lock and returns a :class:`Held`. If an exception interrupts it, no lock is taken."""
        return self._acquire(lambda held: held)

    async def acquire_async(self):
        """Like :meth:`acquire`, for asyncio. If it is cancelled, no lock is taken."""
        return await self._acquire_async(lambda held: held)

    def _acquire(self, then):
        held = self._claim()
        try:
            held._start()
            return then(held._granted.result())
        except BaseException:
            held._abandon()
            raise

    async def _acquire_async(self, then):
        held = self._claim()
        try:
            held._start()
            await _done(held._granted)
            return then(held._granted.result())
        except BaseException:
            held._abandon()
            raise

    def _claim(self):
        return Held(self.name, self._keeper, self._on_waiting, self._on_lost)

    def __enter__(self):
        return self._acquire(self._entered)

    def __exit__(self, kind, error, trace):
        held = self._left()
        try:
            held.release()
        except Lost:
            # An exception from the body is more useful.
            if kind is None:
                raise
        except BaseException:
            # The exception may have interrupted the release at its beginning.
            held._abandon()
            raise

    async def __aenter__(self):
        return await self._acquire_async(self._entered)

    async def __aexit__(self, kind, error, trace):
        try:
            await self._left().release_async()
        except Lost:
            if kind is None:
                raise

    def _entered(self, held):
        _ENTERED.set((*_ENTERED.get(), held))
        with _ENTRIES:
            self._entries.append(held)
        return held

    def _left(self):
        with _ENTRIES:
            ours = [held for held in _ENTERED.get() if held in self._entries]
            held = (ours or self._entries)[-1]
            self._entries.remove(held)
        _ENTERED.set(tuple(other for other in _ENTERED.get() if other is not held))
        return held


# The locks that this thread or task has entered: several may enter one lock at once. (A generator that leaves in another
# context than it entered in finds its own lock only if no other has entered: give each its own `Lock`.)
_ENTERED = contextvars.ContextVar("leasehold", default=())
# Guards the entries of all locks.
_ENTRIES = threading.Lock()


class _Loss(threading.Event):
    """Set when the lock is lost. `is_set` also reads the clock, in case no other thread has had the chance to."""

    def __init__(self, held):
        super().__init__()
        self._held = held

    def is_set(self):
        return super().is_set() or self._held._keeper.is_over()


class Held:
    """An acquired lock, until it is released or lost."""

    def __init__(self, name, keeper, on_waiting, on_lost):
        self.name = name
        #: The fencing token: each holder gets a higher one.
        self.token = None
        #: The hold as a string, for ``leasehold verify``.
        self.sequencer = None
        #: ``waiting``, ``held``, ``at_risk``, ``lost`` or ``released``.
        self.state = "waiting"
        #: How many claims are ahead in the queue, while it waits.
        self.ahead = None
        #: In words, the holders or the reason why the lock is unavailable, when the place in the queue last changed.
        #: After the wait has begun, only the first three waiters get it; for others it is None.
        self.held_by = None
        #: The holders, as dictionaries like in ``leasehold show --json`` (host, pid, label, token, since_seconds, …).
        #: Empty if ``held_by`` is None.
        self.holders = []
        #: The time until which the lock is guaranteed even if no further renewal succeeds, in seconds since 1970, as
        #: of the last event (``held``, ``at_risk``, ``recovered``). None: no limit.
        self.deadline = None
        #: Set when the lock is lost.
        self.lost = _Loss(self)
        #: Why it was lost.
        self.reason = None
        self._on_waiting = on_waiting
        self._on_lost = on_lost
        self._granted = concurrent.futures.Future()
        self._ended = concurrent.futures.Future()
        self._leaving = False
        self._owner = os.getpid()
        # The thread that keeps the lock and calls the callbacks.
        self._thread = None
        # What acquires, renews and releases the lock. It reports the events of `leasehold hold --json`.
        self._keeper = keeper(self)

    def _start(self):
        """Starts to acquire. After any exception, also one of a signal handler, the caller calls :meth:`_abandon`."""
        try:
            self._keeper.start()
        except (OSError, RuntimeError) as error:
            # RuntimeError: no more threads, or the interpreter shuts down.
            lacks = isinstance(error, RuntimeError) or error.errno in _SHORTAGES
            raise _error(f"cannot start {self._keeper.what}: {error}", _SYSTEM if lacks else None) from error

    def check(self):
        """Raises ``Lost`` if the lock was lost, or if this process is a fork. Does not contact the store."""
        if self.lost.is_set() or self._is_forked():
            raise self._loss()

    def release(self):
        """Releases the lock. Raises ``Lost`` if it was lost before. A second call has the same result.

        It has no effect in a fork of the process that acquired the lock. At interpreter shutdown, after the `atexit`
        handlers, it does not wait for the result. In `on_waiting`, it begins to leave the queue and returns.
        """
        self._abandon()
        if self._is_forked() or sys.is_finalizing() or self._is_in_callback():
            return
        try:
            self._ended.result(_FAREWELL)
        except concurrent.futures.TimeoutError:
            self._keeper.kill()
            self._ended.result()
        self.check()

    async def release_async(self):
        """Like :meth:`release`, for asyncio. If it is cancelled, the release continues in the background."""
        self._abandon()
        if self._is_forked() or self._is_in_callback():
            return
        try:
            await asyncio.wait_for(_done(self._ended), _FAREWELL)
        except asyncio.TimeoutError:
            self._keeper.kill()
            await _done(self._ended)
        self.check()

    async def until_lost(self):
        """Returns when the lock is lost or released."""
        await _done(self._ended)

    def _is_forked(self):
        return os.getpid() != self._owner

    def _is_in_callback(self):
        """Whether this is the thread that keeps the lock. It cannot wait for its own end."""
        return threading.get_ident() == self._thread and not self._ended.done()

    def _loss(self):
        if self._is_forked():
            self.reason = f"it belongs to process {self._owner}, and this process is a fork of it"
        return Lost(f"lost {self.name!r}: {self.reason or 'its lease expired'}", 74)

    def _abandon(self):
        """Releases the lock or leaves the queue, in the background. Safe in signal handlers. No effect in a fork."""
        self._leaving = True
        if not self._is_forked():
            self._keeper.release()

    def _disown(self):
        """In a fork, which has none of the threads that keep the lock: the lock is not this process's."""
        self._keeper.disown()
        # New ones: another thread may have had the locks of the old ones.
        self.lost, self._ended = threading.Event(), concurrent.futures.Future()
        self.state = "lost"
        self._loss()
        self.lost.set()
        self._ended.set_result(None)

    def _begin(self):
        """Called by the thread of the keeper when it has begun."""
        self._thread = threading.get_ident()
        _LIVE.add(self)

    def _apply(self, line):
        event = line["event"]
        if event == "waiting":
            self.ahead, self.held_by, self.holders = line["ahead"], line.get("held_by"), line.get("holders", [])
            if self._on_waiting:
                _call(self._on_waiting, self)
        elif event == "held" and self._leaving:
            # The wait was cancelled, and the keeper already releases the lock. `_end` reports that.
            pass
        elif event == "held":
            self.token, self.sequencer, self.state = line["token"], line["sequencer"], "held"
            self.deadline = line.get("deadline")
            self._granted.set_result(self)
        elif event in ("at_risk", "recovered") and self.state != "lost":
            self.state = "at_risk" if event == "at_risk" else "held"
            self.deadline = line.get("deadline")
        elif event == "lost":
            # Immediately: the command may take a while to end if the store does not answer.
            self._lose(line["reason"])

    def _end(self, last, code, said):
        """Called when the keeper has ended, with its last event, and a command's exit code and error output."""
        _LIVE.discard(self)
        event = last.get("event")
        if self.token is None:
            # The lock was never held. The last line contains the reason. Without one, the exit code does. It is 0 in a
            # process that ignores SIGCHLD or whose children are reaped elsewhere.
            failed = event == "failed"
            code = last.get("code") if failed else code or None
            message = last.get("message") or said or f"the leasehold process ended without a result (exit code {code})"
            was_killed = not failed and (code is None or code < 0)
            was_cancelled = not failed and self._leaving
            self._granted.set_exception(Error(_CANCELLED) if was_cancelled else _error(message, code, was_killed))
            # A grant that came after the wait was cancelled may be lost.
            if not self._ended.done():
                self._ended.set_result(None)
        elif event == "released":
            self.state = "released"
            self._ended.set_result(None)
        else:
            # No last line: the command was killed, and the lock is no longer renewed.
            self._lose(last.get("message") or said or "the leasehold process was killed")

    def _lose(self, reason):
        if self.state == "lost":
            return
        self.state, self.reason = "lost", reason
        self.lost.set()
        self._ended.set_result(None)
        if self._on_lost and not self._leaving:
            _call(self._on_lost, self)

    def __repr__(self):
        return f"<leasehold.Held {self.name!r} {self.state} token={self.token}>"


class _Command:
    """Keeps the lock of a `Held` by the command ``leasehold hold``."""

    ends_with_process = True

    def __init__(self, held, command, store, options):
        values = {option: value for option, value in options.items() if value is not None and value is not False}
        times = ("wait", "lease", "max-hold", "min-hold", "lock-delay")
        words = [
            f"--{option}" if value is True else f"--{option}={value}{'ms' if option in times else ''}"
            for option, value in values.items()
        ]
        self._held = held
        self.what = command
        # A fork has the same pipes open, so the command also watches this process.
        self.words = [command, "hold", "--json", f"--caller={os.getpid()}", *words, "--", held.name]
        # In the environment, because all users can read command lines, and a URL may contain a password.
        self._environment = {**os.environ, **({"LEASEHOLD_STORE": store} if store is not None else {})}
        self.process = None
        # Guards stdin, whose number may belong to another file after it is closed. Reentrant, for signal handlers.
        self._stdin = threading.RLock()
        # Whether this process requested the release while the command was running.
        self._is_requested = False

    def start(self):
        # In a session of its own: Ctrl-C must reach only this process, which may have to clean up under the lock.
        # Without buffers, which have locks that another thread may hold during a fork.
        self.process = subprocess.Popen(
            self.words,
            bufsize=0,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, name=f"leasehold {self._held.name}", daemon=True).start()

    def release(self):
        if self.process is not None:
            with self._stdin:
                self._ask_for_release()

    def kill(self):
        """Ends a command that hangs. Its hold ends when the lease expires."""
        self.process.kill()

    def is_over(self):
        """Returns False, because the command reports the end."""
        return False

    def disown(self):
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()

    def _ask_for_release(self):
        if self.process.stdin.closed:
            return
        # An exception may have interrupted an earlier call after its write.
        is_repeated, self._is_requested = self._is_requested, True
        try:
            # A fork may have the command's stdin open as well, so closing it is not enough.
            self.process.stdin.write(b"release\n")
        except OSError:
            # The command ended before the request.
            self._is_requested = is_repeated
        except ValueError:
            # A signal handler has released the lock meanwhile.
            pass
        finally:
            self.process.stdin.close()

    def _has_requested(self):
        with self._stdin:
            return self._is_requested

    def _follow(self):
        self._held._begin()
        last, said = {}, ""
        process = self.process
        try:
            with io.BufferedReader(process.stdout) as lines:
                for line in lines:
                    last = json.loads(line)
                    if not isinstance(last, dict):
                        raise ValueError(line)
                    if last["event"] == "released" and not self._has_requested():
                        # The command received a signal. Another client may hold the lock now.
                        last = {"event": "lost", "reason": _ENDED}
                    self._held._apply(last)
            said = process.stderr.read().decode(errors="replace").strip()
        except (ValueError, KeyError, TypeError):
            message = f"unexpected output from {self.words[0]}: it is not the leasehold command"
            last = {"event": "failed", "code": None, "message": message}
            process.kill()
        finally:
            code = process.wait()
            with self._stdin:
                process.stdin.close()
            process.stdout.close()
            process.stderr.close()
            self._held._end(last, code, said)


# All locks that a keeper has.
_LIVE = set()


def _forked():
    """In a fork: closes the copies of pipes and connections, and disowns the locks."""
    global _ENTRIES
    # A new one, because another thread may have had the old one.
    _ENTRIES = threading.Lock()
    for held in tuple(_LIVE):
        held._disown()
    _LIVE.clear()


def _at_exit():
    """Releases the locks that would otherwise stay taken until their leases expire."""
    end = time.monotonic() + _AT_EXIT
    kept = [held for held in tuple(_LIVE) if not held._keeper.ends_with_process]
    for held in kept:
        held._abandon()
    for held in kept:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            held._ended.result(max(end - time.monotonic(), 0))


os.register_at_fork(after_in_child=_forked)
atexit.register(_at_exit)


def _error(message, code, was_killed=False):
    error = _ERRORS.get(code, Error)(message, code)
    error._passes |= was_killed or code == _SYSTEM
    return error


async def _done(future):
    """Waits for another thread's future. Not with `asyncio.wrap_future`, which logs an error if the loop is closed."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_):
        try:
            loop.call_soon_threadsafe(lambda: waiter.done() or waiter.set_result(None))
        except RuntimeError:
            # The loop is closed.
            pass

    future.add_done_callback(wake)
    await waiter


def _text(name, value, is_secret=False):
    """A string that a command line and a request can contain, or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__ if is_secret else repr(value)}")
    if "\0" in value:
        raise ValueError(f"{name} contains a NUL character" + ("" if is_secret else f": {value!r}"))
    return value


def _unicode(name, value):
    """A string of Unicode characters, or None."""
    try:
        (_text(name, value) or "").encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} contains characters that are not Unicode: {value!r}") from None
    return value


def _milliseconds(name, value, endless=False, positive=False):
    """A time in whole milliseconds. None: not given, or no limit."""
    if value is None:
        return None
    try:
        if isinstance(value, (bool, bytes, str)):
            raise TypeError
        seconds = float(value)
    except OverflowError:
        seconds = float("inf") if value > 0 else float("-inf")
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None
    if endless and seconds > _CENTURY:
        return None
    if not 0 <= seconds <= _CENTURY:
        raise ValueError(f"{name} must be between 0 seconds and 100 years, not {value!r}")
    if positive and not seconds:
        raise ValueError(f"{name} must be more than 0 seconds, not {value!r}")
    # 0 has a meaning of its own, so a shorter time than a millisecond does not become 0.
    return round(seconds * 1000) or (1 if seconds else 0)


def _whole(name, value):
    """A whole number, or None."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {value!r}")
    if number > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}, not {value!r}")
    return number


def _call(callback, held):
    """Runs a callback. Its exceptions are reported like those of a thread."""
    try:
        callback(held)
    except Exception:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _store():
    """The URL of the default store, or nothing."""
    url, file = os.environ.get("LEASEHOLD_STORE"), os.environ.get("LEASEHOLD_STORE_FILE")
    if url or not file:
        return url or ""
    try:
        with open(file, encoding="utf8") as text:
            return text.read().strip()
    except (OSError, ValueError):
        # The command reports the error.
        return ""


def _command():
    named = os.environ.get("LEASEHOLD_COMMAND")
    beside = os.path.join(sysconfig.get_path("scripts"), "leasehold")
    found = named or (beside if os.access(beside, os.X_OK) else shutil.which("leasehold"))
    if not found:
        raise Error("the leasehold command is not in the PATH: install it, or set LEASEHOLD_COMMAND to its path")
    return found
