-- All other cases of a claim on a mutex. The arguments are those of join_mutex.lua. The reply begins
-- with a code: 0 the claim holds the lock, 1 it waits, 2 the lock is busy, 3 the name is used for
-- another kind of lock, 4 another library's key never expires, 6 another library holds the lock,
-- 7 the server has just restarted.
use(1)
local id, seen = ARGV[1], tonumber(ARGV[3])
local delay, who = string.match(ARGV[4], '^(%d+) (.*)$')
local mode, lease, waiter_lease, inbox = string.match(ARGV[5], '^(%a) (%d+) (%d+) (%S*)$')
lease, waiter_lease = tonumber(lease), tonumber(waiter_lease)
if settle_all('') then
  -- The name is used for another kind of lock.
  return {3, redis.call('HGET', M, 'k'), tonumber(redis.call('HGET', M, 'c'))}
end
local h = settle(id)
local member = id .. ' ' .. delay .. ' ' .. inbox .. ' ' .. who
local answer = beat(h, id, member, lease, waiter_lease)
if answer then return answer end
if not h and not again then
  local token = draw(clock, at, seen)
  redis.call('SET', main, id .. ' ' .. token .. ' ' .. at .. ' ' .. delay .. ' ' .. who, 'PX', lease + delay)
  return {0, token, lease * 1000}
end
if h and h.foreign and h.left == -1 then return {4, h.foreign} end
if mode == 't' and not h then return again == SOON and {2} or {7, again} end
if mode == 't' or h and h.id == id then
  if h.foreign then return {6, h.foreign, h.left * 1000} end
  local busy = {2}
  if h.id then
    busy[2] = text(h.token) .. ' ' .. text(math.max(now - h.since, 0)) .. ' ' .. h.who
  end
  return busy
end
local token = draw(clock, at, seen)
redis.call('ZADD', W, token, member)
redis.call('ZADD', X, text(now + waiter_lease), member)
keep_companions(waiter_lease)
local ahead = redis.call('ZCARD', W)
return {1, ahead, ask_again(ahead - 1, h), token}
