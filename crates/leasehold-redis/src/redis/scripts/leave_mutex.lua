-- The common cases of a release, ahead of the shared functions: the claim holds the mutex and has
-- no lock delay, and the first waiter, if any, is live. In all other cases, this block grants
-- nothing and leaves the holder as it is. It may remove an expired first waiter.
-- ARGV: id, then only if either is needed: keep ms or 0, and member.
if not ARGV[2] then
  local main, W = KEYS[1], KEYS[3]
  local value = redis.call('GET', main)
  if value and string.find(value, '^' .. ARGV[1] .. ' %d+ %d+ 0 ') then
    if redis.call('EXISTS', W) == 0 then
      return redis.call('DEL', main)
    end
    if RESTART == 0 and grant_first(main, W, KEYS[4], stamp(), '') then return 1 end
  end
end
