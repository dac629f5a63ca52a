-- Run this in the transaction that writes, before it reads or writes anything else:
INSERT INTO leasehold_fence (name, seen) VALUES (:resource, :token) ON DUPLICATE KEY UPDATE seen = GREATEST(seen, :token);
SELECT seen FROM leasehold_fence WHERE name = :resource FOR UPDATE;
-- If the result is greater than :token, the token is stale: ROLL BACK.
-- Otherwise continue. The row stays locked until COMMIT, so no other token can pass.

-- Or, with a token column in your own table, in one statement:
UPDATE your_table SET your_column = :value, token = :token
 WHERE id = :id AND (token IS NULL OR token <= :token);
-- If no row MATCHED, the token is stale (or the row does not exist). Many clients count the rows that
-- CHANGED instead: there, a write that changes nothing looks like a stale one. Connect with
-- CLIENT_FOUND_ROWS, or read the token back:
SELECT token FROM your_table WHERE id = :id FOR UPDATE;
-- If the result is greater than :token, the token is stale.
