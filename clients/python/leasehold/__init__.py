"""Locks for programs on more than one thread, process or machine.

    import leasehold

    with leasehold.lock("nightly-report", store="postgres://db/app", wait=30) as held:
        write_report(token=held.token)

    async with leasehold.lock("nightly-report") as held:
        ...

The lock is held by the command ``leasehold hold``, which this module starts and follows: it waits its turn,
renews the lease, and gives the lock back when it is told to, or when this process is gone, however that came.
Without a ``store`` it is what LEASEHOLD_STORE says, or else ``file:``, a directory on this machine.

Nothing stops a thread when its lock is lost: look at ``held.lost`` before what matters, or give ``held.token``
to a resource that refuses the smaller of two. At the end of the ``with``, a lock that was lost meanwhile
raises ``Lost``.

A child made by ``os.fork`` (and ``multiprocessing`` by fork) has the lock's pipes open too: the lock is then
given back when both are gone, or when the parent releases it.
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
    """The command said no. ``code`` is its exit code, the message its own line, ``status`` what a web service answers."""

    status = 500

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


class NotAcquired(Error):
    """Somebody else held the lock for as long as was waited (75)."""

    status = 423


class Unavailable(Error):
    """The store cannot be reached or used (69)."""

    status = 503


class Lost(Error):
    """The lock was held, and is not any more (74)."""


_ERRORS = {69: Unavailable, 74: Lost, 75: NotAcquired}
# How long the command has to say that it has released: it gives up on a silent store before that.
_FAREWELL = 30
# How long a candidate pauses before it stands again, at first and at most.
_PAUSE = (0.1, 10)


def lock(name, **options):
    """A lock of this name; see :class:`Lock`."""
    return Lock(name, **options)


def elect(name, **options):
    """An election for this name; see :class:`Election`."""
    return Election(name, **options)


class Election:
    """One of many leads, and when it is gone another takes over. The options are those of :class:`Lock`.

        election = leasehold.elect("books", store=URL)
        for term in election:           # waits until it leads; term is a Held, its token the term's number
            while election.leads(0.1):  # sleeps so long; False when the term is over, or `stop` was called
                write_entry(token=term.token)

    At the end of the loop's body the term is given back, and it stands again, after a pause that grows while terms are
    short, and through outages of any length. What the body raises ends the loop, and the term with it.
    """

    def __init__(self, name, **options):
        self._lock = Lock(name, **options)
        #: The :class:`Held` of the term that is led now, or None.
        self.term = None
        self._stopped = threading.Event()
        self._stands = None

    def stop(self):
        """Ends the loop: the waiting at once, a term when its body looks. From any thread, and from a signal's handler."""
        self._stopped.set()
        stands = self._stands
        if stands and not self.term:
            stands._abandon()

    def leads(self, pause=0):
        """Whether the term stands, after so many seconds; at once when it is to end."""
        self._stopped.wait(pause)
        return not self._stopped.is_set() and self.term is not None and not self.term.lost.is_set()

    def __iter__(self):
        pause, longest = _PAUSE
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                yield from self._one_term()
            except Error as error:
                # One that was killed can be started again; one that is not there, or refuses, cannot.
                may_pass = error.code in _ERRORS or (error.code or 0) < 0
                if not may_pass and not self._stopped.is_set():
                    raise
            if time.monotonic() - began > longest:
                pause = _PAUSE[0]
            self._stopped.wait(pause)
            pause = min(2 * pause, longest)

    def _one_term(self):
        stands = self._stands = self._lock._start()
        try:
            if self._stopped.is_set():
                return
            self.term = stands._granted.result()
            yield self.term
            self.term = None
            stands.release()
        finally:
            self.term = None
            stands._abandon()


class Lock:
    """How a lock is to be taken. It may be taken again and again, and by several threads at once.

    ``store``: its URL. ``wait``: for how many seconds; None: for ever; 0: not at all. ``lease``: for how many
    seconds it stays taken if this machine dies. ``max_hold``, ``at_least``, ``lock_delay``: seconds.
    ``shared`` and ``exclusive``: the sides of a read-write lock. ``of`` and ``permits``: a semaphore. ``label``:
    what others read about this holder. ``on_waiting``: called with the :class:`Held`, in a thread of the lock's, as it
    stands in the queue and whenever its place changes. ``on_lost``: called so when it is lost. ``command``: the
    program, if it is not the one that came with this package or is in the PATH.
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
        seconds = {"wait": wait, "lease": lease, "max-hold": max_hold, "at-least": at_least, "lock-delay": lock_delay}
        # Milliseconds are as fine as the command reads them.
        words = [f"--{option}={round(value * 1000)}ms" for option, value in seconds.items() if value is not None]
        words += ["--shared"] if shared else []
        words += ["--exclusive"] if exclusive else []
        numbers = {"of": of, "permits": permits, "label": label}
        words += [f"--{option}={value}" for option, value in numbers.items() if value is not None]
        self.name = name
        self._words = [command or _command(), "hold", "--json", *words, "--", name]
        # Not among the words, which anybody on this machine can read: it may have a password.
        self._environment = {**os.environ, **({"LEASEHOLD_STORE": store} if store is not None else {})}
        self._on_waiting = on_waiting
        self._on_lost = on_lost
        # What was entered and not left: by whoever leaves in another context than it entered in.
        self._entries = []
        self._entries_lock = threading.Lock()

    def acquire(self):
        """Takes the lock, and returns a :class:`Held`."""
        held = self._start()
        try:
            return held._granted.result()
        except BaseException:
            held._abandon()
            raise

    async def acquire_async(self):
        """The same for asyncio. Cancelled, it takes nothing."""
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
            # What went wrong inside says more.
            if kind is None:
                raise

    async def __aenter__(self):
        return self._entered(await self.acquire_async())

    async def __aexit__(self, kind, error, trace):
        try:
            # A task that is cancelled again while it leaves has left all the same.
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


# What this thread, or this task, is inside of: one lock may be entered by many at once. (A generator that is left in
# another context than it was entered in finds its own only if nobody else is inside: give each its own `Lock`.)
_ENTERED = contextvars.ContextVar("leasehold", default=())


class Held:
    """A lock that is held, until it is released or lost."""

    def __init__(self, name, words, environment, on_waiting, on_lost):
        self.name = name
        #: The fencing token: it rises from holder to holder.
        self.token = None
        #: The hold as a string, for ``leasehold check``.
        self.sequencer = None
        #: ``waiting``, ``held``, ``at_risk``, ``lost`` or ``released``.
        self.state = "waiting"
        #: How many are before it, while it waits.
        self.ahead = None
        #: Who holds, or why nobody may, in words, as it was when the place in the queue last changed.
        self.held_by = None
        #: Who holds: dictionaries as ``leasehold show --json`` has them (host, pid, label, token, since_seconds, …).
        self.holders = []
        #: Until when it was certain as it was told last (``held``, ``at_risk``, ``recovered``), in seconds since 1970; it is
        #: renewed long before that. None: until it ends.
        self.deadline = None
        #: Set when the lock is not held any more, though nobody released it.
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
            # In a session of its own: Ctrl-C is for us, who may have to clean up under the lock.
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
        """Raises ``Lost`` if the lock is not held any more. Asks nobody."""
        if self.lost.is_set():
            raise self._loss()

    def release(self):
        """Gives the lock back. Raises ``Lost`` if it was lost before. A second time it says the same."""
        if os.getpid() != self._owner:
            # A fork of whoever took it: it is not ours to give back.
            return self._abandon()
        return self._leave().result()

    async def until_lost(self):
        """Returns when the lock is lost, or was released."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._ended))
        except Lost:
            pass

    def _loss(self):
        return Lost(f"lost {self.name!r}: {self.reason}", 74)

    def _leave(self):
        self._abandon()
        # One that does not end is not waited for for ever; the lease ends what it held.
        timer = threading.Timer(_FAREWELL, self._process.kill)
        timer.daemon = True
        timer.start()
        self._ended.add_done_callback(lambda _: timer.cancel())
        return self._ended

    def _abandon(self):
        """Has it give back what it has, or its place in the queue."""
        self._leaving = True
        try:
            if os.getpid() == self._owner:
                # A fork may have its stdin open, too: then it sees no end of it.
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
                self._hear(last)
            said = self._process.stderr.read().decode(errors="replace").strip()
        except (ValueError, KeyError, TypeError):
            said = f"{self._process.args[0]} speaks of other things: is it leasehold?"
            self._process.kill()
        finally:
            code = self._process.wait()
            self._process.stdout.close()
            self._process.stderr.close()
            self._end(last, code, said)

    def _hear(self, told):
        event = told["event"]
        if event == "waiting":
            self.ahead, self.held_by, self.holders = told["ahead"], told.get("held_by"), told.get("holders", [])
            if self._on_waiting:
                _call(self._on_waiting, self)
        elif event == "held":
            self.token, self.sequencer, self.state = told["token"], told["sequencer"], "held"
            self.deadline = told.get("deadline")
            # Whoever waited may be gone: then stdin is closed already, and it is given back.
            if self._granted.set_running_or_notify_cancel():
                self._granted.set_result(self)
        elif event in ("at_risk", "recovered") and self.state != "lost":
            self.state = "at_risk" if event == "at_risk" else "held"
            self.deadline = told.get("deadline")
        elif event == "lost":
            # At once: it may take its time to end, where the store is silent.
            self._lose(told["reason"])

    def _end(self, last, code, said):
        if self.token is None:
            # It was never held.
            message = last.get("message") or said or f"leasehold ended with {code}"
            if not self._granted.cancelled() and self._granted.set_running_or_notify_cancel():
                self._granted.set_exception(_ERRORS.get(code, Error)(message, code))
            self._ended.set_result(None)
        elif last.get("event") == "released":
            self.state = "released"
            self._ended.set_result(None)
        else:
            # Without a word it was killed: nobody renews the lock any more.
            self._lose(said or f"its leasehold ended with {code}")

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


def _call(told, held):
    """What goes wrong there is told as of any thread, and no word of the command's."""
    try:
        told(held)
    except Exception:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _command():
    named = os.environ.get("LEASEHOLD_COMMAND")
    beside = os.path.join(sysconfig.get_path("scripts"), "leasehold")
    found = named or (beside if os.access(beside, os.X_OK) else shutil.which("leasehold"))
    if not found:
        raise Error("there is no leasehold command in the PATH: install it, or say where by LEASEHOLD_COMMAND")
    return found
