-- KEYS: main, record, waiting, alive. ARGV: how many waiters to skip, and how many to read at most
-- (the server serves no other client meanwhile).
-- Returns the holder's value, its ms left, token, holder and age in ms. Then how many waiters were
-- read, and for each live one: entry, age in ms, ms left. A key of another type is not an error, so
-- that it does not prevent listing the other locks.
local function read(...)
  local r = redis.pcall(...)
  if type(r) ~= 'table' or not r.err then return r end
  if string.find(r.err, 'WRONGTYPE', 1, true) then return nil, true end
  return redis.call(...)
end
local at = math.floor(now() / 1000)
local value, odd = read('GET', KEYS[1])
if odd then value = NO_LOCK end
if is_kept(value) then value = nil end
local r = read('HMGET', KEYS[2], 'id', 'token', 'holder', 'since') or {}
local holder = value and r[1] == value
local out = {value or '', value and redis.call('PTTL', KEYS[1]) or 0,
  holder and tonumber(r[2]) or 0, holder and r[3] or '',
  holder and math.max(0, at - tonumber(r[4])) or 0}
local all = read('ZRANGE', KEYS[3], ARGV[1], ARGV[1] + ARGV[2] - 1, 'WITHSCORES') or {}
out[6] = #all / 2
for i = 1, #all, 2 do
  local who, since = all[i], all[i + 1]
  local alive = read('ZSCORE', KEYS[4], who)
  if alive and tonumber(alive) > at then
    out[#out + 1] = who
    out[#out + 1] = math.max(0, at - tonumber(since))
    out[#out + 1] = tonumber(alive) - at
  end
end
return out
