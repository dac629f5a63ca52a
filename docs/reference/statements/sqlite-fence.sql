-- Run this in the transaction that writes, before it reads or writes anything else:
INSERT INTO leasehold_fence (name, seen) VALUES (:resource, :token) ON CONFLICT (name) DO UPDATE SET seen = MAX(seen, EXCLUDED.seen);
SELECT seen FROM leasehold_fence WHERE name = :resource;
-- If the result is greater than :token, the token is stale: ROLL BACK.
-- Otherwise continue. The row stays locked until COMMIT, so no other token can pass.

-- Or, with a token column in your own table, in one statement:
UPDATE your_table SET your_column = :value, token = :token
 WHERE id = :id AND (token IS NULL OR token <= :token);
-- If no row changed, the token is stale (or the row does not exist).
