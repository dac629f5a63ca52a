-- For how long after its start the server lets nobody in: 0 ms but for the URL's restart_delay_ms.
local RESTART = 0

-- What is left of that, in ms. A server tells its age in whole seconds, which may be one too many.
local function starting()
  if RESTART == 0 then return 0 end
  local up = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)') or 0)
  return math.max(RESTART + 1000 - up * 1000, 0)
end
