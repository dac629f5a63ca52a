"""python-redis-lock as a peer. Argument: a server's port. Each input line is one task."""

import sys
import threading
import time

import redis
import redis_lock

port = int(sys.argv[1])


def turn(client, name):
    lock = redis_lock.Lock(client, name, expire=15)
    lock.acquire()
    note = time.monotonic_ns()
    lock.release()
    return note


def pair(seconds):
    client = redis.Redis(port=port)
    started, pairs = time.monotonic_ns(), 0
    while (spent := time.monotonic_ns() - started) < seconds * 1e9 or pairs == 0:
        turn(client, "python-redis-lock")
        pairs += 1
    print(spent / pairs, flush=True)


def contend(seconds, n):
    until = time.monotonic_ns() + int(seconds * 1e9)
    notes = [[] for _ in range(n)]

    def work(mine):
        client = redis.Redis(port=port)
        while (note := turn(client, "contention")) < until:
            mine.append(note)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in notes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine in notes:
        print(*mine, flush=True)


for line in sys.stdin:
    match line.split():
        case ["pair", seconds]:
            pair(float(seconds))
        case ["contend", seconds, n]:
            contend(float(seconds), int(n))
