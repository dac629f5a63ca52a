"""Tests with the real command. LEASEHOLD_COMMAND is its path, LEASEHOLD_STORE a store with leases.

With LEASEHOLD_OVER=http, the locks are those of a `leasehold serve`, to which the client connects directly.

The tests of `Behavior` are named after the rows of the table in clients/README.md, as in ../node/test.js.
"""

import asyncio
import contextvars
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import uuid

import leasehold

OVER_HTTP = os.environ.get("LEASEHOLD_OVER") == "http"
UNREACHABLE = "http://127.0.0.1:1/" if OVER_HTTP else "redis://127.0.0.1:1/"


def command(*words, store=None):
    environment = {**os.environ, **({"LEASEHOLD_STORE": store} if store else {})}
    words = [os.environ["LEASEHOLD_COMMAND"], *words]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def eventually(what):
    end = time.monotonic() + 60
    while not what():
        if time.monotonic() > end:
            raise AssertionError("never")
        time.sleep(0.01)


class Server:
    """A `leasehold serve` with this store."""

    def __init__(self, test, store, *options):
        environment = {**os.environ, "LEASEHOLD_STORE": store}
        words = [os.environ["LEASEHOLD_COMMAND"], "serve", *options]
        self.process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        test.addCleanup(self.process.stdout.close)
        test.addCleanup(self.kill)
        self.address = self.process.stdout.readline().strip().removeprefix("listening on ")

    def kill(self):
        self.process.kill()
        self.process.wait()


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        # A command that is still ending may write there while it is removed.
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.store = f"file:{self.directory}/store"
        if OVER_HTTP:
            self.serve(self.store)

    def serve(self, store):
        """Starts a server of this store at a socket, and uses it."""
        self.path = f"{self.directory}/socket"
        self.server = Server(self, store, "--listen", f"unix:{self.path}")
        self.store = f"http+unix://{self.path}"

    def leased(self):
        """Returns a store with leases."""
        if not OVER_HTTP and not STORE:
            self.skipTest("no store with leases")
        return self.store if OVER_HTTP else STORE

    def lock(self, **options):
        return leasehold.lock("x y", store=self.store, **options)

    def claims(self):
        return len(json.loads(command("show", "--json", "x y", store=self.store).stdout)["claims"])

    def is_held(self):
        return self.claims() > 0

    def stand_in(self, script):
        """Creates a program that is used as the command."""
        path = f"{self.directory}/stand-in"
        with open(path, "w", encoding="utf8") as file:
            file.write(f"#!/bin/sh\n{script}\n")
        os.chmod(path, 0o700)
        return path

    def start(self, script, **options):
        """Starts another Python, with this store."""
        environment = {**os.environ, "LEASEHOLD_STORE": options.pop("store", self.store)}
        words = [sys.executable, "-c", script]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True, **options)
        self.addCleanup(child.stdout.close)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child

    def output(self, script):
        """Returns the lines that a script prints. It must succeed and print nothing to stderr."""
        child = self.start(script, stderr=subprocess.STDOUT)
        said = child.stdout.read()
        self.assertEqual(child.wait(), 0, said)
        return said.splitlines()

    def interrupted(self, number, work):
        """Runs `work` and interrupts it at its line `number` in the module. Returns whether it has such a line."""
        seen = set()

        def trace(frame, event, _):
            if os.path.dirname(frame.f_code.co_filename) != os.path.dirname(leasehold.__file__):
                return None
            # A line is seen again at the end of a `with` block, where Python handles no signals.
            if event == "line" and (frame, frame.f_lineno) not in seen:
                seen.add((frame, frame.f_lineno))
                if len(seen) == number:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def pid_of(held):
    """Returns the process that keeps the lock."""
    return os.getpid() if OVER_HTTP else held._keeper.process.pid


def about_the_command(test):
    return unittest.skipIf(OVER_HTTP, "the client uses no command")(test)


class Behavior(Case):
    def test_a_lock_is_held_and_released(self):
        with self.lock(label="the first") as held:
            self.assertEqual(held.state, "held")
            self.assertEqual(command("verify", held.sequencer, store=self.store).returncode, 0)
            held.check()
            with self.assertRaises(leasehold.NotAcquired) as refused, self.lock(wait=0):
                pass
            self.assertIn("the first", str(refused.exception))
            first = held.token
        self.assertFalse(self.is_held())
        self.assertEqual(held.state, "released")
        held.release()
        with self.lock() as held:
            self.assertGreater(held.token, first)

    def test_a_waiter_sees_the_holders(self):
        seen = []
        with self.lock(label="the first") as first:
            # The store `file:` has no leases. A server adds them.
            self.assertEqual(first.deadline is None, not OVER_HTTP)

            def on_waiting(held):
                seen.append((held.state, held.ahead, held.held_by, held.holders))
                first._abandon()
                raise KeyError("reported like that of a thread")

            with unittest.mock.patch("threading.excepthook") as hook, self.lock(on_waiting=on_waiting) as second:
                self.assertEqual(second.state, "held")
            self.assertEqual(hook.call_count, len(seen))
        state, ahead, held_by, holders = seen[0]
        self.assertEqual((state, ahead), ("waiting", 1))
        self.assertIn("(the first) for ", held_by)
        self.assertEqual([(one["label"], one["pid"]) for one in holders], [("the first", pid_of(first))])

    def test_an_error_in_the_body_releases_the_lock(self):
        with self.assertRaisesRegex(ValueError, "inside"), self.lock():
            raise ValueError("inside")
        self.assertFalse(self.is_held())

    def test_holders_take_turns(self):
        inside, most = [], []
        lock = self.lock()

        def work():
            for _ in range(5):
                with lock:
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()

        threads = [threading.Thread(target=work) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual((len(most), max(most)), (30, 1))

    def test_a_cancelled_wait_leaves_the_queue(self):
        lost = []

        async def work():
            lock = self.lock(on_lost=lost.append)
            async with lock as held:
                waiting = asyncio.create_task(lock.acquire_async())
                while self.claims() < 2:
                    await asyncio.sleep(0.01)
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
                while self.claims() > 1:
                    await asyncio.sleep(0.01)
                self.assertEqual(held.state, "held")

        asyncio.run(work())
        self.assertEqual((lost, self.claims()), ([], 0))

    def test_a_killed_caller_releases_the_lock(self):
        child = self.start(
            "import leasehold, time\nwith leasehold.lock('x y', lease=5):\n print('in', flush=True)\n time.sleep(1000)"
        )
        self.assertEqual(child.stdout.readline(), "in\n")
        self.assertTrue(self.is_held())
        child.kill()
        with self.lock(wait=60):
            pass

    def test_children_of_a_killed_caller_do_not_keep_the_lock(self):
        ways = {
            # Like process pools and servers in Python.
            "os.fork": "os.fork() or time.sleep(1000)",
            # Like a server in C, without Python's hooks.
            "libc": "ctypes.CDLL(None).fork() or ctypes.CDLL(None).sleep(1000)",
        }
        for way, fork in ways.items():
            with self.subTest(way):
                child = self.start(
                    "import ctypes, leasehold, os, time\n"
                    "with leasehold.lock('x y', lease=5):\n"
                    f" child = {fork}\n print(child, flush=True)\n time.sleep(1000)"
                )
                fork = int(child.stdout.readline())
                try:
                    child.kill()
                    child.wait()
                    with self.lock(wait=60):
                        # The fork still exists.
                        os.kill(fork, 0)
                finally:
                    os.kill(fork, signal.SIGKILL)

    def test_a_child_process_cannot_release_the_lock(self):
        held = self.lock().acquire()
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                held.release()
                assert held.state == "lost" and held.lost.is_set()
                try:
                    held.check()
                except leasehold.Lost as error:
                    failed = 0 if f"it belongs to process {os.getppid()}" in str(error) else 2
                # The fork can acquire locks of its own.
                with leasehold.lock("other", store=self.store):
                    pass
            finally:
                os._exit(failed)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertTrue(self.is_held())
        held.check()
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        try:
            held.release()
            self.assertFalse(self.is_held())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_an_interrupted_acquire_leaves_nothing_held(self):
        number, lock = 1, self.lock()
        with lock:
            pass
        while self.interrupted(number, lock.__enter__):
            eventually(lambda: not self.is_held())
            number += 1
        self.assertGreater(number, 20)
        lock.__exit__(None, None, None)

    def test_an_interrupted_release_can_be_repeated(self):
        number = 1
        while True:
            held = self.lock().acquire()
            if not self.interrupted(number, held.release):
                break
            held.release()
            self.assertEqual((held.state, self.claims()), ("released", 0))
            number += 1
        self.assertGreater(number, 5)

    def test_a_lock_can_be_released_at_exit(self):
        inside = "def inside():\n with leasehold.lock('x y'):\n  yield\n"
        ways = {
            "atexit": "held = leasehold.lock('x y').acquire()\natexit.register(held.release)",
            # The behavior of Python 3.12.1.
            "no more threads": "held = leasehold.lock('x y').acquire()\natexit.register(held.release)\n"
            "def start(self):\n raise RuntimeError('no more threads')\n"
            "atexit.register(setattr, threading.Thread, 'start', start)",
            "weakref": "held = leasehold.lock('x y').acquire()\nclass Owner: pass\nowner = Owner()\n"
            "weakref.finalize(owner, held.release)",
            "a generator": f"{inside}generator = inside()\nnext(generator)",
            "no release": "held = leasehold.lock('x y').acquire()",
        }
        for way, script in ways.items():
            with self.subTest(way):
                self.assertEqual(self.output(f"import atexit, leasehold, threading, weakref\n{script}"), [])
                eventually(lambda: not self.is_held())

    def test_an_unreferenced_lock_stays_held(self):
        self.lock().acquire()
        for _ in range(3):
            gc.collect()
            self.assertTrue(self.is_held())
        (held,) = leasehold._LIVE
        held.release()
        self.assertFalse(self.is_held())

    def test_a_candidate_takes_over_when_the_leader_is_gone(self):
        one, two = (leasehold.elect("x y", store=self.store) for _ in range(2))
        led, begun = [], {one: threading.Event(), two: threading.Event()}

        def stand(election):
            for term in election:
                led.append(term.token)
                begun[election].set()
                while election.leads(0.01):
                    pass

        threads = {election: threading.Thread(target=stand, args=[election]) for election in (one, two)}
        threads[one].start()
        self.assertTrue(begun[one].wait(30))
        self.assertTrue(one.leads())
        threads[two].start()
        eventually(lambda: self.claims() == 2)
        self.assertIsNone(two.term)
        # The evicted candidate rejoins the queue, after the other one.
        token = one.term.token
        command("evict", "x y", store=self.store)
        self.assertTrue(begun[two].wait(30))
        self.assertGreater(two.term.token, token)
        eventually(lambda: self.claims() == 2)
        # A waiting candidate ends immediately, and a leading one releases the lock.
        for election in (one, two):
            election.stop()
            threads[election].join(30)
            self.assertFalse(threads[election].is_alive())
            self.assertIsNone(election.term)
        self.assertFalse(self.is_held())
        self.assertEqual(led, sorted(led))
        # An error in the body ends the loop, and the term.
        with self.assertRaises(KeyError):
            for _term in leasehold.elect("x y", store=self.store):
                raise KeyError
        eventually(lambda: not self.is_held())

    def test_candidates_survive_an_unreachable_store(self):
        election = leasehold.elect("x y", store=UNREACHABLE, wait=0)
        with unittest.mock.patch.object(election._lock, "_claim", wraps=election._lock._claim) as claim:
            thread = threading.Thread(target=lambda: self.assertEqual(list(election), []))
            thread.start()
            eventually(lambda: claim.call_count > 2)
            election.stop()
            thread.join(60)
        self.assertFalse(thread.is_alive())

    @about_the_command
    def test_candidates_survive_a_killed_command(self):
        path = self.stand_in(f"echo >> {self.directory}/starts\nkill -9 $$")
        election = leasehold.elect("x y", command=path)
        thread = threading.Thread(target=list, args=[election])
        thread.start()

        def starts():
            with open(f"{self.directory}/starts", encoding="utf8") as file:
                return len(file.readlines())

        eventually(lambda: os.path.exists(f"{self.directory}/starts") and starts() > 2)
        election.stop()
        thread.join(60)
        self.assertFalse(thread.is_alive())

    def test_an_election_ends_for_invalid_options(self):
        with self.assertRaises(leasehold.Error) as refused:
            next(iter(leasehold.elect("x" * 999, store=self.store)))
        self.assertEqual(refused.exception.code, 2)
        for path, message in (("echo", "not the leasehold command"), ("/nowhere", "cannot start /nowhere")):
            with self.assertRaisesRegex(leasehold.Error, message):
                next(iter(leasehold.elect("x y", command=path)))

    @about_the_command
    def test_errors_do_not_depend_on_the_exit_status(self):
        reaped = {
            "SIGCHLD is ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
            "by another thread": "def reap():\n"
            " while True:\n"
            "  try: os.waitpid(-1, 0)\n"
            "  except ChildProcessError: time.sleep(.001)\n"
            "threading.Thread(target=reap, daemon=True).start()",
        }
        with self.lock():
            for by, code in reaped.items():
                with self.subTest(by):
                    said = self.output(
                        "import leasehold, os, signal, threading, time\n"
                        f"{code}\n"
                        f"away = {{'store': '{UNREACHABLE}', 'wait': 0}}\n"
                        "for options in {'wait': 0}, {'lease': 0.01}, {'command': 'false'}, away:\n"
                        " try: leasehold.lock('x y', **options).acquire()\n"
                        " except leasehold.Error as e: print(type(e).__name__, e.code, e.status)\n"
                        "leads = leasehold.elect('x y', wait=0)\n"
                        "threading.Timer(1, leads.stop).start()\n"
                        "print(list(leads))"
                    )
                    self.assertEqual(said[:2], ["NotAcquired 75 423", "Error 2 500"])
                    self.assertIn(said[2], ["Error None 500", "Error 1 500"])
                    self.assertEqual(said[3:], ["Unavailable 69 503", "[]"])

    def test_invalid_options_are_rejected(self):
        with self.assertRaises(leasehold.Error) as refused:
            self.lock(lease=0.01).acquire()
        self.assertEqual(refused.exception.code, 2)
        for options, message in (
            ({"shared": True, "exclusive": True}, "^shared and exclusive exclude each other"),
            ({"shared": True, "of": 2}, "^of and shared exclude each other"),
            ({"exclusive": True, "of": 2}, "^of and exclusive exclude each other"),
            ({"permits": 2}, "^permits requires of"),
            ({"of": 2**32}, "^of must be at most 4294967295, not 4294967296"),
            ({"of": 2, "permits": 2**32}, "^permits must be at most "),
            ({"lease": 0}, "^lease must be more than 0 seconds, not 0"),
            ({"max_hold": 0.0}, "^max_hold must be more than 0 seconds, not 0.0"),
            ({"label": "a\0b"}, "^label contains a NUL character"),
            ({"label": "\ud800"}, "^label contains characters that are not Unicode"),
            # The URL may contain a password.
            ({"store": "redis://:secret@\0/"}, "^store contains a NUL character$"),
        ):
            for make in (leasehold.lock, leasehold.elect):
                with self.assertRaisesRegex(ValueError, message):
                    make("x y", **{"store": self.store, **options})
        for make in (leasehold.lock, leasehold.elect):
            for name in (None, b"x", 5, object()):
                with self.assertRaisesRegex(TypeError, "^name must be a string, not "):
                    make(name, store=self.store)
            with self.assertRaisesRegex(TypeError, "^label must be a string, not b'z'"):
                make("x y", store=self.store, label=b"z")
            with self.assertRaisesRegex(ValueError, "^name contains a NUL character"):
                make("x\0y", store=self.store)
        for path in ("echo", self.stand_in("echo 5"), self.stand_in("echo '{}'")):
            with self.assertRaisesRegex(leasehold.Error, "not the leasehold command"):
                self.lock(command=path).acquire()
        with self.assertRaisesRegex(leasehold.Error, "cannot start /nowhere"):
            self.lock(command="/nowhere").acquire()
        # An unset variable would otherwise select the locks of this machine.
        with self.assertRaisesRegex(ValueError, "store is empty"):
            leasehold.lock("x", store="")
        for name in ("of", "permits"):
            for value, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), ("2", TypeError)):
                with self.assertRaisesRegex(error, f"{name} must be "):
                    self.lock(**{name: value})
        with self.assertRaises(leasehold.Unavailable):
            leasehold.lock("x", store=UNREACHABLE, wait=0).acquire()

    def test_times_are_rounded_to_milliseconds(self):
        times = {0: 0, -0.0: 0, 1e-9: 1, 0.0006: 1, 0.1 + 0.2: 300, 1: 1000, 1.5: 1500, 10 / 3: 3333, 1e5: 10**8}
        for seconds, milliseconds in times.items():
            self.assertEqual(leasehold._milliseconds("wait", seconds), milliseconds)
        with self.lock(wait=10 / 3, lease=10 / 3, max_hold=100 / 3, min_hold=0.001 / 3, lock_delay=0):
            pass

    def test_infinity_means_no_limit(self):
        for endless in (float("inf"), 1e300, 10**400):
            with self.lock(wait=endless, max_hold=endless):
                self.assertTrue(self.is_held())

    def test_invalid_times_are_rejected_by_name(self):
        for name in ("wait", "lease", "max_hold", "min_hold", "lock_delay"):
            for value in (-1, -1e-9, float("nan"), float("-inf"), -(10**400)):
                with self.assertRaisesRegex(ValueError, f"^{name} must be between 0 seconds and 100 years, not -|nan"):
                    self.lock(**{name: value})
            for value in ("5s", "5", b"5", True, [], 1j):
                with self.assertRaisesRegex(TypeError, f"^{name} must be a number of seconds, not "):
                    self.lock(**{name: value})
        for name in ("lease", "min_hold", "lock_delay"):
            for value in (float("inf"), 1e300, 10**400):
                with self.assertRaisesRegex(ValueError, f"^{name} must be "):
                    self.lock(**{name: value})

    @about_the_command
    def test_a_loss_is_reported_before_the_command_ends(self):
        path = self.stand_in(
            'echo \'{"event":"held","token":7,"sequencer":"s"}\'\n'
            'echo \'{"event":"lost","reason":"expired"}\'\nexec sleep 1000'
        )
        held = self.lock(command=path).acquire()
        self.assertTrue(held.lost.wait(60))
        with self.assertRaisesRegex(leasehold.Lost, "expired"):
            held.check()
        with self.assertRaises(leasehold.Lost):
            held.release()
        held._keeper.process.kill()

    # Tests on a store with leases.

    def start_holder(self, store, name):
        """Starts a Python that holds this lock with a lease of 4 s. It prints the pid of its command, or 0."""
        return self.start(
            "import leasehold, sys\n"
            f"held = leasehold.lock({name!r}, lease=4).acquire()\n"
            "process = getattr(held._keeper, 'process', None)\n"
            "print(process.pid if process else 0, flush=True)\n"
            "sys.stdin.readline()\n"
            "lost = held.lost.wait(float(sys.stdin.readline()))\n"
            "print('lost' if lost else 'held', flush=True)\n"
            "try: held.release()\nexcept leasehold.Lost: print('Lost')",
            store=store,
            stdin=subprocess.PIPE,
        )

    @about_the_command
    def test_a_paused_caller_keeps_its_lock(self):
        name = f"python {uuid.uuid4()}"
        child = self.start_holder(self.leased(), name)
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        # Longer than the lease.
        time.sleep(7)
        self.assertEqual(command("run", "--try", name, "--", "true").returncode, 75)
        child.send_signal(signal.SIGCONT)
        self.assertEqual(child.communicate("\n0\n", timeout=60)[0], "held\n")

    def test_a_loss_during_a_pause_is_reported_after_it(self):
        store, name = self.leased(), f"python {uuid.uuid4()}"
        child = self.start_holder(store, name)
        both = [pid for pid in (int(child.stdout.readline()), child.pid) if pid]
        [os.kill(pid, signal.SIGSTOP) for pid in both]
        with leasehold.lock(name, store=store, wait=60):
            [os.kill(pid, signal.SIGCONT) for pid in both]
            self.assertEqual(child.communicate("\n60\n", timeout=120)[0], "lost\nLost\n")

    def test_an_evicted_lock_is_lost(self):
        store, name = self.leased(), f"python {uuid.uuid4()}"
        called = threading.Event()
        with self.assertRaisesRegex(leasehold.Lost, name):
            with leasehold.lock(name, store=store, lease=4, on_lost=lambda held: called.set()) as held:
                self.assertTrue(0 < held.deadline - time.time() <= 4)
                self.assertEqual(command("evict", name, store=store).returncode, 0)
                self.assertTrue(held.lost.wait(60))
                self.assertEqual(held.state, "lost")
                with self.assertRaises(leasehold.Lost):
                    held.check()
        self.assertTrue(called.wait(60))

    @about_the_command
    def test_a_lock_is_lost_when_its_command_is_killed(self):
        store, name = self.leased(), f"python {uuid.uuid4()}"
        with self.assertRaises(leasehold.Lost):
            with leasehold.lock(name, store=store, lease=1) as held:
                os.kill(held._keeper.process.pid, signal.SIGKILL)
                self.assertTrue(held.lost.wait(60))
        # The hold ended when its lease expired.
        with leasehold.lock(name, store=store, wait=60) as later:
            self.assertGreater(later.token, held.token)

    @about_the_command
    def test_a_lock_is_lost_when_its_command_is_terminated(self):
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        # `nohup`, and shells without job control, start processes that ignore some of them.
        for number in (number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN):
            with self.subTest(number):
                called = threading.Event()
                with self.assertRaisesRegex(leasehold.Lost, "another process ended the leasehold process"):
                    with self.lock(on_lost=lambda held: called.set()) as held:
                        os.kill(held._keeper.process.pid, number)
                        self.assertTrue(held.lost.wait(60))
                        self.assertEqual(held.state, "lost")
                        with self.assertRaises(leasehold.Lost):
                            held.check()
                        # The command has released the lock.
                        with self.lock(wait=60):
                            pass
                self.assertTrue(called.wait(60))
                self.assertEqual(held.state, "lost")
        # The command has ended when the release is requested.
        held = self.lock().acquire()
        with held._keeper._stdin:
            os.kill(held._keeper.process.pid, signal.SIGTERM)
            held._keeper.process.wait()
            held._abandon()
        with self.assertRaises(leasehold.Lost):
            held.release()
        # The term of a leader ends.
        election = leasehold.elect("x y", store=self.store)
        for term in election:
            os.kill(term._keeper.process.pid, signal.SIGTERM)
            eventually(lambda: not election.leads())
            election.stop()
        # A command that prints the line and does not end.
        path = self.stand_in(
            'echo \'{"event":"held","token":7,"sequencer":"s"}\'\necho \'{"event":"released"}\'\nexec sleep 1000'
        )
        held = self.lock(command=path).acquire()
        self.assertTrue(held.lost.wait(60))
        held._keeper.process.kill()


STORE = os.environ.get("LEASEHOLD_STORE")


class OnlyPython(Case):
    def test_tasks_take_turns(self):
        async def work():
            lock, turns = self.lock(), []

            async def turn():
                async with lock:
                    turns.append(1)
                    await asyncio.sleep(0.001)

            await asyncio.gather(*(turn() for _ in range(8)))
            self.assertEqual(len(turns), 8)

        asyncio.run(work())
        self.assertEqual(self.claims(), 0)

    def test_a_wait_that_times_out_is_not_a_loss(self):
        lost = []

        async def work():
            with self.lock():
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(self.lock(on_lost=lost.append).acquire_async(), 0.3)
                while self.claims() > 1:
                    await asyncio.sleep(0.01)

        asyncio.run(work())
        self.assertEqual(lost, [])

    def test_a_release_in_on_waiting_ends_the_wait(self):
        ways = {"release": lambda held: held.release(), "release_async": lambda held: asyncio.run(held.release_async())}
        for way, release in ways.items():
            with self.subTest(way), self.lock():
                returned, ended = [], []

                def on_waiting(held):
                    release(held)
                    returned.append(held)

                def wait():
                    try:
                        self.lock(on_waiting=on_waiting).acquire()
                    except leasehold.Error as error:
                        ended.append(str(error))

                thread = threading.Thread(target=wait, daemon=True)
                thread.start()
                thread.join(60)
                self.assertEqual((len(returned), ended), (1, ["the wait was cancelled"]))
                eventually(lambda: self.claims() == 1)
                # On another thread, it waits for the end as usual.
                returned[0].release()

    def test_a_lock_granted_after_its_wait_was_cancelled_is_not_returned(self):
        path = self.stand_in(
            'echo \'{"event":"waiting","ahead":1}\'\nread line\n'
            'echo \'{"event":"held","token":7,"sequencer":"s"}\'\necho \'{"event":"released"}\''
        )
        with self.assertRaisesRegex(leasehold.Error, "^the wait was cancelled$"):
            self.lock(command=path, on_waiting=lambda held: held.release()).acquire()

    def test_a_cancelled_release_continues_after_its_loop_is_closed(self):
        said = self.output(
            "import asyncio, leasehold\n"
            "async def work():\n"
            " held = await leasehold.lock('x y').acquire_async()\n"
            " tasks = [asyncio.create_task(one()) for one in (held.until_lost, held.release_async)]\n"
            " await asyncio.sleep(0)\n"
            " return held\n"
            "held = asyncio.run(work())\n"
            "held.release()\n"
            "print(held.state)"
        )
        self.assertEqual(said, ["released"])
        self.assertFalse(self.is_held())

    def test_cancelled_tasks_release_their_locks(self):
        said = self.output(
            "import asyncio, leasehold\n"
            "async def work():\n"
            " async with leasehold.lock('x y') as held:\n"
            "  asyncio.get_running_loop().held = held\n"
            "  await asyncio.sleep(1000)\n"
            "async def main():\n"
            " task = asyncio.create_task(work())\n"
            " while not hasattr(asyncio.get_running_loop(), 'held'): await asyncio.sleep(.01)\n"
            " return asyncio.get_running_loop().held\n"
            "print(asyncio.run(main()).state)"
        )
        self.assertEqual(said, ["released"])

    def test_ctrl_c_reaches_only_the_caller(self):
        child = self.start(
            "import leasehold, time\n"
            "with leasehold.lock('x y') as held:\n"
            " try:\n  print('in', flush=True)\n  time.sleep(1000)\n"
            " except KeyboardInterrupt:\n  time.sleep(0.3)\n  held.check()\n  print('clean', flush=True)",
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.assertEqual(child.stdout.readline(), "in\n")
        # A terminal sends the signal to the whole group.
        os.killpg(child.pid, signal.SIGINT)
        self.assertEqual(child.stdout.read(), "clean\n")
        self.assertEqual(child.wait(60), 0)

    def test_ctrl_c_ends_a_wait(self):
        with self.lock():
            child = self.start(
                "import leasehold\n"
                "try: leasehold.lock('x y', on_waiting=lambda _: print('waits', flush=True)).acquire()\n"
                "except KeyboardInterrupt: print('interrupted', flush=True)",
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            self.assertEqual(child.stdout.readline(), "waits\n")
            child.send_signal(signal.SIGINT)
            self.assertEqual(child.stdout.readlines()[-1], "interrupted\n")
            eventually(lambda: self.claims() == 1)

    def test_a_signal_handler_can_stop_an_election(self):
        child = self.start(
            "import leasehold, signal\n"
            "election = leasehold.elect('x y')\n"
            "signal.signal(signal.SIGTERM, lambda *_: election.stop())\n"
            "for term in election:\n"
            " print('leads', flush=True)\n"
            " while election.leads(-1) and election.leads(float('inf')): pass"
        )
        self.assertEqual(child.stdout.readline(), "leads\n")
        child.send_signal(signal.SIGTERM)
        self.assertEqual(child.wait(60), 0)
        self.assertFalse(self.is_held())

    def test_a_system_without_more_threads_is_reported(self):
        with self.lock():
            pass
        with unittest.mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
            with self.assertRaisesRegex(leasehold.Error, "cannot start .*: can't start new thread") as refused:
                self.lock().acquire()
        self.assertEqual(refused.exception.code, 71)
        eventually(lambda: not self.is_held())

    def test_a_lock_can_be_released_in_another_context(self):
        lock = self.lock()
        contextvars.copy_context().run(lock.__enter__)
        self.assertTrue(self.is_held())
        contextvars.copy_context().run(lock.__exit__, None, None, None)
        self.assertFalse(self.is_held())

    def test_a_task_is_notified_of_a_loss(self):
        store, name = self.leased(), f"python {uuid.uuid4()}"

        async def work():
            held = await leasehold.lock(name, store=store, lease=4).acquire_async()
            lost = asyncio.create_task(held.until_lost())
            await asyncio.sleep(0)
            self.assertEqual(command("evict", name, store=store).returncode, 0)
            await asyncio.wait_for(lost, 60)
            self.assertTrue(held.lost.is_set())
            with self.assertRaises(leasehold.Lost):
                await held.release_async()

        asyncio.run(work())


if __name__ == "__main__":
    unittest.main(verbosity=2)
