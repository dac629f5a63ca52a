-- Functions that the scripts share.
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local function owner(value)
  if not value then return nil end
  return string.match(value, '^(%x+)%.(%d+)$')
end
local function run()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end
-- Returns the name's last token, and the highest token stored for any name. A name without a record
-- is treated as if the latter were its own.
local function last(memory, record)
  local m = redis.call('HMGET', memory, 'cur', 'told')
  local cur, told = tonumber(m[1] or 0), tonumber(m[2] or 0)
  local own = redis.call('HGET', record, 'last')
  return math.max(own and tonumber(own) or cur, told), cur
end
-- Returns since when this run of the server is known to have lost its memory, in µs. If that was
-- not known, stores the current time.
local function lapsed(memory, current, at)
  local m = redis.call('HMGET', memory, 'lapsed', 'since')
  local since = tonumber(m[2] or 0)
  if m[1] ~= current or since > at then
    since = at
    redis.call('HSET', memory, 'lapsed', current, 'since', at)
  end
  return since
end
-- Notifies the claim that has waited longest, among those that count as alive, that the node is
-- free. Reserves the node for it.
local function wake(main, waiting, alive, at)
  local ms = math.floor(at / 1000)
  local dead = redis.call('ZRANGEBYSCORE', alive, '-inf', ms, 'LIMIT', 0, 100)
  for _, who in ipairs(dead) do
    redis.call('ZREM', alive, who)
    redis.call('ZREM', waiting, who)
  end
  local first = redis.call('ZRANGE', waiting, 0, 0)[1]
  if first then
    local id, channel = string.match(first, '^(%x+) (%S+) ')
    if not channel then return end
    redis.pcall('SET', main, id .. '.0', 'NX', 'PX', KEPT)
    local ends = redis.call('ZSCORE', alive, first)
    if ends and tonumber(ends) > ms + SOON then redis.pcall('ZADD', alive, ms + SOON, first) end
    redis.call('PUBLISH', channel, id)
  end
end
-- Returns whether the node is not held but reserved for a waiter.
local function is_kept(value)
  local _, number = owner(value)
  return number == '0'
end
