-- Counts what is in the queues, for gauges and for `join`.
--
-- ARGV  queues
-- Returns per queue: ready, delayed, held, rejected.

local answer = {}
for i = 1, #ARGV do
  local queue = ARGV[i]
  local ready = redis.call('ZCARD', lane_key(queue, '-'))
  for _, lane in ipairs(redis.call('ZRANGE', at(queue, 'active'), 0, -1)) do
    if lane ~= '-' then ready = ready + redis.call('ZCARD', lane_key(queue, lane)) end
  end
  answer[i] = {ready, redis.call('ZCARD', at(queue, 'delayed')), redis.call('HLEN', at(queue, 'held')),
               redis.call('ZCARD', at(queue, 'XQ'))}
end
return answer
