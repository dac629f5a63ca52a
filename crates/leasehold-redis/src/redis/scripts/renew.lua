-- Renews holders of mutexes. KEYS: only their main keys, so that no lease ends while a cluster
-- moves their slot. ARGV: id and lease ms for each key. Returns token and us left for each, or 0
-- and 0 if the claim does not hold the lock.
local answers = {}
for i, key in ipairs(KEYS) do
  local id, lease = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  local value = redis.pcall('GET', key)
  local token, left = 0, 0
  if type(value) == 'string' and string.sub(value, 1, 33) == id .. ' ' then
    local drawn, delay = string.match(value, '^(%d+) %d+ (%d+) ', 34)
    delay = tonumber(delay)
    local rest = redis.call('PTTL', key)
    if rest > delay then
      if rest < lease + delay then
        redis.call('PEXPIRE', key, lease + delay)
        rest = lease + delay
      end
      token, left = tonumber(drawn), (rest - delay) * 1000
    end
  end
  answers[2 * i - 1], answers[2 * i] = token, left
end
return answers
