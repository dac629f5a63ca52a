use(1)
local id, mode = ARGV[1], ARGV[2]
local lease, waiter_lease, seen = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local delay, inbox, who = ARGV[6], ARGV[7], ARGV[8]
if settle_all('') then
  -- The name is used as something else.
  return {3, redis.call('HGET', M, 'k'), tonumber(redis.call('HGET', M, 'c'))}
end
local h = settle(id)
local member = id .. ' ' .. delay .. ' ' .. inbox .. ' ' .. who
local answer = beat(h, id, member, lease, waiter_lease)
if answer then return answer end
if not h then
  local token = draw(seen)
  redis.call('SET', main, id .. ' ' .. text(token) .. ' ' .. text(now) .. ' ' .. delay .. ' ' .. who, 'PX', lease + delay)
  return {0, token, lease * 1000}
end
if not h.id and h.left == -1 then return {4} end
if mode == 't' or h.id == id then
  local busy = {2}
  if h.id then
    busy[2] = text(h.token) .. ' ' .. text(math.max(now - h.since, 0)) .. ' ' .. h.who
  end
  return busy
end
local token = drawn or draw(seen)
redis.call('ZADD', W, text(token), member)
redis.call('ZADD', X, text(now + waiter_lease), member)
keep_companions(waiter_lease)
local ahead = redis.call('ZCARD', W)
return {1, ahead, ahead == 1 and head_remaining(h) or -1, token}
