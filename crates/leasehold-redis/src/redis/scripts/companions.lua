-- Companions outlive their last entry by this, so that nothing is left for ever of those who died.
local SLACK = 60000

-- For how many ms the queue of a mutex is kept once one with this waiter's lease (in us) is in it.
local function kept_for(waiter_lease)
  return math.ceil(waiter_lease / 1000) * 2 + SLACK
end
