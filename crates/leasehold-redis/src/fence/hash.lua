-- Sets fields of a hash and its field `fencing_token`, unless the hash has seen a higher token.
-- KEYS: the hash. ARGV: the token, then field, value, field, value, …
-- Errors: STALETOKEN seen offered; BADTOKEN.
local function is_token(t)
  return string.find(t, '^[1-9]%d*$') and (#t < 19 or #t == 19 and t <= '9223372036854775807')
end
local function later(a, b)
  return #a > #b or #a == #b and a > b
end
local seen, offered = redis.call('HGET', KEYS[1], 'fencing_token'), ARGV[1]
if not is_token(offered) then
  return redis.error_reply('BADTOKEN the offered token is invalid')
end
if seen and not is_token(seen) then
  return redis.error_reply('BADTOKEN the stored token is invalid')
end
if seen and later(seen, offered) then
  return redis.error_reply('STALETOKEN ' .. seen .. ' ' .. offered)
end
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return redis.call('HSET', KEYS[1], 'fencing_token', offered)
