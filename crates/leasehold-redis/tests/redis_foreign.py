"""Runs redis-py's Lock. Each input line is one command, and each output line its result."""

import sys

import redis
from redis.exceptions import LockError, LockNotOwnedError

client = redis.Redis(port=int(sys.argv[1]))
lock = None


def timeout(text):
    return None if text == "none" else float(text)


for line in sys.stdin:
    words = line.split()
    try:
        if words[0] == "try":
            lock = client.lock(words[1], timeout=timeout(words[2]))
            answer = lock.acquire(blocking=False)
        elif words[0] == "wait":
            lock = client.lock(words[1], timeout=timeout(words[2]), sleep=0.01)
            answer = lock.acquire(blocking_timeout=30)
        elif words[0] == "extend":
            answer = lock.extend(float(words[1]), replace_ttl=True)
        elif words[0] == "release":
            lock.release()
            answer = "released"
        elif words[0] == "steal":
            other = client.lock(words[1], timeout=60)
            other.local.token = b"not the owner's"
            other.release()
            answer = "stolen"
        elif words[0] == "count":
            answer = 0
            for _ in range(int(words[2])):
                with client.lock(words[1], timeout=60, sleep=0.001):
                    count = int(client.get("count"))
                    client.set("count", count + 1)
                answer += 1
    except LockNotOwnedError:
        answer = "LockNotOwnedError"
    except LockError as error:
        answer = f"LockError {error}"
    print(answer, flush=True)
