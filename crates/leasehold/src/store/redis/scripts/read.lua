-- Answers kind, capacity and for each claim: standing, token, weight, us since, us left, who. A
-- foreign holder has the token 0 and no `who`.
use(1)
local answer
local function add(standing, token, weight, since, left, who)
  local n = #answer
  answer[n + 1], answer[n + 2], answer[n + 3] = standing, text(token), weight
  answer[n + 4], answer[n + 5], answer[n + 6] = text(math.max(now - since, 0)), text(left), who
end
if settle_all('') then
  answer = {redis.call('HGET', M, 'k'), tonumber(redis.call('HGET', M, 'c'))}
  for _, key in ipairs({H, W}) do
    local all = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    for i = 1, #all, 2 do
      local e = entry(all[i])
      add(e.state, tonumber(all[i + 1]), e.weight, e.since, math.max(score(X, all[i]) - now, 0), e.who)
    end
  end
  return answer
end
local h = settle('')
answer = {'mutex', 1}
if h and h.id then
  local left = h.lease
  if h.gone then left = h.left end
  add(h.gone and 'd' or 'h', h.token, 1, h.since, left * 1000, h.who)
elseif h then
  add('h', 0, 1, now, h.left * 1000, '')
end
local all = redis.call('ZRANGE', W, 0, -1, 'WITHSCORES')
for i = 1, #all, 2 do
  local who = string.match(all[i], '^%x+ %d+ %S+ (.*)$')
  -- A waiter's token is the time at which it joined.
  add('w', tonumber(all[i + 1]), 1, tonumber(all[i + 1]), math.max(score(X, all[i]) - now, 0), who)
end
return answer
