"""kazoo as a contender. Arguments: HOSTS PATH, then one of: count FILE ROUNDS | hold KIND |
try KIND | pairs SECONDS | contend SECONDS CONTENDERS CLIENTS."""

import sys
import threading
import time

from kazoo.client import KazooClient

hosts, path, work, *rest = sys.argv[1:]
client = KazooClient(hosts=hosts, timeout=10)
client.start()
kinds = {"mutex": client.Lock, "read": client.ReadLock, "write": client.WriteLock}

if work == "count":
    file, rounds = rest
    lock = client.Lock(path, "kazoo")
    for _ in range(int(rounds)):
        with lock:
            with open(file) as counter:
                n = int(counter.read())
            time.sleep(0.002)
            with open(file, "w") as counter:
                counter.write(str(n + 1))
elif work == "hold":
    with kinds[rest[0]](path, "a kazoo client"):
        print("held", flush=True)
        sys.stdin.read()
elif work == "try":
    lock = kinds[rest[0]](path, "kazoo")
    print("yes" if lock.acquire(blocking=False) else "no", flush=True)
elif work == "pairs":
    lock = client.Lock(path, "kazoo")
    lock.acquire()
    lock.release()
    pairs, started = 0, time.perf_counter()
    while time.perf_counter() - started < float(rest[0]):
        lock.acquire()
        lock.release()
        pairs += 1
    print((time.perf_counter() - started) * 1e9 / pairs, flush=True)
elif work == "contend":
    # Each output line is a contender that held the lock, and when.
    seconds, contenders, clients = float(rest[0]), int(rest[1]), int(rest[2])
    shared = [KazooClient(hosts=hosts, timeout=60) for _ in range(clients)]
    for each in shared:
        each.start()
    notes = []
    until = time.monotonic() + seconds

    def turns(number):
        lock = shared[number % clients].Lock(path, "kazoo")
        while time.monotonic() < until:
            with lock:
                notes.append((number, time.monotonic_ns()))

    running = [threading.Thread(target=turns, args=(number,)) for number in range(contenders)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for each in shared:
        each.stop()
    print("\n".join(f"{number} {at}" for number, at in notes), flush=True)
else:
    sys.exit("no such work")
client.stop()
