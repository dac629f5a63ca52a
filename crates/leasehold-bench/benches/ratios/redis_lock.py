"""redis-py's Lock without contention. Each input line is a number of seconds. For that long, the
script acquires and releases the lock. Then it prints the nanoseconds per pair."""

import sys
import time

import redis

client = redis.Redis(port=int(sys.argv[1]))

for line in sys.stdin:
    started, pairs, limit = time.monotonic_ns(), 0, float(line) * 1e9
    while (spent := time.monotonic_ns() - started) < limit or pairs == 0:
        lock = client.lock("redis-py", timeout=15)
        if not lock.acquire(blocking=False):
            sys.exit("not alone")
        lock.release()
        pairs += 1
    print(spent / pairs, flush=True)
