-- ARGV: id, mode, lease ms, waiter's lease us, seen, delay ms, inbox, who, kind, capacity, weight
use(1)
local id, mode = ARGV[1], ARGV[2]
local lease, waiter_lease, seen = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local kind, capacity, weight = ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])
local there = settle_all(id)
if there then
  local answer = beat_all(id, lease, waiter_lease)
  if answer then
    keep_all()
    return answer
  end
  local e = entry(id)
  if e then return holders_all({2}) end
  local k, c = redis.call('HGET', M, 'k'), tonumber(redis.call('HGET', M, 'c'))
  if k ~= kind or c ~= capacity or weight > c then return {3, k, c} end
else
  -- The name may be used as a mutex.
  local h = settle('')
  if h then return {3, 'mutex', 1, h.foreign} end
  if again and redis.call('EXISTS', W) == 1 then return {3, 'mutex', 1} end
  if weight > capacity then return {3, kind, capacity} end
end
local sum = there and held() or 0
local fits = sum + weight <= capacity and redis.call('EXISTS', W) == 0
if fits and is_closed() then
  if mode == 't' then return {7, again} end
  fits = false
end
if not fits and mode == 't' then return holders_all({2}) end
local delay = tonumber(ARGV[6])
if not there then
  -- Entries without their hash do not count.
  redis.call('DEL', H, W, X)
  redis.call('HSET', M, 'k', kind, 'c', capacity)
end
if delay > tonumber(redis.call('HGET', M, 'd') or 0) then redis.call('HSET', M, 'd', delay) end
local token = draw(clock, at, seen)
local ends = now + (fits and lease * 1000 or waiter_lease)
put(id, {state = fits and 'h' or 'w', weight = weight, delay = delay, inbox = ARGV[7],
  since = now, who = ARGV[8]})
redis.call('ZADD', fits and H or W, token, id)
redis.call('ZADD', X, text(ends), id)
if fits then redis.call('HINCRBY', M, 'h', weight) end
local answer = beat_all(id, lease, waiter_lease)
keep_all()
return answer
