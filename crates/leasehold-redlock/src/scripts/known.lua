-- KEYS: memory. Returns whether the node has its memory (1 or 0), the highest token that it knows,
-- its time in µs, and whether it has stored a token since its memory was restored (1 or 0).
local m = redis.call('HMGET', KEYS[1], 'run', 'cur', 'told')
local cur, told = tonumber(m[2] or 0), tonumber(m[3] or 0)
local remembers = m[1] == run()
return {remembers and 1 or 0, math.max(cur, told), now(), remembers and cur > told and 1 or 0}
