-- KEYS: main, record, memory. ARGV: value, token.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {0, 0} end
local token = tonumber(ARGV[2])
local highest, cur = last(KEYS[3], KEYS[2])
if token <= highest then return {0, highest} end
redis.call('HSET', KEYS[2], 'last', token, 'token', token)
if token > cur then redis.call('HSET', KEYS[3], 'cur', token) end
return {1, token}
