-- Tells which keys are nowhere, and lets the lanes of those that wait be looked at again (their index may be lost).
--
-- ARGV  1 queue, then pairs: key, due (ms from now). A delayed key that is due later than that is brought forward.
-- Returns the keys that are nowhere.

local queue = ARGV[1]
local unknown = {}
for i = 2, #ARGV, 2 do
  local key = ARGV[i]
  local where, due = whereabouts(queue, key)
  if not where then
    unknown[#unknown + 1] = key
  elseif where == 'waiting' then
    activate(queue, lane_of(key))
    redis.call('ZADD', at(queue, 'active'), 'LT', ms(now), lane_of(key))
  elseif where == 'delayed' and due > now + tonumber(ARGV[i + 1]) + 1000 then
    ensure(queue, key, now + tonumber(ARGV[i + 1]), '')
  end
end
return unknown
