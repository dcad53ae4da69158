-- Tells where keys are.
--
-- ARGV  1 queue, then keys
-- Returns per key: 'held' | 'waiting' | 'delayed' | 'nowhere', ms until due or until the marker runs out, keys before it.

local queue = ARGV[1]
local answer = {}
for i = 2, #ARGV do
  local key = ARGV[i]
  local where, due = whereabouts(queue, key)
  local ahead, wait = 0, 0
  if where == 'waiting' then
    ahead = redis.call('ZRANK', lane_key(queue, lane_of(key)), key) or 0
    local chance = redis.call('ZSCORE', at(queue, 'active'), lane_of(key))
    if chance then wait = math.max(0, tonumber(chance) - now) end
  elseif where == 'delayed' then
    wait = math.max(0, due - now)
  elseif where == 'held' then
    local held = read_held(queue, key)
    if held then wait = math.max(0, held.till - now) end
  end
  answer[#answer + 1] = {where or 'nowhere', ms(wait), ahead}
end
return answer
