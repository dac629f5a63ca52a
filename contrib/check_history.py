#!/usr/bin/env python3
"""Checks recorded lock histories for broken promises.

It reads the files that `leasehold stress --history FILE` writes, and reaches its verdict without any
code of leasehold. docs/reference/history-format.md defines the format and the promises.

For each violation it prints one line with the numbers of the lines involved:

    FILE: lines 3, 6: PROMISE: what happened

It prints nothing about a history without violations. It does not judge whether the run was long
enough to show anything.

Exit status: 0 no violations; 1 violations; 2 a file could not be read or is not a complete history.
"""

import argparse
import heapq
import itertools
import json
import os
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict

FORMAT, VERSION = "leasehold-history", 1
PROMISES = (
    "exclusion token-order token-unique effect updates unfenced fifo recovery wakeup renewal "
    "residue outcome"
).split()
TOKEN_PROMISES = ("token-order", "token-unique", "effect")
U32, U64 = 2**32 - 1, 2**64 - 1
NEVER = U64
MOST_LOCKS = 1000
RESOURCES = ("plain", "fenced")
ASKS = ("lock", "try", "timeout", "cancel")
FAULTS = ("pause", "kill", "cut", "stale", "servers")
REQUIRED = object()


class Invalid(Exception):
    """The file is not a complete history."""


# Reading fields of a line. JSON's `true` is an `int` in Python, so types are compared exactly.


def field(record, name, type_, default, is_valid, expected):
    if name not in record and default is not REQUIRED:
        return default
    if name not in record:
        raise Invalid(f"missing field {name!r}")
    value = record[name]
    if value is None and default is None:
        return None
    if type(value) is not type_ or not is_valid(value):
        raise Invalid(f"invalid {name!r}: expected {expected}")
    return value


def number(record, name, most=U64, default=REQUIRED):
    return field(record, name, int, default, lambda n: 0 <= n <= most, f"an integer from 0 to {most}")


def text(record, name, default=REQUIRED):
    return field(record, name, str, default, lambda _: True, "text")


def flag(record, name, default=REQUIRED):
    return field(record, name, bool, default, lambda _: True, "true or false")


def word(record, name, words, default=REQUIRED):
    return field(record, name, str, default, words.__contains__, "one of " + ", ".join(words))


def sequence(record, name, is_item, expected, default=REQUIRED):
    return field(record, name, list, default, lambda items: all(map(is_item, items)), f"a list of {expected}")


def is_operation_id(item):
    return type(item) is list and len(item) == 2 and all(type(n) is int and 0 <= n <= U32 for n in item)


def without_duplicates(pairs):
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("an object has the same field twice")
    return record


def no_constant(constant):
    raise ValueError(f"{constant} is not a JSON value")


DECODER = json.JSONDecoder(object_pairs_hook=without_duplicates, parse_constant=no_constant)


def parsed(line):
    try:
        record = DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Invalid(f"not JSON in UTF-8: {error}") from None
    if type(record) is not dict:
        raise Invalid("expected a JSON object")
    return record


class Operation:
    """One attempt to acquire a lock, with the time and line of each event that counts."""

    __slots__ = (
        "id lock weight ask invoked invoked_line waiting waiting_line acquired acquired_line token held until lost "
        "lost_line expired releasing abandoned failed failed_line kind wrote_line wrote end"
    ).split()

    def __init__(self, id_, lock, weight, ask, at, line):
        self.id, self.lock, self.weight, self.ask = id_, lock, weight, ask
        self.invoked, self.invoked_line = at, line
        self.waiting = self.acquired = self.token = self.held = self.lost = self.releasing = self.failed = None
        self.abandoned, self.until, self.wrote = False, 0, ()
        # When its hold ended; `None` if it has no hold that counts.
        self.end = None

    def __str__(self):
        return f"{self.id >> 32}.{self.id & U32}"


class Lock:
    def __init__(self, name, capacity):
        self.name, self.capacity, self.operations = name, capacity, []
        self.resources = {which: Resource() for which in RESOURCES}


class Resource:
    def __init__(self):
        self.writes = self.value = self.size = 0
        self.members, self.final_line, self.was_written = frozenset(), None, False
        self.highest, self.highest_line = 0, None


class Spans:
    """Time spans that include both ends."""

    def __init__(self, spans):
        spans = sorted(spans)
        self.begins = [begin for begin, _ in spans]
        self.latest_ends = list(itertools.accumulate((end for _, end in spans), max))

    def meet(self, begin, end):
        """Returns whether a span overlaps this one: it begins in time, and ends late enough."""
        begun = bisect_right(self.begins, end)
        return begun > 0 and self.latest_ends[begun - 1] >= begin


class LatestHold:
    """Finds, among the added holds of at least some weight, the one that begins last (a Fenwick tree)."""

    def __init__(self, holds):
        self.weights = sorted({hold.weight for hold in holds})
        self.latest = [None] * (len(self.weights) + 1)

    def add(self, hold):
        i = len(self.weights) - bisect_left(self.weights, hold.weight)
        while i < len(self.latest):
            if self.latest[i] is None or self.latest[i].acquired < hold.acquired:
                self.latest[i] = hold
            i += i & -i

    def of_weight(self, least):
        found, i = None, len(self.weights) - bisect_left(self.weights, least)
        while i > 0:
            hold = self.latest[i]
            if hold is not None and (found is None or found.acquired < hold.acquired):
                found = hold
            i -= i & -i
        return found


class History:
    """Reads a history line by line, and keeps the parts that the promises need."""

    def __init__(self, header):
        if text(header, "format") != FORMAT:
            raise Invalid(f"unknown format {header['format']!r}: expected {FORMAT!r}")
        if number(header, "version") != VERSION:
            raise Invalid(f"unsupported version {header['version']}: this program reads version {VERSION}")
        text(header, "store")
        is_text = lambda item: type(item) is str
        sequence(header, "command", is_text, "words", default=())
        for name in ("seed", "seconds", "lease_ms"):
            number(header, name, default=None)
        number(header, "clients", U32, default=None)
        word(header, "fence", ("process", "store"), default="process")
        flag(header, "leases", default=False)
        sequence(header, "faults", FAULTS.__contains__, "faults: " + ", ".join(FAULTS), default=())
        promises = sequence(header, "promises", PROMISES.__contains__, "promises: " + ", ".join(PROMISES))
        self.promises = frozenset(promises)
        self.recovery_ms = number(header, "recovery_ms", default=None)
        if "recovery" in self.promises and self.recovery_ms is None:
            raise Invalid("the promise 'recovery' needs the field 'recovery_ms'")
        self.shared_stalls = flag(header, "shared_stalls", default=False)
        self.locks = [self.lock(spec) for spec in sequence(header, "locks", lambda _: True, "locks")]
        if len(self.locks) > MOST_LOCKS:
            raise Invalid(f"{len(self.locks)} locks: the maximum is {MOST_LOCKS}")
        self.operations = {}
        self.killed, self.crashed, self.residue = {}, [], []
        self.spans_of_worker, self.spans_of_servers = defaultdict(list), []
        self.line_without_token = self.end = None
        self.violations = []

    @staticmethod
    def lock(spec):
        if type(spec) is not dict:
            raise Invalid("invalid 'locks': expected a list of objects")
        word(spec, "kind", ("mutex", "rwlock", "semaphore"))
        name, capacity = text(spec, "name"), number(spec, "capacity", U32)
        if capacity == 0:
            raise Invalid(f"the capacity of lock {name!r} is 0, so no worker can hold it")
        return Lock(name, capacity)

    def violated(self, promise, lines, what):
        if promise in self.promises:
            self.violations.append((sorted(set(lines)), promise, what))

    # Events.

    def read(self, record, line):
        if self.end is not None:
            raise Invalid("unexpected line after the event 'end'")
        event = text(record, "event")
        if event in EVENTS_OF_OPERATION:
            id_ = number(record, "worker", U32) << 32 | number(record, "n", U32)
            operation, at = self.operations.get(id_), number(record, "at")
            if event == "invoked":
                self.invoked(id_, operation, at, record, line)
            elif operation is None:
                raise Invalid(f"operation {id_ >> 32}.{id_ & U32} was never invoked")
            else:
                EVENTS_OF_OPERATION[event](self, operation, at, record, line)
        elif event in OTHER_EVENTS:
            OTHER_EVENTS[event](self, record, line)
        else:
            raise Invalid(f"unknown event {event!r}")

    def lock_of(self, record):
        index = number(record, "lock")
        if index >= len(self.locks):
            raise Invalid(f"no lock {index}: the first line lists {len(self.locks)}, numbered from 0")
        return self.locks[index]

    def token_of(self, record, line):
        token = number(record, "token", default=None) or 0
        if token == 0 and self.line_without_token is None:
            self.line_without_token = line
        return token

    def invoked(self, id_, known, at, record, line):
        if known is not None:
            raise Invalid(f"operation {known} was already invoked in line {known.invoked_line}")
        lock, weight = self.lock_of(record), number(record, "weight", U32, default=1)
        if not 1 <= weight <= lock.capacity:
            raise Invalid(f"invalid 'weight' {weight}: expected 1 to {lock.capacity}")
        ask = sys.intern(word(record, "ask", ASKS, default="lock"))
        operation = Operation(id_, lock, weight, ask, at, line)
        self.operations[id_] = operation
        lock.operations.append(operation)

    def waiting(self, operation, at, record, line):
        number(record, "ahead", default=0)
        if operation.waiting is None:
            operation.waiting, operation.waiting_line = at, line

    def acquired(self, operation, at, record, line):
        operation.acquired, operation.acquired_line = at, line
        operation.token = self.token_of(record, line)

    def held(self, operation, at, record, line):
        until = number(record, "until", default=None)
        operation.held = at
        operation.until = max(operation.until, NEVER if until is None else until)

    def lost(self, operation, at, record, line):
        expired = flag(record, "expired", default=False)
        text(record, "reason", default="")
        if operation.lost is None:
            operation.lost, operation.lost_line, operation.expired = at, line, expired

    def wrote(self, operation, at, record, line):
        answers = flag(record, "plain"), flag(record, "fenced", default=None)
        operation.wrote = tuple(which for which, accepted in zip(RESOURCES, answers) if accepted)
        operation.wrote_line = line
        for which in operation.wrote:
            operation.lock.resources[which].was_written = True

    def releasing(self, operation, at, record, line):
        operation.releasing = at

    def released(self, operation, at, record, line):
        pass

    def failed(self, operation, at, record, line):
        text(record, "error", default="")
        operation.failed, operation.failed_line, operation.kind = at, line, sys.intern(text(record, "kind"))

    def abandoned(self, operation, at, record, line):
        operation.abandoned = True

    def write(self, record, line):
        worker, n = number(record, "worker", U32), number(record, "n", U32)
        number(record, "at", default=None)
        lock, which = self.lock_of(record), word(record, "resource", RESOURCES)
        token, resource = self.token_of(record, line), lock.resources[which]
        resource.writes += 1
        resource.was_written = True
        if which == "fenced" and token < resource.highest:
            lines = line, resource.highest_line
            what = f"token {token} of {worker}.{n} after token {resource.highest}"
            self.violated("effect", lines, f"{lock.name}: the fenced resource accepted {what}")
        if token > resource.highest:
            resource.highest, resource.highest_line = token, line

    def kill(self, record, line):
        worker, at = number(record, "worker", U32), number(record, "at")
        if worker in self.killed:
            raise Invalid(f"worker {worker} was already killed in line {self.killed[worker][1]}")
        self.killed[worker] = at, line

    def fault(self, record, line):
        fault = word(record, "fault", FAULTS)
        if fault == "kill":
            raise Invalid("a kill has its own event, 'killed'")
        begin, end = self.span(record, number(record, "excuses_until", default=None))
        if fault == "servers":
            self.spans_of_servers.append((begin, end))

    def stall(self, record, line):
        self.span(record, None)

    def span(self, record, excuses_until):
        begin, end = number(record, "from"), number(record, "to")
        excuses_until = end if excuses_until is None else excuses_until
        if not begin <= end <= excuses_until:
            raise Invalid("the fault ends before it begins")
        self.spans_of_worker[number(record, "worker", U32, default=None)].append((begin, excuses_until))
        return begin, end

    def crash(self, record, line):
        self.crashed.append((line, text(record, "what")))

    def left(self, record, line):
        self.residue.append((line, text(record, "what")))

    def final(self, record, line):
        lock, which, value = self.lock_of(record), word(record, "resource", RESOURCES), number(record, "value")
        members = sequence(record, "set", is_operation_id, "[worker, n]")
        resource = lock.resources[which]
        if resource.final_line is not None:
            raise Invalid(f"the {which} resource of {lock.name} has a final state in line {resource.final_line}")
        resource.value, resource.size, resource.final_line = value, len(members), line
        resource.members = frozenset(worker << 32 | n for worker, n in members)

    def ended(self, record, line):
        self.end = number(record, "at")

    # Promises.

    def check(self):
        if self.end is None:
            raise Invalid("incomplete: the last line is not the event 'end'")
        by_token = [promise for promise in TOKEN_PROMISES if promise in self.promises]
        if by_token and self.line_without_token is not None:
            raise Invalid(f"line {self.line_without_token} has no token, which the promise {by_token[0]!r} needs")
        for lock in self.locks:
            for which, resource in lock.resources.items():
                if resource.was_written and resource.final_line is None:
                    raise Invalid(f"the {which} resource of {lock.name} accepted a write but has no event 'final'")
        everyones = self.spans_of_worker.pop(None, [])
        of_workers = self.spans_of_worker.items()
        self.excuses = {worker: Spans(spans + everyones) for worker, spans in of_workers}
        self.excuses_of_all = Spans(everyones)
        self.any_excuses = Spans(everyones + [span for _, spans in of_workers for span in spans])
        self.servers = Spans(self.spans_of_servers)
        self.kill_times = sorted(at for at, _ in self.killed.values())
        for line, what in self.residue:
            self.violated("residue", [line], what)
        for line, what in self.crashed:
            self.violated("outcome", [line], what)
        for lock in self.locks:
            for operation in lock.operations:
                self.check_end(operation)
                self.check_loss(operation)
                self.check_failure(operation)
                operation.end = self.end_of_hold(operation)
            holds = [operation for operation in lock.operations if operation.end is not None]
            self.check_exclusion(lock, holds)
            self.check_tokens(lock)
            if "exclusion" in self.promises:
                self.check_tokens_of_conflicting(lock, holds)
            self.check_order(lock, holds)
            self.check_recovery(lock, holds)
            self.check_resources(lock)
        return sorted(self.violations)

    def is_excused(self, operation, begin, end):
        if self.shared_stalls:
            return self.any_excuses.meet(begin, end)
        return self.excuses.get(operation.id >> 32, self.excuses_of_all).meet(begin, end)

    def kill_of(self, operation):
        return self.killed.get(operation.id >> 32, (NEVER, None))

    def end_of_hold(self, operation):
        if operation.acquired is None or operation.held is None:
            return None
        ends = [operation.until, self.kill_of(operation)[0], self.end]
        if operation.releasing is not None:
            ends.append(operation.releasing)
        if operation.lost is not None:
            ends.append(operation.lost if operation.expired else operation.held)
        return min(ends) if min(ends) > operation.acquired else None

    def check_exclusion(self, lock, holds):
        active, weight = [], 0
        for i, hold in enumerate(sorted(holds, key=lambda hold: hold.acquired)):
            while active and active[0][0] <= hold.acquired:
                weight -= heapq.heappop(active)[2].weight
            weight += hold.weight
            if weight > lock.capacity:
                # The heaviest holds are enough to show the violation.
                others = heapq.nlargest(3, (entry[2] for entry in active), key=lambda other: other.weight)
                lines = [other.acquired_line for other in [hold, *others]]
                shown = ", ".join(map(str, others))
                self.violated("exclusion", lines, f"{lock.name}: {hold} began to hold while {shown} held")
            heapq.heappush(active, (hold.end, i, hold))

    def check_tokens(self, lock):
        """Checks, from the lowest token to the highest, that no earlier operation has a higher token."""
        granted = [operation for operation in lock.operations if operation.acquired is not None]
        granted.sort(key=lambda operation: operation.token)
        latest = None
        for token, same in itertools.groupby(granted, key=lambda operation: operation.token):
            same = list(same)
            for operation in same[1:]:
                lines = same[0].acquired_line, operation.acquired_line
                what = f"token {token} was granted to {same[0]} and to {operation}"
                self.violated("token-unique", lines, f"{lock.name}: {what}")
            for operation in same:
                if latest is not None and operation.acquired < latest.invoked:
                    lines = operation.acquired_line, latest.invoked_line, latest.acquired_line
                    what = f"{latest} was invoked after {operation} had token {token} and got {latest.token}"
                    self.violated("token-order", lines, f"{lock.name}: {what}")
            latest = max(same + ([latest] if latest else []), key=lambda operation: operation.invoked)

    def check_tokens_of_conflicting(self, lock, holds):
        """Checks, from the lowest token to the highest, that no lower token began a conflicting hold later."""
        lower = LatestHold(holds)
        # If tokens are equal, the later hold is added later and is not compared with the earlier one.
        for hold in sorted(holds, key=lambda hold: (hold.token, hold.acquired)):
            latest = lower.of_weight(lock.capacity - hold.weight + 1)
            if latest is not None and latest.acquired > hold.acquired:
                lines = hold.acquired_line, latest.acquired_line
                what = f"{latest} has token {latest.token} and held after {hold} with token {hold.token}"
                self.violated("token-order", lines, f"{lock.name}: {what}")
            lower.add(hold)

    def check_order(self, lock, holds):
        """Checks, in the order of requests, that no operation that waited before began a conflicting hold later."""
        waited = [
            (hold.waiting, 1, i)
            for i, hold in enumerate(holds)
            if hold.waiting is not None and not self.is_excused(hold, hold.invoked, hold.acquired)
        ]
        # At equal times, the request comes first, so that only earlier waiters count.
        requested = [(hold.invoked, 0, i) for i, hold in enumerate(holds)]
        waiters = LatestHold(holds)
        for _, is_waiter, i in sorted(waited + requested):
            if is_waiter:
                waiters.add(holds[i])
                continue
            hold = holds[i]
            waiter = waiters.of_weight(lock.capacity - hold.weight + 1)
            if waiter is not None and waiter.acquired > hold.acquired:
                lines = hold.invoked_line, hold.acquired_line, waiter.waiting_line, waiter.acquired_line
                what = f"{hold} was invoked while {waiter} was waiting and held before it"
                self.violated("fifo", lines, f"{lock.name}: {what}")

    def check_recovery(self, lock, holds):
        if self.recovery_ms is None:
            return
        granted = [operation for operation in lock.operations if operation.acquired is not None]
        granted.sort(key=lambda operation: operation.acquired)
        times = [operation.acquired for operation in granted]
        for hold in holds:
            killed, line = self.kill_of(hold)
            if hold.weight < lock.capacity or hold.end != killed:
                continue
            first = bisect_right(times, killed)
            if first == len(times):
                continue
            at = times[first]
            heirs = granted[first : bisect_right(times, at)]
            heir = next((o for o in heirs if o.waiting is not None and o.waiting < killed), None)
            if heir is None or self.any_excuses.meet(killed, at):
                continue
            taken = at - self.kill_times[bisect_left(self.kill_times, at) - 1]
            if taken > self.recovery_ms * 1_000_000:
                lines = hold.acquired_line, line, heir.acquired_line
                what = f"{heir} waited {taken // 1_000_000} ms for the lock of {hold}, which was killed"
                self.violated("recovery", lines, f"{lock.name}: {what} (promised: {self.recovery_ms} ms)")

    def check_resources(self, lock):
        for which, promise in (("plain", "unfenced"), ("fenced", "updates")):
            resource = lock.resources[which]
            for operation in lock.operations:
                if which in operation.wrote and operation.id not in resource.members:
                    lines = operation.wrote_line, resource.final_line
                    what = f"the acknowledged update of {operation} is not in the {which} resource"
                    self.violated(promise, lines, f"{lock.name}: {what}")
            if not resource.writes == resource.value == resource.size:
                what = f"accepted {resource.writes} writes, but its value is {resource.value}"
                what = f"the {which} resource {what} and its set has {resource.size} entries"
                self.violated(promise, [resource.final_line], f"{lock.name}: {what}")

    def check_end(self, operation):
        is_over = operation.releasing is not None or operation.failed is not None or operation.abandoned
        if not is_over and self.kill_of(operation)[1] is None:
            self.violated("wakeup", [operation.invoked_line], f"{operation.lock.name}: {operation} never ended")

    def check_loss(self, operation):
        if operation.lost is None:
            return
        begin = operation.invoked if operation.acquired is None else operation.acquired
        is_forgotten = "exclusion" not in self.promises and self.servers.meet(begin, operation.lost)
        is_early = not operation.expired and operation.lost < operation.until and not is_forgotten
        if is_early or not self.is_excused(operation, begin, operation.lost):
            why = "before its end" if is_early else "although its worker had no faults"
            what = f"{operation} lost its hold {why}"
            self.violated("renewal", [operation.lost_line], f"{operation.lock.name}: {what}")

    def check_failure(self, operation):
        if operation.failed is None or operation.kind in ("at_risk", "unreachable"):
            return
        if operation.kind == "lost":
            has_cause = self.is_excused(operation, operation.invoked, operation.failed)
        else:
            has_cause = (operation.kind, operation.ask) in (("contended", "try"), ("timeout", "timeout"))
        if not has_cause:
            lines = operation.invoked_line, operation.failed_line
            what = f"{operation} failed without a cause: {operation.kind}"
            self.violated("outcome", lines, f"{operation.lock.name}: {what}")


EVENTS_OF_OPERATION = {
    "invoked": History.invoked,
    "waiting": History.waiting,
    "acquired": History.acquired,
    "held": History.held,
    "lost": History.lost,
    "wrote": History.wrote,
    "releasing": History.releasing,
    "released": History.released,
    "failed": History.failed,
    "abandoned": History.abandoned,
}
OTHER_EVENTS = {
    "write": History.write,
    "killed": History.kill,
    "fault": History.fault,
    "stall": History.stall,
    "crashed": History.crash,
    "residue": History.left,
    "final": History.final,
    "end": History.ended,
}


def violations(path):
    history, line = None, 0
    with open(path, "rb") as file:
        for line, content in enumerate(file, 1):
            try:
                if history is None:
                    history = History(parsed(content))
                elif content.strip(b" \t\r\n\f"):
                    history.read(parsed(content), line)
            except Invalid as error:
                raise Invalid(f"line {line}: {error}") from None
    if history is None:
        raise Invalid("the file is empty")
    return history.check()


def clean(message):
    """Replaces characters that could move the cursor of a terminal, or begin a line."""
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else "\ufffd" for c in message)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", help="a recorded history")
    status = 0
    for path in parser.parse_args().files:
        try:
            found = violations(path)
        except (Invalid, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(clean(f"{path}: {reason}"), file=sys.stderr)
            status = 2
            continue
        for lines, promise, what in found:
            places = ("line " if len(lines) == 1 else "lines ") + ", ".join(map(str, lines))
            print(clean(f"{path}: {places}: {promise}: {what}"))
            status = max(status, 1)
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # Python would try to print the rest at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # With `| head`, the reader has seen enough.
        if not isinstance(error, BrokenPipeError):
            print(f"cannot print the violations: {error.strerror}", file=sys.stderr)
        sys.exit(2)
