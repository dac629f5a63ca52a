"""Writes what happens to other people's locks, for `leasehold torture --check`.

docs/reference/history-format.md has the format. Workers are processes; each appends its lines to the one file. What the lock is to
protect is a number and a set in a file for each resource: the plain one takes every write, the fenced one
refuses tokens below the greatest that it has seen.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import time


def now():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class History:
    def __init__(self, path, begin=False, **header):
        self.path = path
        self.file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | (os.O_TRUNC if begin else 0))
        if begin:
            self.tell(format="leasehold-history", version=1, **header)
            for which in ("plain", "fenced"):
                with open(f"{path}.{which}", "w") as resource:
                    json.dump({"value": 0, "set": [], "token": 0}, resource)

    def tell(self, **line):
        # One write, so that lines of several processes stay whole.
        os.write(self.file, json.dumps(line).encode() + b"\n")

    def run(self, *workers):
        """Runs each in a process of its own, and writes the end."""
        running = [multiprocessing.Process(target=work) for work in workers]
        for process in running:
            process.start()
        for process in running:
            process.join()
            if process.exitcode:
                self.tell(event="crashed", what=f"a worker ended by itself: {process.exitcode}")
        for which in ("plain", "fenced"):
            with open(f"{self.path}.{which}") as resource:
                end = json.load(resource)
            os.remove(resource.name)
            self.tell(event="final", lock=0, resource=which, value=end["value"], set=end["set"])
        self.tell(event="end", at=now())

    def fault(self, fault, worker, begin, excuses=1.0):
        until = now()
        self.tell(event="fault", fault=fault, **({} if worker is None else {"worker": worker}),
                  **{"from": begin}, to=until, excuses_until=until + int(excuses * 1e9))

    def pause(self, worker, seconds, process):
        """Stops a process, this one too, as a debugger does or a machine that swaps."""
        begin = now()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {process}"])
        os.kill(process, signal.SIGSTOP)
        if process != os.getpid():
            time.sleep(seconds)
        self.fault("pause", worker, begin)


class Turn:
    """One call that asks for the lock, and all that follows."""

    def __init__(self, history, worker, n):
        self.history, self.id = history, {"worker": worker, "n": n}

    def tell(self, event, at=None, **more):
        self.history.tell(event=event, **self.id, at=at or now(), **more)

    @contextlib.contextmanager
    def resource(self, which):
        with open(f"{self.history.path}.{which}", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = json.load(file)
            yield held
            file.seek(0)
            file.truncate()
            json.dump(held, file)

    def read(self, token=None):
        """What both resources hold; of the fenced one nothing where there is no token, or a late one."""
        with self.resource("plain") as plain, self.resource("fenced") as fenced:
            admitted = token is not None and token >= fenced["token"]
            fenced["token"] = max(fenced["token"], token or 0)
            return dict(plain), dict(fenced) if admitted else None

    def write(self, read, token=None):
        """The number plus one, and the set with this turn in it."""
        me, tokens = list(self.id.values()), {} if token is None else {"token": token}
        taken = {}
        for which, seen in zip(("plain", "fenced"), read):
            with self.resource(which) as held:
                taken[which] = which == "plain" or (seen is not None and token >= held["token"])
                if taken[which]:
                    held.update(value=seen["value"] + 1, set=seen["set"] + [me])
                    self.history.tell(event="write", **self.id, at=now(), lock=0, resource=which, **tokens)
        if token is None:
            del taken["fenced"]
        self.tell("wrote", **taken)
