-- KEYS: main, record, memory, waiting, alive. ARGV: take, claim, attempt, lease ms, proposal,
-- holder, for how many ms the record is kept. Then, if the claim waits: its entry, for how many ms
-- it has waited, for how many ms from now it counts as alive. Or KEYS: memory. ARGV: check.
if ARGV[1] == 'check' then
  if run() ~= RUN then
    redis.call('HDEL', KEYS[1], 'run')
    return 'CHANGED'
  end
  if redis.call('HGET', KEYS[1], 'run') ~= RUN then lapsed(KEYS[1], RUN, now()) end
  return 'OK'
end
if redis.call('HGET', KEYS[3], 'run') ~= RUN then return {'forgot'} end
-- Redis before 7 saves scripts in its snapshots if it ever had a replica.
if not redis.REDIS_VERSION_NUM and run() ~= RUN then return {'forgot'} end
local at = now()
local value = redis.call('GET', KEYS[1])
if value then
  local claim, number = owner(value)
  local waits_here = is_kept(value) and ARGV[8] and redis.call('ZSCORE', KEYS[4], ARGV[8])
  if not waits_here and (claim ~= ARGV[2] or tonumber(number) > tonumber(ARGV[3])) then
    local ahead = 0
    if ARGV[8] then
      local ms = math.floor(at / 1000) + tonumber(ARGV[10])
      local since = math.floor(at / 1000) - tonumber(ARGV[9])
      redis.call('ZADD', KEYS[4], 'NX', since, ARGV[8])
      redis.call('ZADD', KEYS[5], ms, ARGV[8])
      -- Never shortened, because other waiters may count as alive for longer than this one.
      for _, set in ipairs({KEYS[4], KEYS[5]}) do
        if redis.call('PTTL', set) < tonumber(ARGV[10]) then redis.call('PEXPIREAT', set, ms) end
      end
      ahead = redis.call('ZRANK', KEYS[4], ARGV[8]) or 0
    end
    local r = redis.call('HMGET', KEYS[2], 'id', 'token', 'holder', 'since', 'last')
    local holder = r[1] == value
    return {'busy', value, redis.call('PTTL', KEYS[1]), ahead, tonumber(r[5] or 0),
      holder and tonumber(r[2]) or 0, holder and r[3] or '',
      holder and math.max(0, math.floor(at / 1000) - tonumber(r[4])) or 0}
  end
end
local mine = ARGV[2] .. '.' .. ARGV[3]
redis.call('SET', KEYS[1], mine, 'PX', ARGV[4])
if ARGV[8] then
  redis.call('ZREM', KEYS[4], ARGV[8])
  redis.call('ZREM', KEYS[5], ARGV[8])
end
local highest, cur = last(KEYS[3], KEYS[2])
local proposal = tonumber(ARGV[5])
local stored = proposal > highest
if stored then
  highest = proposal
  if proposal > cur then redis.call('HSET', KEYS[3], 'cur', proposal) end
end
redis.call('HSET', KEYS[2], 'id', mine, 'last', highest, 'token', stored and proposal or 0,
  'holder', ARGV[6], 'since', math.floor(at / 1000))
redis.call('PEXPIRE', KEYS[2], ARGV[7])
return {'granted', stored and 1 or 0, highest}
