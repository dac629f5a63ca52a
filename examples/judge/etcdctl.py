"""Records a history of `etcdctl lock`: etcdctl.py HISTORY ETCDCTL…

ETCDCTL is the command with its options, for example `etcdctl --endpoints=HOST:PORT`. Two workers run this script again,
under the lock. That run has no deadline, so it assumes that it holds the lock until it ends. In the first worker's
second turn, its etcdctl is paused for longer than its lease. The lock's revision is the token.
"""

import itertools
import multiprocessing
import os
import subprocess
import sys
import time

from history import History, Turn

# Seconds. etcd grants no lease shorter than one and a half election timeouts.
TTL = 2


def work(history, etcdctl, worker, done):
    # The second worker continues until the first one is done.
    for n in range(4) if worker == 0 else itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
        Turn(history, worker, n).record("invoked", lock=0)
        itself = [sys.executable, __file__, "under-the-lock", history.path, str(worker), str(n)]
        ended = subprocess.run([*etcdctl, "lock", f"--ttl={TTL}", "judged", *itself])
        if ended.returncode:
            Turn(history, worker, n).record("failed", kind="lost", error=f"etcdctl lock: {ended.returncode}")
        time.sleep(0.05)
    done.set()


def under_the_lock(path, worker, n):
    history, token = History(path), int(os.environ["ETCD_LOCK_REV"])
    turn = Turn(history, int(worker), int(n))
    turn.record("acquired", token=token)
    turn.record("held")
    read = turn.read(token)
    if (worker, n) == ("0", "1"):
        history.pause(0, TTL * 3, os.getppid())
    turn.write(read, token)
    turn.record("releasing")


def main(path, *etcdctl):
    promises = ["exclusion", "token-order", "token-unique", "effect", "updates", "unfenced"]
    history = History(path, begin=True, store="etcdctl lock", promises=promises, leases=True, faults=["pause"],
                      locks=[{"name": "judged", "kind": "mutex", "capacity": 1}], command=sys.argv)
    done = multiprocessing.Event()
    history.run(lambda: work(history, etcdctl, 0, done), lambda: work(history, etcdctl, 1, done))


if __name__ == "__main__":
    if sys.argv[1] == "under-the-lock":
        under_the_lock(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
