-- Runs your own script, which replaces BODY, unless a higher token has been seen.
-- KEYS: the key of the token, then the KEYS of your script. ARGV: the token, then the ARGV of your
-- script.
-- Errors: STALETOKEN seen offered; BADTOKEN; and those of your script. Redis undoes no writes of a
-- script that fails.
local function is_token(t)
  return string.find(t, '^[1-9]%d*$') and (#t < 19 or #t == 19 and t <= '9223372036854775807')
end
local function later(a, b)
  return #a > #b or #a == #b and a > b
end
local seen, offered = redis.call('GET', KEYS[1]), ARGV[1]
if not is_token(offered) then
  return redis.error_reply('BADTOKEN the offered token is invalid')
end
if seen and not is_token(seen) then
  return redis.error_reply('BADTOKEN the stored token is invalid')
end
if seen and later(seen, offered) then
  return redis.error_reply('STALETOKEN ' .. seen .. ' ' .. offered)
end
redis.call('SET', KEYS[1], offered)
local function work(KEYS, ARGV)
  -- BODY
end
return work({unpack(KEYS, 2)}, {unpack(ARGV, 2)})
