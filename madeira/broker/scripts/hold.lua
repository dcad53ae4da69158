-- Holds the lanes of an endpoint, or lets them go, at once: before every process has heard of it from Postgres.
--
-- ARGV  1 queue   2 endpoint   3 what separates it from the rest of a lane's name   4 version of the configuration that
--       says so   5 hold: '', 'paused', 'disabled'
-- Returns how many lanes were told.
--
-- The version of the settings stays as it is: other settings may have changed before, of which nobody has told Redis yet.

local queue, endpoint, separator, version, hold = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local prefix = endpoint .. separator
local names = {endpoint}
for _, lane in ipairs(redis.call('ZRANGE', at(queue, 'active'), 0, -1)) do
  if string.sub(lane, 1, #prefix) == prefix then names[#names + 1] = lane end
end
local told = 0
for _, lane in ipairs(names) do
  local cfg = read_settings(lane)
  if cfg and cfg.version < version and cfg.told < version then
    redis.call('HSET', pace_key(lane, 'cfg'), 'hold', hold, 'told', ARGV[4])
    told = told + 1
  end
  if look(queue, lane) then wake(queue, 1) end
end
return told
