-- The heartbeat of one process: it lives, this is what it holds; and what the dead held goes back to the living.
--
-- ARGV  1 process   2 silence (ms) after which a process is gone   3 spread (ms) of what is taken over
--       4 n, then n queues
--       then per grant in hand: queue, key, token, lease (ms), 1 to renew it
-- Returns {processes alive, keys put back, strays given back, keys taken over}.

local process, silence, spread = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local queues = {}
for i = 1, tonumber(ARGV[4]) do queues[i] = ARGV[4 + i] end
redis.call('ZADD', P .. 'procs', ms(now), process)

math.randomseed(tonumber(clock[2]))

local KINDS = {delayed = 'zset', held = 'hash', active = 'zset', idle = 'set', stumbles = 'hash', losses = 'hash',
               lines = 'hash'}
for _, queue in ipairs(queues) do
  for name, kind in pairs(KINDS) do sound(at(queue, name), kind) end
  sound(lane_key(queue, '-'), 'zset')
  for _, lane in ipairs(redis.call('ZRANGE', at(queue, 'active'), 0, -1)) do sound(lane_key(queue, lane), 'zset') end
end

local listed, put_back = {}, 0

-- The place belongs to the token, and is there for as long as the token's holder says so.
local function hold(queue, key, token, lease, note)
  write_held(queue, key, {token = token, process = process, till = now + lease, note = note})
  local lane = lane_of(key)
  if lane ~= '-' then take_place(lane, token, now + lease) end
end

local i = 5 + #queues
while i <= #ARGV do
  local queue, key, token, lease, renew = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4] == '1'
  listed[token] = true
  local held = read_held(queue, key)
  if held and held.token == token then
    local lane = lane_of(key)
    if renew then
      held.till = now + lease
      write_held(queue, key, held)
    end
    if lane ~= '-' then take_place(lane, token, held.till) end
  elseif lease > 0 and (not held or is_told(held)) then
    if held then free_place(queue, lane_of(key), held.token) end
    redis.call('ZREM', at(queue, 'delayed'), key)
    redis.call('ZREM', lane_key(queue, lane_of(key)), key)
    hold(queue, key, token, lease, held and held.note)
    put_back = put_back + 1
  end
  i = i + 5
end

local gone = {}
local function is_gone(name)
  if gone[name] == nil then
    local last = redis.call('ZSCORE', P .. 'procs', name)
    -- One that is not on the list (the list may be lost) gets as long as any other to say that it lives.
    if not last then redis.call('ZADD', P .. 'procs', ms(now), name) end
    gone[name] = last and now - tonumber(last) > silence
  end
  return gone[name]
end

local strays, suspects, taken = 0, {}, 0
for _, queue in ipairs(queues) do
  local all = redis.call('HGETALL', at(queue, 'held'))
  for n = 1, #all, 2 do
    local key = all[n]
    local held = read_held(queue, key)
    if not held then
      redis.call('HDEL', at(queue, 'held'), key)
      put(queue, key, now)
    elseif held.process == process and not listed[held.token] and held.till > now then
      -- Handed out to us, but we do not know of it: the answer was lost, or is on its way. Twice in a row is lost.
      if redis.call('SISMEMBER', P .. 'strays:' .. process, held.token) == 1 then
        redis.call('HDEL', at(queue, 'held'), key)
        free_place(queue, lane_of(key), held.token)
        if lane_of(key) ~= '-' then feed_breaker(queue, lane_of(key), held.token, '') end
        put(queue, key, now)
        strays = strays + 1
      else
        suspects[#suspects + 1] = held.token
      end
    elseif taken < 500 and (held.till <= now or is_gone(held.process)) then
      local times = redis.call('HINCRBY', at(queue, 'losses'), key, 1)
      redis.call('HDEL', at(queue, 'held'), key)
      put(queue, key, math.max(now, held.till) + math.random() * spread * math.min(times, 10))
      taken = taken + 1
    end
  end
end
redis.call('DEL', P .. 'strays:' .. process)
if #suspects > 0 then
  redis.call('SADD', P .. 'strays:' .. process, unpack(suspects, 1, math.min(#suspects, 4000)))
  redis.call('PEXPIRE', P .. 'strays:' .. process, 3600000)
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', P .. 'procs', '-inf', ms(now - 10 * silence), 'LIMIT', 0, 100)) do
  redis.call('ZREM', P .. 'procs', name)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', P .. 'procs', '-inf', ms(now - silence), 'LIMIT', 0, 100)) do
  for _, queue in ipairs(queues) do redis.call('SREM', at(queue, 'idle'), name) end
end
return {redis.call('ZCOUNT', P .. 'procs', ms(now - silence), '+inf'), put_back, strays, taken}
