-- lock_in: a lock
--
-- Run this first in your transaction. It waits for the lock, which is yours until COMMIT or ROLLBACK.
-- The table must be the one that leasehold's schema prints: without its primary key nothing is locked.
INSERT INTO leasehold_row_lock (name, taken) VALUES (:name, 1) ON CONFLICT (name) DO UPDATE SET taken = taken + 1;
-- To limit the wait: PRAGMA busy_timeout = 5000. SQLITE_BUSY means the wait timed out. All names share one lock.
-- SQLITE_BUSY_SNAPSHOT means: run the transaction again.

-- once: an idempotency key
--
-- Run this in the transaction that does the work, before the work. It waits for a concurrent attempt.
INSERT INTO leasehold_once (name, state, attempt, attempt_id, lease_end, done_at) VALUES (:key, 'done', 1, '', CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER) + 0, CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)) ON CONFLICT (name) DO NOTHING;
-- One row was inserted: the key is yours. Do the work, then:
UPDATE leasehold_once SET state = 'done', outcome = :outcome, done_at = CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER) WHERE name = :key;
-- COMMIT. If the work fails, ROLL BACK, which also removes the key.
-- To return the same error for later attempts, roll back to a savepoint after the key, then:
UPDATE leasehold_once SET state = 'refused', outcome = :outcome, done_at = CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER) WHERE name = :key;

-- No row was inserted: the key was used before. Read its outcome:
SELECT state, outcome FROM leasehold_once WHERE name = :key;
-- 'done': outcome is the result. 'refused': outcome is the stored error. 'started': another client is working on
-- it outside of a transaction; retry later. (If outcome begins with ESC 'leasehold:', ESC '0' is NUL, ESC '1' is ESC.)

-- Run this occasionally, in a transaction of its own, until it deletes no row. It deletes keys that were done
-- before :before, in microseconds since 1970.
DELETE FROM leasehold_once WHERE name IN (SELECT name FROM leasehold_once WHERE done_at < :before LIMIT 1000) AND done_at < :before;

-- versioned: compare-and-set
--
-- Read the row with its version:
SELECT your_column, version FROM your_table WHERE id = :id;
-- Write the value that you computed from it:
UPDATE your_table SET version = version + 1, your_column = :value WHERE id = :id AND version = :expected;
-- One row changed: the write succeeded. No row: another client wrote in between, or the row does not exist.
-- Begin a new transaction and read again.
