-- A release while nobody waits, before all that `release.lua` needs. The record stays: who holds by it
-- counts only while the main key has its id, and the name's last token is needed.
if not redis.call('ZRANGE', KEYS[3], 0, 0)[1] then
  local claim, number = string.match(redis.call('GET', KEYS[1]) or '', '^(%x+)%.(%d+)$')
  if claim ~= ARGV[1] or tonumber(number) > tonumber(ARGV[2]) then return 0 end
  return redis.call('DEL', KEYS[1])
end
