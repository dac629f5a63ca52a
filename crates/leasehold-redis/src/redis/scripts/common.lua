-- What the scripts share. KEYS come in sixes, one for each lock; `use` turns to the n-th of them.
local main, clock, W, X, M, H

local function use(n)
  local k = 6 * (n - 1)
  main, clock, W, X, M, H = KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4], KEYS[k + 5], KEYS[k + 6]
end

local at = stamp()
local now = tonumber(at)

-- How many of those who died one call takes out of a queue: the server serves nobody else meanwhile.
local MANY = 1000
-- Where what is free cannot be granted yet, for there may be more dead ones before the first that
-- lives, or the server has just started: in how many us to ask again.
local again = nil
-- It is the dead: then whoever asks goes on with them at once.
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

-- A server whose memory is full refuses the first write of a script if it may need memory, and none
-- after one that cannot. Whoever is here already is kept and moved on, so that comes first; whoever
-- is new is refused by what is drawn for it.
local touched = false
local function touch()
  if touched then return end
  touched = true
  redis.call('ZREM', X, '')
end

-- A mutex. Its holder is the value of the main key: `id token since delay who`, with a `!` in
-- place of the first blank once the holder is gone and the place is kept. Its waiters are members
-- `id delay inbox who` of W, by token, and of X, by the time at which they expire.

-- Whether the main key is a hash as Redisson's locks are: in it is who holds, as
-- `client's-uuid:thread`, and how often; in a read-write lock also its `mode`.
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

-- What is there that is none of ours: `redisson`, `number` (a counter, or a semaphore of
-- Redisson's), or `text`.
local function foreign(value, left)
  if type(value) == 'table' then return 'redisson' end
  if left == -1 and string.find(value, '^%d+$') then return 'number' end
  return 'text'
end

-- The holder: whether it is one of ours, and what is left of its lease and of the key.
local function holder()
  local value = redis.pcall('GET', main)
  if not value then return nil end
  -- What is no lock at all is an error of the server's.
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

-- Those whose time is over, as many as one call removes.
local function expired()
  return redis.call('ZRANGEBYSCORE', X, '-inf', at, 'LIMIT', 0, MANY)
end

-- Removes waiters of a mutex that died.
local function bury()
  local dead = expired()
  for i = 1, #dead, 100 do
    local last = math.min(i + 99, #dead)
    redis.call('ZREM', W, unpack(dead, i, last))
    redis.call('ZREM', X, unpack(dead, i, last))
  end
end

-- Whether a server that has just started lets nobody in yet. It tells its age in whole seconds, which
-- may be one too many.
local function is_closed()
  if RESTART == 0 then return false end
  local up = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)') or 0)
  local left = math.max(RESTART + 1000 - up * 1000, 0)
  if left > 0 then again = left * 1000 end
  return left > 0
end

-- Grants a mutex that is free to the first that lives and waits.
local function hand_over(asking)
  if is_closed() then return false end
  for _ = 1, MANY do
    local granted = grant_first(main, W, X, at, asking)
    if granted ~= nil then return granted end
  end
  again = SOON
  return false
end

-- Settles a mutex, and tells its holder.
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

-- When the first that waits is to ask again: at the holder's end. A client of another library may
-- delete its key without a word to us: then soon.
local function head_remaining(h)
  local left = h.left
  if h.id and not h.gone and h.delay > 0 then left = h.lease end
  if not h.id then left = math.min(left, 100) end
  return math.max(left, 1) * 1000
end

-- When a waiter is to ask again, or -1: the first one at the holder's end, and all while there are
-- dead ones to be removed.
local function ask_again(rank, h)
  if again and (rank == 0 or again == SOON) then return again end
  if rank == 0 and h then return head_remaining(h) end
  return -1
end

-- The member of W that begins with this id, where the client does not know the rest: it has
-- believed that it waits no more, so this is a place that a request made which came late. Of long
-- queues only the ends are looked at; what is not found expires by itself.
local function find(id)
  for _, ends in ipairs({{0, 99}, {-100, -1}}) do
    for _, member in ipairs(redis.call('ZRANGE', W, ends[1], ends[2])) do
      if string.sub(member, 1, 32) == id then return member end
    end
  end
end

-- Lengthens the holder's lease, never shortens it.
local function lengthen(h, lease)
  if h.lease < lease then
    redis.call('PEXPIRE', main, lease + h.delay)
    h.lease = lease
  end
  return {0, h.token, h.lease * 1000}
end

-- "And now?" for a claim on a mutex whose holder is `h`: an answer, or nil if it is not here.
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

-- Read-write locks and semaphores. M has what the lock is (`k`, `c`), the weight that is held
-- (`h`), the longest lock-delay of all that joined (`d`), and for each claim's id `state weight delay inbox since who`, the state being h(olding),
-- w(aiting) or d(eparted). H has the ids of those that hold or departed, W of those that wait, both
-- by token; X has all, by the time at which they expire.

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

-- Keeps the companions for as long as anything is in them, or may be kept closed after it, and not
-- for ever.
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
      -- It died, and there were so many that nobody has come to it; or somebody took its entry.
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

-- Settles a read-write lock or semaphore; tells whether anything is left of it.
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

-- "And now?" for a claim on a read-write lock or semaphore. One that somebody took out of the
-- order has no place any more.
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

-- Who holds, for people: `token age who` each.
local function holders_all(answer)
  for _, id in ipairs(redis.call('ZRANGE', H, 0, 99)) do
    local e = entry(id)
    if e then
      answer[#answer + 1] = text(score(H, id)) .. ' ' .. text(math.max(now - e.since, 0)) .. ' ' .. e.who
    end
  end
  return answer
end
