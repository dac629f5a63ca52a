-- lock_in: a lock
--
-- Run this first in your transaction. It waits for the lock, which is yours until COMMIT or ROLLBACK.
-- The table must be the one that leasehold's schema prints: without its primary key nothing is locked.
INSERT INTO leasehold_row_lock (name, taken) VALUES (:name, 1) ON DUPLICATE KEY UPDATE taken = taken + 1;
-- To limit the wait: SET SESSION innodb_lock_wait_timeout = 5. Error 1205 means the wait timed out.
-- Error 1213 means: run the transaction again. The first plain read fixes the snapshot, so lock before it.

-- once: an idempotency key
--
-- Run this in the transaction that does the work, before the work. It waits for a concurrent attempt.
INSERT INTO leasehold_once (name, state, attempt, attempt_id, lease_end, done_at) VALUES (:key, 'done', 1, '', CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED) + 0, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED));
-- One row was inserted: the key is yours. Do the work, then:
UPDATE leasehold_once SET state = 'done', outcome = :outcome, done_at = CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED) WHERE name = :key;
-- COMMIT. If the work fails, ROLL BACK, which also removes the key.
-- To return the same error for later attempts, roll back to a savepoint after the key, then:
UPDATE leasehold_once SET state = 'refused', outcome = :outcome, done_at = CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + MOD(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) + 7200000000, 1800000000) AS SIGNED) WHERE name = :key;

-- Error 1062 (the transaction continues): the key was used before. Read its outcome:
SELECT state, outcome FROM leasehold_once WHERE name = :key LOCK IN SHARE MODE;
-- 'done': outcome is the result. 'refused': outcome is the stored error. 'started': another client is working on
-- it outside of a transaction; retry later. (If outcome begins with ESC 'leasehold:', ESC '0' is NUL, ESC '1' is ESC.)

-- Run this occasionally, in a transaction of its own, until it deletes no row. It deletes keys that were done
-- before :before, in microseconds since 1970.
DELETE FROM leasehold_once WHERE done_at < :before LIMIT 1000;

-- versioned: compare-and-set
--
-- Read the row with its version:
SELECT your_column, version FROM your_table WHERE id = :id;
-- Write the value that you computed from it:
UPDATE your_table SET version = version + 1, your_column = :value WHERE id = :id AND version = :expected;
-- One row matched (and changed, because the version changes): the write succeeded. No row: another client wrote in between, or the row does not exist.
-- Begin a new transaction and read again.
