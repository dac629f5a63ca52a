-- KEYS: main, record. ARGV: value, lease ms. Returns 1: extended, 0: free, -1: another
-- claim has it.
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
if value ~= ARGV[1] then return -1 end
local lease = tonumber(ARGV[2])
if redis.call('PTTL', KEYS[1]) < lease then redis.call('PEXPIRE', KEYS[1], lease) end
if redis.call('PTTL', KEYS[2]) < lease + MEMORY then
  redis.call('PEXPIRE', KEYS[2], lease + MEMORY)
end
return 1
