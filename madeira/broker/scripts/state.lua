-- Tells how lanes are.
--
-- ARGV  1 queue, then lanes
-- Returns per lane: hold, breaker ('closed' | 'open' | 'half_open' | 'ramp'), ms until it lets one try or until the verdict on
-- the one that tries is due, ms since it opened, why it opened, verdicts and failures by which it did, calls at a time that
-- the ramp allows, ms for which the receiver asked to be left alone, calls under way, and what waits in each line.

local queue = ARGV[1]
local answer = {}

local function breaker_of(lane, cfg)
  local b = cfg and cfg.broken > 0 and read_breaker(lane, cfg)
  if not b then return 'closed', 0, 0, '', 0, 0, 0 end
  local state = b.allow > 0 and 'ramp' or b.till > now and 'open' or 'half_open'
  local left = state == 'open' and b.till - now or state == 'half_open' and b.probe ~= '' and b.lease - now or 0
  return state, ms(math.max(0, left)), ms(now - b.since), b.why, b.of or 0, b.bad or 0, b.allow
end

for i = 2, #ARGV do
  local lane = ARGV[i]
  local cfg, line = read_settings(lane), lane_key(queue, lane)
  local patient = patient_until(lane)
  local taken = redis.call('ZCOUNT', places_of(lane), ms(now), '+inf')
  if (tonumber(redis.call('ZSCORE', places_of(lane), '-') or '') or 0) >= now then taken = taken - 1 end
  sound(line, 'zset')
  local row = {cfg and cfg.hold or '', breaker_of(lane, cfg)}
  row[#row + 1] = ms(patient and patient - now or 0)
  row[#row + 1] = taken
  for n = 0, #LINES - 1 do
    row[#row + 1] = redis.call('ZCOUNT', line, string.format('%.0f', n * SPAN), string.format('(%.0f', (n + 1) * SPAN))
  end
  answer[#answer + 1] = row
end
return answer
