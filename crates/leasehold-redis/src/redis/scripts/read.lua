-- ARGV: the part to read, and a token.
-- `a`: all claims, unless there is more than a page of holders or of waiters. `w`: a page of
-- waiters after that token. `h`: a page of holders after that token. `1`: the first 100 holders,
-- from that token on if it is not 0, and no waiters.
-- Returns kind, capacity, the token after which the next page begins or '' (0 if `a` was too much),
-- and for each claim: state (`h` holds, `w` waits, `d` cooldown), token, weight, age in us, us left
-- (-1: no expiry), who. The holder of a key of another program has the token 0, and its kind as
-- `who`.
use(1)
local PAGE = 500
local part, after = ARGV[1], tonumber(ARGV[2])
local answer

local function add(standing, token, weight, since, left, who)
  local n = #answer
  answer[n + 1], answer[n + 2], answer[n + 3] = standing, text(token), weight
  answer[n + 4], answer[n + 5], answer[n + 6] = text(math.max(now - since, 0)), text(left), who
end

-- Calls `each` for at most a page of a set's entries after that token. Notes where the next page
-- begins.
local function page(key, each)
  local from, most = '(' .. text(after), part == '1' and 100 or PAGE
  if part == '1' and after > 0 then from = text(after) end
  local all = redis.call('ZRANGEBYSCORE', key, from, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #all, 2 do
    each(all[i], tonumber(all[i + 1]))
  end
  if part ~= 'a' and #all == 2 * PAGE then answer[3] = text(tonumber(all[#all])) end
end

local function ends(member)
  return math.max(score(X, member) - now, 0)
end

local function add_entry(id, token)
  local e = entry(id)
  if e then add(e.state, token, e.weight, e.since, ends(id), e.who) end
end

-- A waiter's token serves as the time at which it joined.
local function add_waiter(member, token)
  local who = string.match(member, '^%x+ %d+ %S+ (.*)$')
  add('w', token, 1, token, ends(member), who or '')
end

local function add_holder(h)
  if h.foreign then
    add('h', 0, 1, now, h.left < 0 and -1 or h.left * 1000, h.foreign)
  elseif h.gone then
    add('d', h.token, 1, h.since, h.left * 1000, h.who)
  else
    add('h', h.token, 1, h.since, h.lease * 1000, h.who)
  end
end

local shared = settle_all('')
local h
if shared then
  answer = {redis.call('HGET', M, 'k'), tonumber(redis.call('HGET', M, 'c')), ''}
else
  h = settle('')
  answer = {'mutex', 1, ''}
end
if part == 'a' and (redis.call('ZCARD', W) > PAGE or redis.call('ZCARD', H) > PAGE) then
  answer[3] = '0'
  return answer
end
if part ~= 'w' then
  if shared then
    page(H, add_entry)
  elseif h then
    add_holder(h)
  end
end
if part == 'a' or part == 'w' then page(W, shared and add_entry or add_waiter) end
return answer
