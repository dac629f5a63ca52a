-- Functions that the scripts share. KEYS has six keys for each lock, and `use` selects the n-th
-- lock.
local main, clock, W, X, M, H

local function use(n)
  local k = 6 * (n - 1)
  main, clock, W, X, M, H = KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4], KEYS[k + 5], KEYS[k + 6]
end

local at = stamp()
local now = tonumber(at)

-- Maximum number of expired claims that one call removes. The server serves no other client
-- meanwhile.
local MANY = 1000
-- After how many us to poll again, if the lock is free but cannot be granted yet. Either expired
-- claims may remain ahead of the first live one, or the server has just started.
local again = nil
-- The value of `again` if expired claims may remain. The next poll continues to remove them.
local SOON = 10000

local function text(n)
  return string.format('%.0f', n)
end

local function more()
  return again == SOON and 2 or 0
end

local function score(key, id)
  return tonumber(redis.call('ZSCORE', key, id) or 0)
end

-- A server whose memory is full rejects a script's first write if that write may need memory. It
-- accepts all writes after one that needs none. So existing claims are renewed and granted after
-- this ZREM. A new claim does not use it, and is rejected when its token is drawn.
local touched = false
local function touch()
  if touched then return end
  touched = true
  redis.call('ZREM', X, '')
end

-- A mutex. Its holder is the value of the main key: `id token since delay who`. During a cooldown
-- (the holder is gone but the lock is not free yet), a `!` replaces the first blank. Its waiters
-- are members `id delay inbox who` of W, sorted by token, and of X, sorted by the time at which
-- they expire.

-- Returns whether the main key is a hash like Redisson's locks. Its fields are the holders, as
-- `client's-uuid:thread`, and its values count their holds. A read-write lock also has a field
-- `mode`.
local function is_redissons()
  local mode = redis.pcall('HGET', main, 'mode')
  if type(mode) == 'table' then return false end
  if mode == 'read' or mode == 'write' then return true end
  local page = redis.pcall('HSCAN', main, '0', 'COUNT', 10)
  if page.err or #page[2] == 0 then return false end
  for i = 1, #page[2], 2 do
    local uuid = string.match(page[2][i], '^([%x-]+):%d+$')
    if not uuid or #uuid ~= 36 or not string.find(page[2][i + 1], '^%d+$') then return false end
  end
  return true
end

-- Returns the kind of a value that leasehold did not write: `redisson`, `number` (a counter or a
-- Redisson semaphore), or `text`.
local function foreign(value, left)
  if type(value) == 'table' then return 'redisson' end
  if left == -1 and string.find(value, '^%d+$') then return 'number' end
  return 'text'
end

-- Returns the holder, or nil. `foreign` is the kind of a value that leasehold did not write. `left`
-- is the key's remaining time in ms, `lease` that of the hold. `gone`: the lock is in its cooldown.
local function holder()
  local value = redis.pcall('GET', main)
  if not value then return nil end
  -- If the key is not a lock, this returns the server's error to the client.
  if type(value) == 'table' and not is_redissons() then redis.call('GET', main) end
  local h = {left = redis.call('PTTL', main)}
  if h.left == -2 then return nil end
  h.foreign, h.value = foreign(value, h.left), value
  if h.foreign == 'redisson' then return h end
  local id, flag, token, since, delay, who =
    string.match(value, '^(%x+)([ !])(%d+) (%d+) (%d+) (.*)$')
  if id and #id == 32 then
    h.id, h.token, h.since, h.delay, h.who = id, tonumber(token), tonumber(since), tonumber(delay), who
    h.gone = flag == '!' or (h.delay > 0 and h.left <= h.delay)
    h.lease = math.max(h.left - h.delay, 0)
    h.foreign = nil
  end
  return h
end

-- Returns the claims that have expired, at most as many as one call removes.
local function expired()
  return redis.call('ZRANGEBYSCORE', X, '-inf', at, 'LIMIT', 0, MANY)
end

-- Removes expired waiters of a mutex.
local function bury()
  local dead = expired()
  for i = 1, #dead, 100 do
    local last = math.min(i + 99, #dead)
    redis.call('ZREM', W, unpack(dead, i, last))
    redis.call('ZREM', X, unpack(dead, i, last))
  end
end

-- Returns whether the server has just started and grants no lock yet. It reports its age in whole
-- seconds, which may be one too many.
local function is_closed()
  if RESTART == 0 then return false end
  local up = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)') or 0)
  local left = math.max(RESTART + 1000 - up * 1000, 0)
  if left > 0 then again = left * 1000 end
  return left > 0
end

-- Grants a free mutex to the first live waiter. Returns whether there was one.
local function hand_over(asking)
  if is_closed() then return false end
  for _ = 1, MANY do
    local granted = grant_first(main, W, X, at, asking)
    if granted ~= nil then return granted end
  end
  again = SOON
  return false
end

-- Settles a mutex: removes expired waiters and grants the lock if it is free. Returns the holder.
local function settle(asking)
  bury()
  local h = holder()
  if not h and hand_over(asking) then h = holder() end
  return h
end

local function keep_companions(waiter_lease)
  local ms = kept_for(waiter_lease)
  redis.call('PEXPIRE', W, ms)
  redis.call('PEXPIRE', X, ms)
end

-- Returns after how many us the first waiter should poll again: when the holder's time ends. A
-- client of another library deletes its key without a notification, so then after at most 100 ms.
local function head_remaining(h)
  local left = h.left
  if h.id and not h.gone and h.delay > 0 then left = h.lease end
  if not h.id then left = math.min(left, 100) end
  return math.max(left, 1) * 1000
end

-- Returns after how many us a waiter should poll again, or -1. The first waiter polls when the
-- holder's time ends. All waiters poll while expired claims may remain.
local function ask_again(rank, h)
  if again and (rank == 0 or again == SOON) then return again end
  if rank == 0 and h then return head_remaining(h) end
  return -1
end

-- Returns the member of W that begins with this id, if the client does not know the rest. Such a
-- client had stopped waiting, and a late request put it back in the queue. Only both ends of a long
-- queue are searched. A member that is not found expires.
local function find(id)
  for _, ends in ipairs({{0, 99}, {-100, -1}}) do
    for _, member in ipairs(redis.call('ZRANGE', W, ends[1], ends[2])) do
      if string.sub(member, 1, 32) == id then return member end
    end
  end
end

-- Extends the holder's lease, and never shortens it.
local function lengthen(h, lease)
  if h.lease < lease then
    redis.call('PEXPIRE', main, lease + h.delay)
    h.lease = lease
  end
  return {0, h.token, h.lease * 1000}
end

-- Renews a claim on a mutex whose holder is `h`. Returns the answer, or nil if the claim is gone.
local function beat(h, id, member, lease, waiter_lease)
  if h and h.id == id then
    if h.gone then return nil end
    return lengthen(h, lease)
  end
  if member == '' then member = find(id) end
  local token = member and redis.call('ZSCORE', W, member)
  if not token then return nil end
  local ends = now + waiter_lease
  if ends > score(X, member) then
    touch()
    redis.call('ZADD', X, text(ends), member)
  end
  local rank = redis.call('ZRANK', W, member)
  return {1, rank + 1, ask_again(rank, h), tonumber(token)}
end

-- Read-write locks and semaphores. M has the lock's kind (`k`) and capacity (`c`), the weight that
-- is held (`h`), and the longest lock delay of all claims that joined (`d`). For each claim's id it
-- has `state weight delay inbox since who`. The state is h (holds), w (waits) or d (cooldown). H
-- has the ids of claims that hold or are in their cooldown, W those of waiters, both sorted by
-- token. X has all ids, sorted by the time at which they expire.

local function entry(id)
  local found = redis.call('HGET', M, id)
  if not found then return nil end
  local state, weight, delay, inbox, since, who = string.match(found, '^(%a) (%d+) (%d+) (%S+) (%d+) (.*)$')
  return {state = state, weight = tonumber(weight), delay = tonumber(delay), inbox = inbox,
    since = tonumber(since), who = who}
end

local function put(id, e)
  redis.call('HSET', M, id, string.format('%s %d %.0f %s %.0f %s', e.state, e.weight, e.delay, e.inbox, e.since, e.who))
end

local function held()
  return tonumber(redis.call('HGET', M, 'h') or 0)
end

local function remove(id, e)
  redis.call('ZREM', X, id)
  redis.call('ZREM', H, id)
  redis.call('ZREM', W, id)
  redis.call('HDEL', M, id)
  if e.state ~= 'w' then redis.call('HINCRBY', M, 'h', -e.weight) end
end

-- Sets the expiry of the lock's keys: after the last entry has expired and its cooldown is over.
-- Without entries, deletes them.
local function keep_all()
  local last = redis.call('ZREVRANGE', X, 0, 0, 'WITHSCORES')
  if not last[1] then
    redis.call('DEL', M, H, W, X)
    return
  end
  local delay = tonumber(redis.call('HGET', M, 'd') or 0)
  local ms = math.max(math.ceil((tonumber(last[2]) - now) / 1000), 0) + delay + SLACK
  redis.call('PEXPIRE', M, ms)
  redis.call('PEXPIRE', H, ms)
  redis.call('PEXPIRE', W, ms)
  redis.call('PEXPIRE', X, ms)
end

local function grant_all(asking)
  local first = redis.call('ZRANGE', W, 0, 0, 'WITHSCORES')
  if not first[1] or is_closed() then return end
  local capacity, sum, dead = tonumber(redis.call('HGET', M, 'c') or 0), held(), 0
  while first[1] do
    local id, e = first[1], entry(first[1])
    if not e or score(X, id) <= now then
      -- It has expired and was not removed yet, because there were too many, or its entry is
      -- missing.
      if dead == MANY then
        again = SOON
        return
      end
      dead = dead + 1
      remove(id, e or {state = 'w'})
    elseif sum + e.weight > capacity then
      return
    else
      sum = sum + e.weight
      e.state, e.since = 'h', now
      touch()
      put(id, e)
      redis.call('ZREM', W, id)
      redis.call('ZADD', H, first[2], id)
      redis.call('HINCRBY', M, 'h', e.weight)
      if id ~= asking then
        redis.call('PUBLISH', e.inbox, id .. ' ' .. text(tonumber(first[2])))
      end
    end
    first = redis.call('ZRANGE', W, 0, 0, 'WITHSCORES')
  end
end

-- Settles a read-write lock or semaphore: removes expired claims and grants it to the waiters that
-- fit. Returns whether any claim is left.
local function settle_all(asking)
  if redis.call('EXISTS', M) == 0 then return false end
  local dead = expired()
  if #dead == MANY then again = SOON end
  for _, id in ipairs(dead) do
    local e = entry(id)
    local ends = tonumber(redis.call('ZSCORE', X, id))
    if not e then
      redis.call('ZREM', X, id)
    elseif e.state == 'h' and e.delay > 0 and ends + e.delay * 1000 > now then
      e.state, e.since = 'd', ends
      touch()
      put(id, e)
      redis.call('ZADD', X, text(ends + e.delay * 1000), id)
    else
      remove(id, e)
    end
  end
  grant_all(asking)
  if redis.call('EXISTS', X) == 1 then return true end
  redis.call('DEL', M, H, W, X)
  again = nil
  return false
end

-- Renews a claim on a read-write lock or semaphore. Returns the answer, or nil if the claim is
-- gone. A claim that is missing in H or W has lost its place, and is removed.
local function beat_all(id, lease, waiter_lease)
  local e = entry(id)
  if not e or e.state == 'd' then return nil end
  local rank = redis.call('ZRANK', e.state == 'h' and H or W, id)
  if not rank then
    remove(id, e)
    return nil
  end
  local ends = now + waiter_lease
  if e.state == 'h' then ends = now + lease * 1000 end
  ends = math.max(ends, score(X, id))
  touch()
  redis.call('ZADD', X, text(ends), id)
  if e.state == 'h' then return {0, score(H, id), ends - now} end
  local head = ask_again(rank, nil)
  if rank == 0 and not again then
    head = math.max(tonumber(redis.call('ZRANGE', X, 0, 0, 'WITHSCORES')[2]) - now, 1)
  end
  return {1, redis.call('ZCARD', H) + rank, head, score(W, id)}
end

-- Appends the first 100 holders to the answer, each as `token age who`, for messages.
local function holders_all(answer)
  for _, id in ipairs(redis.call('ZRANGE', H, 0, 99)) do
    local e = entry(id)
    if e then
      answer[#answer + 1] = text(score(H, id)) .. ' ' .. text(math.max(now - e.since, 0)) .. ' ' .. e.who
    end
  end
  return answer
end
