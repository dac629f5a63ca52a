-- Grants a free mutex to the first waiter. Returns true if the waiter is live, false if there is
-- none, nil if it has expired. The grant lasts as long as its place in the queue would have. The
-- claim that called the script gets the grant in the reply, any other one by a message.
local function grant_first(main, W, X, at, asking)
  local head = redis.call('ZPOPMIN', W)
  local member, token = head[1], head[2]
  if not member then return false end
  local left = tonumber(redis.call('ZSCORE', X, member) or 0) - at
  redis.call('ZREM', X, member)
  -- A semaphore whose hash was deleted by hand leaves members of another format, which are dropped.
  local id, delay, inbox, who = string.match(member, '^(%x+) (%d+) (%S+) (.*)$')
  if not id or left <= 0 then return nil end
  -- Some servers return round numbers with an exponent.
  if string.find(token, '%D') then token = string.format('%.0f', token) end
  redis.call('SET', main, id .. ' ' .. token .. ' ' .. at .. ' ' .. delay .. ' ' .. who,
    'PX', math.ceil(left / 1000) + 1 + delay)
  if id ~= asking then redis.call('PUBLISH', inbox, id .. ' ' .. token) end
  return true
end
