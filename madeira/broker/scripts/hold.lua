-- Holds the lanes of an endpoint, or lets them go, at once: before every process has heard of it from Postgres.
--
-- ARGV  1 queue   2 endpoint   3 version of the configuration that says so   4 hold: '', 'paused', 'disabled'
-- Returns 1, or 0 when something newer is known already.
--
-- What is let go begins with a closed breaker, and without a wish of its receiver: whoever lets it go knows better. Lanes in which
-- nothing waits are not known here; for them the settings, which follow, do the same.
--
-- The version of the settings stays as it is: others may have changed before, of which nobody has told Redis yet.

local queue, endpoint, version, hold = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if (told_hold(endpoint) or 0) >= version then return 0 end
redis.call('SET', P .. 'hold:' .. endpoint, ARGV[3] .. ' ' .. hold, 'PX', SETTINGS_TTL)
local names = {endpoint}
for _, lane in ipairs(redis.call('ZRANGE', at(queue, 'active'), 0, -1)) do
  if string.sub(lane, 1, #endpoint + 1) == endpoint .. '@' then names[#names + 1] = lane end
end
for _, lane in ipairs(names) do
  if hold == '' then forget_receiver(lane) end
  local cfg = read_settings(lane)
  if cfg and cfg.version < version then redis.call('HSET', pace_key(lane, 'cfg'), 'hold', hold) end
  if look(queue, lane) then wake(queue, 1) end
end
return 1
