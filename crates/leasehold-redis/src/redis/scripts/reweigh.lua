-- ARGV: id, weight. Answers 0 and the token, and whether to call again (2: there may be dead ones before who fits
-- now); 1: it is not the only one that holds; 2: it does not hold.
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
