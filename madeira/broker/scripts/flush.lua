-- Drops everything that an ordinary or keyed queue holds.
--
-- ARGV  1 queue

local queue = ARGV[1]
for _, lane in ipairs(redis.call('ZRANGE', at(queue, 'active'), 0, -1)) do
  redis.call('DEL', lane_key(queue, lane), pace_key(lane, 'places'))
end
redis.call('DEL', at(queue, 'delayed'), at(queue, 'held'), at(queue, 'active'), at(queue, 'stumbles'),
  at(queue, 'losses'), at(queue, 'lines'), at(queue, 'msgs'), at(queue, 'XQ'), at(queue, 'XQ.msgs'), lane_key(queue, '-'))
return 1
