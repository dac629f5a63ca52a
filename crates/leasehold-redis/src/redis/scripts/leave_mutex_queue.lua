-- Returns 1 if the claim existed, otherwise 0. Adds 2 if the lock is free but was not granted,
-- because expired claims may remain ahead of the next live one. The client then repeats the call.
use(1)
local id, keep, member = ARGV[1], tonumber(ARGV[2] or 0), ARGV[3] or ''

-- Ends the hold.
local function finish(h)
  if h.gone then return 1 end
  if keep > 0 then
    touch()
    redis.call('SET', main, id .. '!' .. text(h.token) .. ' ' .. at .. ' 0 ' .. h.who, 'PX', keep)
  elseif not hand_over('') then
    redis.call('DEL', main)
  end
  return 1 + more()
end

local h = holder()
if h and h.id == id then return finish(h) end
if redis.call('EXISTS', M) == 1 then return 0 end
h = settle(id)
if h and h.id == id then return finish(h) end
if member == '' then member = find(id) end
local left = 0
if member then
  redis.call('ZREM', X, member)
  left = redis.call('ZREM', W, member)
end
return left + more()
