-- For how many ms after its start the server grants no lock. It is 0 without restart_delay_ms in
-- the URL.
local RESTART = 0
