-- What nearly every release of a mutex is, before what all scripts share: by a holder whose lease
-- stands, without a lock-delay; and whoever waits first lives. Otherwise nobody has it when it leaves
-- this block but this holder, and nobody was granted anything.
-- ARGV: id; keep ms or 0, and member, where either is needed.
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
