-- Lua's numbers are doubles, exact up to 2^53. Neither the server's time nor a client's `seen` can
-- raise a token above half of that.
local MOST = 4503599627370496

-- Returns the server's time in us as text, because formatting a number costs as much as a command.
local function stamp()
  local time = redis.call('TIME')
  return time[1] .. string.sub('00000' .. time[2], -6)
end

-- Draws a token, as text, from the slot's hybrid clock. It is at least the server's time, and above
-- the last token drawn and above `seen`.
local function draw(clock, at, seen)
  local token, now = at, tonumber(at)
  if seen >= now or now > MOST then
    token = string.format('%.0f', math.min(math.max(now, seen + 1), MOST))
  end
  local last = tonumber(redis.call('GETSET', clock, token) or 0) or 0
  if last >= tonumber(token) then
    token = string.format('%.0f', last + 1)
    redis.call('SET', clock, token)
  end
  return token
end
