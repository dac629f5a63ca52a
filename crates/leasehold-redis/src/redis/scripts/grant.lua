-- Grants a mutex that is free to the first that waits: true if it lives, false if nobody waits, nil if
-- it is dead. Such a grant lasts as long as the place did. Who asks just now is told by the answer, and
-- everybody else by a message.
local function grant_first(main, W, X, at, asking)
  local head = redis.call('ZPOPMIN', W)
  local member, token = head[1], head[2]
  if not member then return false end
  local left = tonumber(redis.call('ZSCORE', X, member) or 0) - at
  redis.call('ZREM', X, member)
  -- What is left of a semaphore whose hash somebody deleted is nobody's place.
  local id, delay, inbox, who = string.match(member, '^(%x+) (%d+) (%S+) (.*)$')
  if not id or left <= 0 then return nil end
  -- Some servers write round numbers with an exponent.
  if string.find(token, '%D') then token = string.format('%.0f', token) end
  redis.call('SET', main, id .. ' ' .. token .. ' ' .. at .. ' ' .. delay .. ' ' .. who,
    'PX', math.ceil(left / 1000) + 1 + delay)
  if id ~= asking then redis.call('PUBLISH', inbox, id .. ' ' .. token) end
  return true
end
