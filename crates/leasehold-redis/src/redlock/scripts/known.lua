-- KEYS: memory. Whether it remembers, the highest token that it knows, its clock, whether it has
-- voted since it was told what it knows.
local m = redis.call('HMGET', KEYS[1], 'run', 'cur', 'told')
local cur, told = tonumber(m[2] or 0), tonumber(m[3] or 0)
local remembers = m[1] == run()
return {remembers and 1 or 0, math.max(cur, told), now(), remembers and cur > told and 1 or 0}
