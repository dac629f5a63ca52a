-- KEYS: main, record, waiting, alive. ARGV: the values to remove. A value belongs to one attempt, so a
-- late or repeated call removes no later holder.
local value, wanted = redis.call('GET', KEYS[1]), false
for _, one in ipairs(ARGV) do wanted = wanted or value == one end
if not wanted or is_kept(value) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], 'id', 'token', 'holder', 'since')
wake(KEYS[1], KEYS[3], KEYS[4], now())
return 1
