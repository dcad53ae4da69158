-- Tells where keys are.
--
-- ARGV  1 queue, then keys
-- Returns per key: 'held' | 'waiting' | 'delayed' | 'nowhere', ms until due or until the marker runs out, keys before it,
-- and for what waits behind a limit of its lane: 'rate' | 'cap'.

local queue = ARGV[1]

local function limit_of(lane)
  if lane == '-' then return '' end
  local cfg, tat = read_settings(lane), read_tat(lane, math.huge)
  if tat and tat > now and not (cfg and cfg.gap == 0) then return 'rate' end
  if not cfg then return '' end
  local taken = redis.call('ZCOUNT', places_of(lane), ms(now), '+inf')
  if (tonumber(redis.call('ZSCORE', places_of(lane), '-') or '') or 0) >= now then taken = taken - 1 end
  return taken >= cfg.cap and 'cap' or ''
end

local answer = {}
for i = 2, #ARGV do
  local key = ARGV[i]
  local where, due = whereabouts(queue, key)
  local ahead, wait, limit = 0, 0, ''
  if where == 'waiting' then
    ahead = redis.call('ZRANK', lane_key(queue, lane_of(key)), key) or 0
    local chance = redis.call('ZSCORE', at(queue, 'active'), lane_of(key))
    if chance then wait = math.max(0, tonumber(chance) - now) end
    limit = limit_of(lane_of(key))
  elseif where == 'delayed' then
    wait = math.max(0, due - now)
  elseif where == 'held' then
    local held = read_held(queue, key)
    if held then wait = math.max(0, held.till - now) end
  end
  answer[#answer + 1] = {where or 'nowhere', ms(wait), ahead, limit}
end
return answer
