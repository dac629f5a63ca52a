-- KEYS: memory. ARGV: run, token, delay, then for how long the node has certainly been without its
-- memory: if it has that of another run, and if it has none. All times are in µs.
-- Restores the token of a node that lost its memory, once the delay has passed since the loss.
-- Returns whether the node has its memory now (1 or 0). If not, also returns for how much longer it
-- does not vote.
local current = run()
if current ~= ARGV[1] then return {0, 0} end
local m = redis.call('HMGET', KEYS[1], 'run', 'cur', 'told')
if m[1] == current then return {1, 0} end
local at = now()
local age = tonumber(m[2] and ARGV[4] or ARGV[5])
local left = math.min(lapsed(KEYS[1], current, at), at - age) + tonumber(ARGV[3]) - at
if left > 0 then return {0, left} end
local token = math.max(tonumber(ARGV[2]), tonumber(m[2] or 0), tonumber(m[3] or 0))
redis.call('HSET', KEYS[1], 'run', current, 'cur', token, 'told', token)
redis.call('HDEL', KEYS[1], 'lapsed', 'since')
return {1, 0}
