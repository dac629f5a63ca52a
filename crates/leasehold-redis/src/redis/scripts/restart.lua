-- For how long after its start the server lets nobody in: 0 ms but for the URL's restart_delay_ms.
local RESTART = 0
