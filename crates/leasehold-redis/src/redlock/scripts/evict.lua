-- KEYS: main, record, waiting, alive. ARGV: value, or nothing for whatever is there.
local value = redis.call('GET', KEYS[1])
if not value or is_kept(value) or (ARGV[1] and value ~= ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], 'id', 'token', 'holder', 'since')
wake(KEYS[1], KEYS[3], KEYS[4], now())
return 1
