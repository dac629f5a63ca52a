-- In the transaction that writes, before it reads or writes anything else:
INSERT INTO leasehold_fence (name, seen) VALUES (:resource, :token) ON DUPLICATE KEY UPDATE seen = GREATEST(seen, :token);
SELECT seen FROM leasehold_fence WHERE name = :resource FOR UPDATE;
-- If this returns a number greater than :token, ROLL BACK: the token is stale.
-- Otherwise continue. The row stays locked until COMMIT, and no other token can pass.

-- Or, with a token column on your own table, in one statement:
UPDATE your_table SET your_column = :value, token = :token
 WHERE id = :id AND (token IS NULL OR token <= :token);
-- No row matched: the token is stale, or the row does not exist. Many clients count changed rows
-- instead, and a write that changes nothing looks stale. Connect with CLIENT_FOUND_ROWS, or read
-- the token:
SELECT token FROM your_table WHERE id = :id FOR UPDATE;
-- If it is greater than :token, your token is stale.
