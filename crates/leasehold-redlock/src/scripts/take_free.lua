-- The common case of a vote, ahead of the functions that `take.lua` needs: the key is free, and the
-- proposal is above all tokens that the node has stored. It stores the same data as `take.lua`. In
-- all other cases it writes nothing, and `take.lua` follows. A claim's first attempt has no entry
-- to remove.
local known = ARGV[1] == 'take' and redis.REDIS_VERSION_NUM and redis.call('HMGET', KEYS[3], 'run', 'cur', 'told')
if known and known[1] == RUN then
  local mine, proposal = ARGV[2] .. '.' .. ARGV[3], ARGV[5]
  local new = tonumber(proposal)
  local set = new > tonumber(known[2] or 0) and new > tonumber(known[3] or 0)
    and redis.pcall('SET', KEYS[1], mine, 'NX', 'PX', ARGV[4])
  if set and set.ok then
    redis.call('HSET', KEYS[3], 'cur', proposal)
    if ARGV[8] and ARGV[3] ~= '1' then
      redis.call('ZREM', KEYS[4], ARGV[8])
      redis.call('ZREM', KEYS[5], ARGV[8])
    end
    local t = redis.call('TIME')
    redis.call('HSET', KEYS[2], 'id', mine, 'last', proposal, 'token', proposal, 'holder', ARGV[6],
      'since', t[1] .. string.sub('00000' .. t[2], -6, -4))
    redis.call('PEXPIRE', KEYS[2], ARGV[7])
    return 'stored'
  end
end
