-- The common case of a release, ahead of the functions that `release.lua` needs: there are no
-- waiters. The record stays, because the name's last token is needed. Its holder counts only while
-- the main key has its id.
if not redis.call('ZRANGE', KEYS[3], 0, 0)[1] then
  local claim, number = string.match(redis.call('GET', KEYS[1]) or '', '^(%x+)%.(%d+)$')
  if claim ~= ARGV[1] or tonumber(number) > tonumber(ARGV[2]) then return 0 end
  return redis.call('DEL', KEYS[1])
end
