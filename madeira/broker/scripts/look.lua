-- Lets every lane in which something waits be looked at now: its settings have changed.
--
-- ARGV  1 queue

local active = at(ARGV[1], 'active')
for _, lane in ipairs(redis.call('ZRANGE', active, 0, -1)) do redis.call('ZADD', active, 'XX', 'LT', ms(now), lane) end
return 1
