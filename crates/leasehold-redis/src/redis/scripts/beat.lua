-- Renews many claims on many locks. KEYS: six for each lock. ARGV, for each claim: the lock's
-- number, `m` (mutex) or `s` (other kinds), id, member, lease ms, waiter's lease us. Claims of one
-- lock are next to each other.
local answers = {}
local at, sort, h, longest = 0, nil, nil, 0

local function turn_to(n, s)
  if at > 0 and sort == 's' then
    keep_all()
  elseif longest > 0 then
    keep_companions(longest)
  end
  if n == 0 then return end
  use(n)
  at, sort, h, longest, again = n, s, nil, 0, nil
  if s == 's' then
    settle_all('')
  elseif redis.call('EXISTS', M) == 1 then
    -- The name is now used for another kind of lock, so a claim on a mutex does not exist here.
    sort = 'none'
  else
    h = settle('')
  end
end

for i = 1, #ARGV, 6 do
  local n, id, lease, waiter_lease = tonumber(ARGV[i]), ARGV[i + 2], tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
  if n ~= at then turn_to(n, ARGV[i + 1]) end
  local answer
  if sort == 's' then
    answer = beat_all(id, lease, waiter_lease)
  elseif sort == 'm' then
    answer = beat(h, id, ARGV[i + 3], lease, waiter_lease)
    if answer and answer[1] == 1 then
      longest = math.max(longest, waiter_lease)
      if h and h.foreign and h.left == -1 then answer = {4, h.foreign} end
    end
  end
  answers[#answers + 1] = answer or {5}
end
turn_to(0)
return answers
