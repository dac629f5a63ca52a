"""Against the real command: LEASEHOLD_COMMAND says where it is, LEASEHOLD_STORE a store with leases."""

import asyncio
import contextvars
import json
import os
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


def command(*words, store=None):
    environment = {**os.environ, **({"LEASEHOLD_STORE": store} if store else {})}
    words = [os.environ["LEASEHOLD_COMMAND"], *words]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


class OnFiles(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.store = f"file:{directory.name}/store"

    def lock(self, **options):
        return leasehold.lock("x y", store=self.store, **options)

    def claims(self):
        return len(json.loads(command("show", "--json", "x y", store=self.store).stdout)["claims"])

    def is_held(self):
        return self.claims() > 0

    def test_it_is_held_and_given_back(self):
        with self.lock(label="the first") as held:
            self.assertEqual(held.state, "held")
            self.assertEqual(command("check", held.sequencer, store=self.store).returncode, 0)
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

    def test_who_waits_learns_who_holds(self):
        heard = []
        with self.lock(label="the first") as first:
            self.assertIsNone(first.deadline)

            def on_waiting(held):
                heard.append((held.state, held.ahead, held.held_by, held.holders))
                first._leave()
                raise KeyError("its own matter")

            with unittest.mock.patch("threading.excepthook") as told, self.lock(on_waiting=on_waiting) as second:
                self.assertEqual(second.state, "held")
            self.assertEqual(told.call_count, len(heard))
        state, ahead, held_by, holders = heard[0]
        self.assertEqual((state, ahead), ("waiting", 1))
        self.assertIn("(the first) for ", held_by)
        self.assertEqual([(one["label"], one["pid"]) for one in holders], [("the first", first._process.pid)])

    def test_what_went_wrong_inside_is_told_and_the_lock_given_back(self):
        with self.assertRaisesRegex(ValueError, "inside"), self.lock():
            raise ValueError("inside")
        self.assertFalse(self.is_held())

    def test_many_threads_are_inside_one_after_the_other(self):
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

    def test_tasks_wait_and_are_cancelled(self):
        async def work():
            lock = self.lock()
            async with lock as held:
                waiting = asyncio.create_task(lock.acquire_async())
                while self.claims() < 2:
                    await asyncio.sleep(0.01)
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
                self.assertEqual(held.state, "held")
            turns = []

            async def turn():
                async with lock:
                    turns.append(1)
                    await asyncio.sleep(0.001)

            await asyncio.gather(*(turn() for _ in range(8)))
            self.assertEqual(len(turns), 8)

        asyncio.run(work())
        while self.claims():
            time.sleep(0.01)

    def test_a_caller_that_is_killed_holds_nothing(self):
        script = "import leasehold, sys, time\nwith leasehold.lock('x y'):\n print('in', flush=True)\n time.sleep(1000)"
        environment = {**os.environ, "LEASEHOLD_STORE": self.store}
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
        self.assertEqual(child.stdout.readline(), b"in\n")
        self.assertTrue(self.is_held())
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with self.lock(wait=60):
            pass

    def test_ctrl_c_leaves_the_lock_to_whoever_cleans_up(self):
        script = (
            "import leasehold, time\n"
            "with leasehold.lock('x y') as held:\n"
            " try:\n  print('in', flush=True)\n  time.sleep(1000)\n"
            " except KeyboardInterrupt:\n  time.sleep(0.3)\n  held.check()\n  print('clean', flush=True)"
        )
        environment = {**os.environ, "LEASEHOLD_STORE": self.store}
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.assertEqual(child.stdout.readline(), b"in\n")
        # To the whole group, as a terminal does.
        os.killpg(child.pid, signal.SIGINT)
        self.assertEqual(child.communicate(timeout=60)[0], b"clean\n")
        self.assertEqual(child.returncode, 0)

    def test_a_fork_neither_keeps_the_lock_nor_gives_it_back(self):
        held = self.lock().acquire()
        child = os.fork()
        if child == 0:
            held.release()
            time.sleep(60)
            os._exit(0)
        try:
            self.assertTrue(self.is_held())
            began = time.monotonic()
            held.release()
            self.assertLess(time.monotonic() - began, 25)
            self.assertFalse(self.is_held())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_one_leads_and_another_takes_over(self):
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
        while self.claims() < 2:
            time.sleep(0.01)
        self.assertIsNone(two.term)
        # Deposed, it stands again, behind the other.
        token = one.term.token
        command("release", "x y", "--force", store=self.store)
        self.assertTrue(begun[two].wait(30))
        self.assertGreater(two.term.token, token)
        while self.claims() < 2:
            time.sleep(0.01)
        # One that waits ends at once, and one that leads gives the lock back.
        for election in (one, two):
            election.stop()
            threads[election].join(30)
            self.assertFalse(threads[election].is_alive())
            self.assertIsNone(election.term)
        self.assertFalse(self.is_held())
        self.assertEqual(led, sorted(led))

    def test_an_election_outlives_a_store_that_is_away_and_nothing_that_no_waiting_mends(self):
        with self.assertRaises(leasehold.Error) as refused:
            next(iter(leasehold.elect("x" * 999, store=self.store)))
        self.assertEqual(refused.exception.code, 2)
        away = leasehold.elect("x y", store="redis://127.0.0.1:1/", wait=0)
        threading.Timer(3, away.stop).start()
        self.assertEqual(list(away), [])
        # What the body raises ends the loop, and the term.
        with self.assertRaises(KeyError):
            for _term in leasehold.elect("x y", store=self.store):
                raise KeyError
        while self.is_held():
            time.sleep(0.01)

    def test_who_leaves_in_another_context_leaves_all_the_same(self):
        lock = self.lock()
        contextvars.copy_context().run(lock.__enter__)
        self.assertTrue(self.is_held())
        contextvars.copy_context().run(lock.__exit__, None, None, None)
        self.assertFalse(self.is_held())

    def test_a_wait_that_is_cancelled_is_no_loss(self):
        lost = []

        async def work():
            with self.lock():
                waits = self.lock(on_lost=lost.append).acquire_async()
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(waits, 0.3)
                while self.claims() > 1:
                    await asyncio.sleep(0.01)

        asyncio.run(work())
        self.assertEqual(lost, [])

    def test_a_loss_is_believed_before_the_command_has_ended(self):
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
            script.write(
                "#!/bin/sh\n"
                'echo \'{"event":"held","token":7,"sequencer":"s"}\'\n'
                'echo \'{"event":"lost","reason":"expired"}\'\nexec sleep 1000\n'
            )
        self.addCleanup(os.unlink, script.name)
        os.chmod(script.name, 0o700)
        held = self.lock(command=script.name).acquire()
        self.assertTrue(held.lost.wait(60))
        with self.assertRaisesRegex(leasehold.Lost, "expired"):
            held.check()
        with self.assertRaises(leasehold.Lost):
            held.release()
        held._process.kill()

    def test_what_is_said_wrong_is_told(self):
        for options in ({"shared": True, "exclusive": True}, {"permits": 2}):
            with self.assertRaises(leasehold.Error) as refused:
                self.lock(**options).acquire()
            self.assertEqual(refused.exception.code, 2)
        with self.assertRaisesRegex(leasehold.Error, "not the leasehold command"):
            self.lock(command="echo").acquire()
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
            script.write("#!/bin/sh\necho 5\n")
        self.addCleanup(os.unlink, script.name)
        os.chmod(script.name, 0o700)
        with self.assertRaisesRegex(leasehold.Error, "not the leasehold command"):
            self.lock(command=script.name).acquire()
        with self.assertRaisesRegex(leasehold.Error, "cannot start /nowhere"):
            self.lock(command="/nowhere").acquire()
        with self.assertRaises(leasehold.Unavailable):
            leasehold.lock("x", store="redis://127.0.0.1:1", wait=0).acquire()


@unittest.skipUnless(os.environ.get("LEASEHOLD_STORE"), "no store with leases")
class WithLeases(unittest.TestCase):
    def setUp(self):
        self.name = f"python {uuid.uuid4()}"

    def test_a_lock_that_is_taken_away_is_lost(self):
        heard = threading.Event()
        with self.assertRaisesRegex(leasehold.Lost, self.name):
            with leasehold.lock(self.name, lease=2, on_lost=lambda held: heard.set()) as held:
                self.assertTrue(0 < held.deadline - time.time() <= 2)
                self.assertEqual(command("release", "--force", self.name).returncode, 0)
                self.assertTrue(held.lost.wait(60))
                self.assertEqual(held.state, "lost")
                with self.assertRaises(leasehold.Lost):
                    held.check()
        self.assertTrue(heard.wait(60))

    def test_its_leasehold_is_killed(self):
        with self.assertRaises(leasehold.Lost):
            with leasehold.lock(self.name, lease=1) as held:
                os.kill(held._process.pid, signal.SIGKILL)
                self.assertTrue(held.lost.wait(60))
        # Nobody gave it back: its lease did.
        with leasehold.lock(self.name, wait=60) as later:
            self.assertGreater(later.token, held.token)

    def test_a_task_hears_of_the_loss(self):
        async def work():
            held = await leasehold.lock(self.name, lease=2).acquire_async()
            lost = asyncio.create_task(held.until_lost())
            await asyncio.sleep(0)
            self.assertEqual(command("release", "--force", self.name).returncode, 0)
            await asyncio.wait_for(lost, 60)
            self.assertTrue(held.lost.is_set())

        asyncio.run(work())


if __name__ == "__main__":
    unittest.main(verbosity=2)
