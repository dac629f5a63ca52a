-- lock_in: a lock
--
-- Run this in the transaction, before it reads or writes. The statement waits until the lock is free. You then
-- hold the lock until COMMIT or ROLLBACK. (The table must be created as leasehold's schema prints it: without its
-- primary key nothing is locked.)
INSERT INTO leasehold_row_lock AS l (name, taken) VALUES (:name, 1) ON CONFLICT (name) DO UPDATE SET taken = l.taken + 1;
-- To limit the wait: run SET LOCAL lock_timeout = '5s' after a savepoint. SQLSTATE 55P03 means that the wait timed out: go back to the savepoint, or ROLL BACK.
-- SQLSTATE 40001 and 40P01 mean: run the transaction again.

-- once: an idempotency key
--
-- Run this in the transaction that does the work, before the work. It waits for another transaction with this key.
INSERT INTO leasehold_once (name, state, attempt, attempt_id, lease_end, done_at) VALUES (:key, 'done', 1, '', CAST(floor(CAST(extract(epoch FROM clock_timestamp()) AS numeric) * CAST(1000000 AS numeric)) AS BIGINT) + 0, CAST(floor(CAST(extract(epoch FROM clock_timestamp()) AS numeric) * CAST(1000000 AS numeric)) AS BIGINT)) ON CONFLICT (name) DO NOTHING;
-- If one row was inserted, the key is yours. Do the work, and then:
UPDATE leasehold_once SET state = 'done', outcome = :outcome, done_at = CAST(floor(CAST(extract(epoch FROM clock_timestamp()) AS numeric) * CAST(1000000 AS numeric)) AS BIGINT) WHERE name = :key;
-- COMMIT. If the work fails, ROLL BACK, which also removes the key.
-- To keep an error for later calls, go back to a savepoint between the key and the work, and then:
UPDATE leasehold_once SET state = 'refused', outcome = :outcome, done_at = CAST(floor(CAST(extract(epoch FROM clock_timestamp()) AS numeric) * CAST(1000000 AS numeric)) AS BIGINT) WHERE name = :key;

-- If no row was inserted, the key was already used. Read it:
SELECT state, outcome FROM leasehold_once WHERE name = :key;
-- state 'done': outcome is the result. 'refused': outcome is the error that was kept. 'started': an attempt is
-- running outside of a transaction; retry later. (In an outcome that begins with ESC 'leasehold:', ESC '0' means
-- NUL and ESC '1' means ESC.)

-- Run this periodically, in a transaction of its own, until it deletes no row. It deletes keys whose work was done
-- before :before, in microseconds since 1970.
DELETE FROM leasehold_once WHERE name IN (SELECT name FROM leasehold_once WHERE done_at < :before LIMIT 1000) AND done_at < :before;

-- versioned: compare-and-set
--
-- Read the row with its version:
SELECT your_column, version FROM your_table WHERE id = :id;
-- Write the value that you computed from it:
UPDATE your_table SET version = version + 1, your_column = :value WHERE id = :id AND version = :expected;
-- If one row changed, the value is written and the version is one higher. If none did, another client has written in the
-- meantime, or the row does not exist. Begin a new transaction and read again.
