"""Records a history of redis-py's Lock: redis_py.py HISTORY URL [CMD…]

URL is redis://HOST:PORT/ or sentinel://HOST:PORT,HOST:PORT/MASTER. Two workers take turns with the lock. In its second
turn, the first worker is paused between its read and its write, for longer than the lock lasts. If there is a CMD, it
is run there instead, and fails over to another server.
"""

import itertools
import multiprocessing
import subprocess
import sys
import time
from os import getpid

import redis
from redis.sentinel import Sentinel

from history import History, Turn, now

PATH, URL, *COMMAND = sys.argv[1:]
# With a fail-over, the lock must outlast it. Otherwise the history could not show that it was still held.
TIMEOUT = 60 if COMMAND else 2
done = multiprocessing.Event()


def connect():
    if URL.startswith("redis:"):
        return redis.Redis.from_url(URL)
    hosts, master = URL.removeprefix("sentinel://").split("/")
    return Sentinel([host.split(":") for host in hosts.split(",")]).master_for(master)


def work(history, worker):
    client = connect()
    # The second worker continues until the first one is done.
    for n in range(4) if worker == 0 else itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
        turn, lock = Turn(history, worker, n), client.lock("judged", timeout=TIMEOUT, sleep=0.01)
        turn.record("invoked", lock=0)
        try:
            lock.acquire()
            turn.record("acquired")
            # Until when the lock is held, according to the server.
            asked = now()
            if lock.owned():
                turn.record("held", at=asked, until=asked + client.pttl("judged") * 1_000_000)
            read = turn.read()
            if (worker, n) == (0, 1):
                trouble(history)
            turn.write(read)
            turn.record("releasing")
            lock.release()
            turn.record("released")
        except redis.exceptions.LockNotOwnedError as error:
            turn.record("failed", kind="lost", error=str(error))
        except redis.exceptions.RedisError as error:
            turn.record("failed", kind="unreachable", error=str(error))
        time.sleep(0.05)
    done.set()


def trouble(history):
    begin = now()
    if COMMAND:
        subprocess.run(COMMAND, check=True)
        history.fault("servers", None, begin)
        time.sleep(3)
    else:
        history.pause(0, TIMEOUT * 1.5, getpid())


if __name__ == "__main__":
    faults = ["servers" if COMMAND else "pause"]
    history = History(PATH, begin=True, store="redis-py's Lock", promises=["exclusion", "unfenced"], leases=True,
                      locks=[{"name": "judged", "kind": "mutex", "capacity": 1}], faults=faults, command=sys.argv)
    history.run(lambda: work(history, 0), lambda: work(history, 1))
