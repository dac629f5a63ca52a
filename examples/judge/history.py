"""Records what happens to the locks of other libraries, for `leasehold stress --check`.

docs/reference/history-format.md defines the format. Workers are processes, which append their lines to one file. The lock
protects two resources, each a number and a set in a file. The plain one accepts every write. The fenced one rejects
tokens below the highest token that it has seen.
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
            self.record(format="leasehold-history", version=1, **header)
            for which in ("plain", "fenced"):
                with open(f"{path}.{which}", "w") as resource:
                    json.dump({"value": 0, "set": [], "token": 0}, resource)

    def record(self, **line):
        # One write per line, so that lines of several processes do not mix.
        os.write(self.file, json.dumps(line).encode() + b"\n")

    def run(self, *workers):
        """Runs each worker in its own process, and then records the end of the run."""
        running = [multiprocessing.Process(target=work) for work in workers]
        for process in running:
            process.start()
        for process in running:
            process.join()
            if process.exitcode:
                self.record(event="crashed", what=f"a worker exited unexpectedly: {process.exitcode}")
        for which in ("plain", "fenced"):
            with open(f"{self.path}.{which}") as resource:
                end = json.load(resource)
            os.remove(resource.name)
            self.record(event="final", lock=0, resource=which, value=end["value"], set=end["set"])
        self.record(event="end", at=now())

    def fault(self, fault, worker, begin, excuses=1.0):
        until = now()
        self.record(event="fault", fault=fault, **({} if worker is None else {"worker": worker}),
                  **{"from": begin}, to=until, excuses_until=until + int(excuses * 1e9))

    def pause(self, worker, seconds, process):
        """Pauses a process, which may be this one, as a debugger or a swapping machine does."""
        begin = now()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {process}"])
        os.kill(process, signal.SIGSTOP)
        if process != os.getpid():
            time.sleep(seconds)
        self.fault("pause", worker, begin)


class Turn:
    """One request for the lock, and the events that follow it."""

    def __init__(self, history, worker, n):
        self.history, self.id = history, {"worker": worker, "n": n}

    def record(self, event, at=None, **more):
        self.history.record(event=event, **self.id, at=at or now(), **more)

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
        """Returns the contents of both resources. None for the fenced one, if the token is missing or stale."""
        with self.resource("plain") as plain, self.resource("fenced") as fenced:
            admitted = token is not None and token >= fenced["token"]
            fenced["token"] = max(fenced["token"], token or 0)
            return dict(plain), dict(fenced) if admitted else None

    def write(self, read, token=None):
        """Writes the number plus one, and the set with this turn added."""
        me, tokens = list(self.id.values()), {} if token is None else {"token": token}
        taken = {}
        for which, seen in zip(("plain", "fenced"), read):
            with self.resource(which) as held:
                taken[which] = which == "plain" or (seen is not None and token >= held["token"])
                if taken[which]:
                    held.update(value=seen["value"] + 1, set=seen["set"] + [me])
                    self.history.record(event="write", **self.id, at=now(), lock=0, resource=which, **tokens)
        if token is None:
            del taken["fenced"]
        self.record("wrote", **taken)
