-- Takes keys out of a queue whose rows are finished. A held key is left to its holder.
--
-- ARGV  1 queue, then keys
-- Returns how many were taken out.

local queue = ARGV[1]
local gone = 0
for i = 2, #ARGV do
  local key = ARGV[i]
  if redis.call('HEXISTS', at(queue, 'held'), key) == 0 then
    gone = gone + redis.call('ZREM', at(queue, 'delayed'), key)
    gone = gone + redis.call('ZREM', lane_key(queue, lane_of(key)), key)
    drop_all(queue, key)
  end
end
return gone
