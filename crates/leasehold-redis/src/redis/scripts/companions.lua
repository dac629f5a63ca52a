-- How many ms a lock's other keys outlive their last entry. After a crash they expire, too.
local SLACK = 60000

-- Returns for how many ms the queue of a mutex is kept when a waiter with this lease (in us) is in
-- it.
local function kept_for(waiter_lease)
  return math.ceil(waiter_lease / 1000) * 2 + SLACK
end
