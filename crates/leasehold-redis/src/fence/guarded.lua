-- Runs a script of yours, which you put in place of BODY, if no greater token has been seen.
-- KEYS: the mark, then those that your script sees as KEYS. ARGV: the token, then those that it
-- sees as ARGV.
-- Errors: STALETOKEN seen offered; BADTOKEN; and yours, of which Redis undoes nothing.
local function is_token(t)
  return string.find(t, '^[1-9]%d*$') and (#t < 19 or #t == 19 and t <= '9223372036854775807')
end
local function later(a, b)
  return #a > #b or #a == #b and a > b
end
local seen, offered = redis.call('GET', KEYS[1]), ARGV[1]
if not is_token(offered) then
  return redis.error_reply('BADTOKEN what was offered is no token')
end
if seen and not is_token(seen) then
  return redis.error_reply('BADTOKEN the mark holds something else than a token')
end
if seen and later(seen, offered) then
  return redis.error_reply('STALETOKEN ' .. seen .. ' ' .. offered)
end
redis.call('SET', KEYS[1], offered)
local function work(KEYS, ARGV)
  -- BODY
end
return work({unpack(KEYS, 2)}, {unpack(ARGV, 2)})
