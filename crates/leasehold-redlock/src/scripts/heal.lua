-- KEYS: main, record. ARGV: value, lease ms, token, holder.
local lease = tonumber(ARGV[2])
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', lease) then return 0 end
redis.call('HSET', KEYS[2], 'id', ARGV[1], 'token', ARGV[3], 'holder', ARGV[4],
  'since', math.floor(now() / 1000))
redis.call('PEXPIRE', KEYS[2], lease + MEMORY)
return 1
