-- ARGV: id, keep ms or 0, member. A holder with a lease that stands, first: the uncontended path.
do
  local value = redis.call('GET', KEYS[1])
  if value and ARGV[2] == '0' and string.sub(value, 1, 33) == ARGV[1] .. ' '
    and redis.call('EXISTS', KEYS[3]) == 0 and string.match(value, '^%d+ %d+ 0 ', 34) then
    redis.call('DEL', KEYS[1])
    return 1
  end
end
