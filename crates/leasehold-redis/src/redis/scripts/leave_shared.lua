-- ARGV: id, keep ms or 0. Returns the same numbers as for a mutex.
use(1)
local id, keep = ARGV[1], tonumber(ARGV[2])
if not settle_all(id) then return 0 end
local e = entry(id)
if not e then return more() end
if e.state == 'd' then return 1 end
if keep > 0 and e.state == 'h' then
  e.state, e.since = 'd', now
  touch()
  put(id, e)
  redis.call('ZADD', X, text(now + keep * 1000), id)
else
  remove(id, e)
  grant_all('')
end
keep_all()
return 1 + more()
