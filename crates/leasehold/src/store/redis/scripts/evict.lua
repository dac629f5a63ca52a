-- ARGV: a token, or 0 for every holder
use(1)
local token = tonumber(ARGV[1])
local removed = 0
if settle_all('') then
  for _, key in ipairs({H, W}) do
    for _, id in ipairs(redis.call('ZRANGE', key, 0, -1)) do
      local chosen = token > 0 and score(key, id) == token or token == 0 and key == H
      if chosen then
        remove(id, entry(id))
        removed = removed + 1
      end
    end
  end
  grant_all('')
  keep_all()
  return removed
end
local h = settle('')
if h and (token == 0 or h.token == token) then
  redis.call('DEL', main)
  removed = 1
elseif token > 0 then
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', W, text(token), text(token))) do
    redis.call('ZREM', W, member)
    redis.call('ZREM', X, member)
    removed = removed + 1
  end
end
settle('')
return removed
