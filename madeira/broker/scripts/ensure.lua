-- Makes sure that keys are queued; with the idempotency marks of intake in the same step.
--
-- ARGV  marks, then per mark: name, ttl (ms)
--       then per key: queue, key, delay (ms, 0: now), body ('' for keyed actors), line ('': as it is known)
-- Returns how many keys were nowhere before.

local marks = tonumber(ARGV[1])
local i = 2
for _ = 1, marks do
  redis.call('SET', P .. 'seen:' .. ARGV[i], '1', 'NX', 'PX', ARGV[i + 1])
  i = i + 2
end

local added = 0
while i <= #ARGV do
  local queue, key, delay, body, line = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  if body ~= '' then redis.call('HSET', at(queue, 'msgs'), key, body) end
  if ensure(queue, key, now + delay, line) then added = added + 1 end
  i = i + 5
end
return added
