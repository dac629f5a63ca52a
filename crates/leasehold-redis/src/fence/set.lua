-- Sets a string, unless it has seen a higher token.
-- KEYS: the string, the key of its token. ARGV: the token, the value.
-- Errors: STALETOKEN seen offered; BADTOKEN.
local function is_token(t)
  return string.find(t, '^[1-9]%d*$') and (#t < 19 or #t == 19 and t <= '9223372036854775807')
end
local function later(a, b)
  return #a > #b or #a == #b and a > b
end
local seen, offered = redis.call('GET', KEYS[2]), ARGV[1]
if not is_token(offered) then
  return redis.error_reply('BADTOKEN the offered token is invalid')
end
if seen and not is_token(seen) then
  return redis.error_reply('BADTOKEN the stored token is invalid')
end
if seen and later(seen, offered) then
  return redis.error_reply('STALETOKEN ' .. seen .. ' ' .. offered)
end
redis.call('SET', KEYS[2], offered)
return redis.call('SET', KEYS[1], ARGV[2])
