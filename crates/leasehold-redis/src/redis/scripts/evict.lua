-- ARGV: a token, or 0 for every holder. Returns how many claims were removed. If another program's
-- key is not deleted, returns its kind and its remaining time in ms.
use(1)
local token = tonumber(ARGV[1])
local removed = 0

-- Notifies the evicted client. If the permission to publish is missing, the script must still
-- finish.
local function told(id)
  redis.pcall('PUBLISH', 'leasehold:inbox:all', id .. ' evicted')
end

local function chosen(key)
  if token > 0 then return redis.call('ZRANGEBYSCORE', key, text(token), text(token)) end
  return redis.call('ZRANGE', key, 0, -1)
end

-- Returns whether another program's string looks like a lock that was set by SET NX PX. Such a
-- string expires, and is a random word or random bytes. Numbers, sentences, JSON and addresses are
-- data.
local function is_recipe(h)
  if h.foreign ~= 'text' or h.left == -1 then return false end
  local value = h.value
  if #value < 16 or #value > 128 then return false end
  if string.find(value, '[^\32-\126]') then return #value <= 32 end
  return string.find(value, '^[%w_:=+/.@-]+$') and string.find(value, '%d') and string.find(value, '%a')
    and not string.find(value, '://')
end

if settle_all('') then
  for _, key in ipairs(token > 0 and {H, W} or {H}) do
    for _, id in ipairs(chosen(key)) do
      remove(id, entry(id) or {state = 'w'})
      told(id)
      removed = removed + 1
    end
  end
  grant_all('')
  keep_all()
  return removed
end
local h = settle('')
if h and token == 0 and h.foreign and not is_recipe(h) then return {h.foreign, h.left} end
if h and (token == 0 or h.token == token) then
  redis.call('DEL', main)
  if h.id then told(h.id) end
  removed = 1
elseif token > 0 then
  for _, member in ipairs(chosen(W)) do
    redis.call('ZREM', W, member)
    redis.call('ZREM', X, member)
    told(string.sub(member, 1, 32))
    removed = removed + 1
  end
end
settle('')
return removed
