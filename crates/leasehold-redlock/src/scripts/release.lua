-- KEYS: main, record, waiting, alive. ARGV: claim, last attempt to release, and the claim's entry
-- among the waiters or nothing.
if ARGV[3] then
  redis.call('ZREM', KEYS[3], ARGV[3])
  redis.call('ZREM', KEYS[4], ARGV[3])
end
local claim, number = owner(redis.call('GET', KEYS[1]))
if claim ~= ARGV[1] or tonumber(number) > tonumber(ARGV[2]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], 'id', 'token', 'holder', 'since')
wake(KEYS[1], KEYS[3], KEYS[4], now())
return 1
