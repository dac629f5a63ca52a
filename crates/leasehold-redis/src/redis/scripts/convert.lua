-- ARGV: id, weight. Returns 0, the token, and 2 if the client must repeat the call, because expired
-- claims may remain ahead of one that fits now (otherwise 0). Returns 1 if the weight cannot be
-- raised, because other claims hold the lock or it exceeds the capacity. Returns 2 if the claim
-- does not hold it.
use(1)
local id, weight = ARGV[1], tonumber(ARGV[2])
if not settle_all('') then return {2} end
local e = entry(id)
local place = e and e.state == 'h' and redis.call('ZSCORE', H, id)
if not place then
  keep_all()
  return {2}
end
local change = weight - e.weight
if change > 0 and (held() > e.weight or weight > tonumber(redis.call('HGET', M, 'c') or 0)) then
  keep_all()
  return {1}
end
if change ~= 0 then
  e.weight = weight
  touch()
  put(id, e)
  redis.call('HINCRBY', M, 'h', change)
  grant_all('')
end
keep_all()
return {0, tonumber(place), more()}
