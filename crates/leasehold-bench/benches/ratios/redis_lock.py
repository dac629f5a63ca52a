"""redis-py's Lock, uncontended: for each line that is read, pairs for so many seconds, and then
one line that tells the nanoseconds a pair took."""

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
