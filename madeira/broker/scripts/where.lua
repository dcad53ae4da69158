-- Tells where keys are.
--
-- ARGV  1 queue, then keys
-- Returns per key: 'held' | 'waiting' | 'delayed' | 'nowhere', ms until due or until the marker runs out, keys before it in
-- its line, for what waits behind a limit of its lane: 'disabled' | 'paused' | 'breaker' | 'retry_after' | 'rate' | 'cap',
-- and its line.

local queue = ARGV[1]

-- What a lane waits for, and for how long (ms, where that is known).
local function limit_of(lane)
  if lane == '-' then return '' end
  local cfg, tat = read_settings(lane), read_tat(lane, math.huge)
  if cfg and cfg.hold ~= '' then return cfg.hold, 0 end
  if cfg and cfg.broken > 0 then
    local b = read_breaker(lane, cfg)
    if b and b.allow == 0 and (b.till > now or b.probe ~= '') then return 'breaker', math.max(b.till, b.lease) - now end
  end
  local patient = patient_until(lane)
  if patient then return 'retry_after', patient - now end
  if tat and tat > now and not (cfg and cfg.gap == 0) then return 'rate' end
  if not cfg then return '' end
  local taken = redis.call('ZCOUNT', places_of(lane), ms(now), '+inf')
  if (tonumber(redis.call('ZSCORE', places_of(lane), '-') or '') or 0) >= now then taken = taken - 1 end
  local b = cfg.broken > 0 and read_breaker(lane, cfg)
  if b and b.allow > 0 and taken >= b.allow then return 'breaker', 0 end
  return taken >= cfg.cap and 'cap' or ''
end

local answer = {}
for i = 2, #ARGV do
  local key = ARGV[i]
  local where, due = whereabouts(queue, key)
  local ahead, wait, limit, line = 0, 0, '', line_of(queue, key)
  if where == 'waiting' then
    local waiting = lane_key(queue, lane_of(key))
    if lane_of(key) ~= '-' then
      local place = math.floor(tonumber(redis.call('ZSCORE', waiting, key)) / SPAN)
      line = LINES[place + 1] or 'fresh'
      ahead = -redis.call('ZCOUNT', waiting, '-inf', string.format('(%.0f', place * SPAN))
    end
    ahead = ahead + (redis.call('ZRANK', waiting, key) or 0)
    local chance = redis.call('ZSCORE', at(queue, 'active'), lane_of(key))
    if chance then wait = math.max(0, tonumber(chance) - now) end
    local left
    limit, left = limit_of(lane_of(key))
    wait = left and math.max(0, left) or wait
  elseif where == 'delayed' then
    wait = math.max(0, due - now)
  elseif where == 'held' then
    local held = read_held(queue, key)
    if held then wait = math.max(0, held.till - now) end
  end
  answer[#answer + 1] = {where or 'nowhere', ms(wait), ahead, limit, line}
end
return answer
