-- Which breakers have opened since somebody was told, and how they are now: also one that was open for a moment only is told of.
--
-- ARGV  1 'read', then lanes that are told of besides
--       1 'seen', then per lane that somebody was told of: name, time as it was read; one that has opened anew is kept
-- Returns (read) per lane: name, time (ms) at which it opened last or '', '1' while it is not closed or '', why it opened,
-- verdicts and failures by which it did, '1' when a call has succeeded since or ''. That one is not open says little: what Redis
-- has lost, and what a person has let go, is not open either.

local opened = P .. 'opened'
sound(opened, 'hash')

if ARGV[1] == 'seen' then
  for i = 2, #ARGV, 2 do
    if redis.call('HGET', opened, ARGV[i]) == ARGV[i + 1] then redis.call('HDEL', opened, ARGV[i]) end
  end
  return 1
end

local answer, told = {}, {}

local function tell(lane, time)
  if told[lane] then return end
  told[lane] = true
  local cfg, b = read_settings(lane), read_breaker(lane)
  if cfg and cfg.broken <= 0 then b = nil end
  answer[#answer + 1] = {lane, time, b and '1' or '', b and b.why or '', b and b.of or 0, b and b.bad or 0,
    has_succeeded(lane) and '1' or ''}
end

local all = redis.call('HGETALL', opened)
for i = 1, #all, 2 do tell(all[i], all[i + 1]) end
for i = 2, #ARGV do tell(ARGV[i], '') end
return answer
