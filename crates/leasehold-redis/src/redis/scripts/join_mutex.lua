-- The common cases of a claim on a mutex, ahead of the shared functions: it is free without
-- waiters, or a leasehold claim holds it. The lock is checked before a token is drawn, so a claim
-- that finds it held and does not wait writes nothing. In all other cases, this block changes
-- nothing.
-- ARGV: id, expiry of the main key in ms (lease plus lock delay), seen, `delay who`, and the values
-- that are rarely needed: `mode lease waiter's-lease inbox` (the lease in ms, the waiter's lease in
-- us).
do
  local main, clock, W, M = KEYS[1], KEYS[2], KEYS[3], KEYS[5]
  local there = redis.call('EXISTS', main, W, M)
  if there == 0 and RESTART == 0 then
    local at = stamp()
    local token = draw(clock, at, tonumber(ARGV[3]))
    redis.call('SET', main, ARGV[1] .. ' ' .. token .. ' ' .. at .. ' ' .. ARGV[4], 'NX', 'PX', ARGV[2])
    return token
  end
  local value = there > 0 and redis.pcall('GET', main)
  local id, held, since, who
  if type(value) == 'string' then
    id, held, since, who = string.match(value, '^(%x+) (%d+) (%d+) 0 (.*)$')
  end
  if id and #id == 32 and id ~= ARGV[1] and (there == 1 or redis.call('EXISTS', M) == 0) then
    local at, X = stamp(), KEYS[4]
    local delay, mine = string.match(ARGV[4], '^(%d+) (.*)$')
    local mode, waiter_lease, inbox = string.match(ARGV[5], '^(%a) %d+ (%d+) (%S*)$')
    local member = ARGV[1] .. ' ' .. delay .. ' ' .. inbox .. ' ' .. mine
    local alone = there == 1
    if alone or not redis.call('ZSCORE', W, member)
      and not redis.call('ZRANGEBYSCORE', X, '-inf', at, 'LIMIT', 0, 1)[1] then
      if mode == 't' then
        return {2, held .. ' ' .. string.format('%.0f', math.max(at - since, 0)) .. ' ' .. who}
      end
      local token = draw(clock, at, tonumber(ARGV[3]))
      redis.call('ZADD', W, token, member)
      redis.call('ZADD', X, string.format('%.0f', at + waiter_lease), member)
      local kept = tostring(kept_for(waiter_lease))
      redis.call('PEXPIRE', W, kept)
      redis.call('PEXPIRE', X, kept)
      if alone then return '1 ' .. math.max(redis.call('PTTL', main), 1) .. '000 ' .. token end
      -- A waiter that is not the first does not poll.
      return redis.call('ZCARD', W) .. ' -1 ' .. token
    end
  end
end
