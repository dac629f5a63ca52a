-- A free mutex that nobody waits for, before anything else: the uncontended path. Looked at before
-- a token is drawn, so that who finds it held and does not wait writes nothing.
-- ARGV: id, mode, lease ms, waiter's lease us, seen, delay ms, inbox, who
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[5]) == 0 and starting() == 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local token = math.min(math.max(now, ARGV[5] + 1), 4503599627370496)
  local written = string.format('%.0f', token)
  local last = tonumber(redis.call('GETSET', KEYS[2], written) or 0) or 0
  if last >= token then
    token = last + 1
    written = string.format('%.0f', token)
    redis.call('SET', KEYS[2], written)
  end
  local value = ARGV[1] .. ' ' .. written .. ' ' .. string.format('%.0f', now) .. ' ' .. ARGV[6] .. ' ' .. ARGV[8]
  redis.call('SET', KEYS[1], value, 'NX', 'PX', ARGV[3] + ARGV[6])
  return {0, token, ARGV[3] * 1000}
end
