-- One turn of a consumer: what it has finished, what must follow, and what it may do next. One call for all three.
--
-- ARGV  1 queue   2 process   3 room: grants wanted   4 nonce: unique per call of this process
--       5 version of the lane settings that the caller knows ('' : the queue has no lanes, only order; '-' : nor keys,
--         but ordinary messages with bodies, which need no epoch)
--       6 threads that this queue may use in the process   7 grants in its hands now
--       8 lease (ms) of a grant in a queue without lanes; lanes bring their own
--       9 n, then n pairs lane, grants of it in the process's hands (after the finishes below)
--       then m, then m finishes: key, token, kind, delay (ms), body, 1 when the rate token goes back, verdict for the
--          breaker, ms for which the receiver asked to be left alone
--          kind f: forget (a verdict was recorded); d: delay (to be tried again); k: back to its place, though a call was
--          made; b: give back, to the front; s: no verdict, delayed by 5 s, doubling; x: reject (ordinary messages)
--       then per follow-up: queue, key, delay (ms), line ('' : as it is known)
-- Returns {1 or 0 (0: no epoch), ms to the next chance or '-1', {lanes whose settings are missing or old},
--          {key, token, lease (ms), stumbles, losses, body, ...}}

local queue, process, room, nonce = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local version, threads, in_hand = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local plain_lease = tonumber(ARGV[8])
local keyed = version ~= '-'
local paced = keyed and version ~= ''
local held_here = {}
local i = 10
for _ = 1, tonumber(ARGV[9]) do
  held_here[ARGV[i]] = tonumber(ARGV[i + 1])
  i = i + 2
end

-- How long a rejected message is kept (ms).
local KEEP = 7 * 86400000

local function reject(key)
  local rejected, bodies = at(queue, 'XQ'), at(queue, 'XQ.msgs')
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', rejected, '-inf', ms(now - KEEP), 'LIMIT', 0, 100)) do
    redis.call('ZREM', rejected, old)
    redis.call('HDEL', bodies, old)
  end
  local stored = redis.call('HGET', at(queue, 'msgs'), key)
  if stored then
    redis.call('ZADD', rejected, ms(now), key)
    redis.call('HSET', bodies, key, stored)
  end
end

local function finish(key, token, kind, delay, body, unused, verdict, patience)
  local lane = lane_of(key)
  free_place(queue, lane, token)
  if paced and patience > 0 then be_patient(lane, patience) end
  local held = read_held(queue, key)
  if held and (kind == 'f' or kind == 'd' or kind == 'k') and not unused and is_told(held) then
    -- Our verdict is on the very claim that Postgres told of.
    free_place(queue, lane, held.token)
    held.token = token
  end
  if not held or held.token ~= token then
    -- Somebody else's now, or put back meanwhile. What must not get lost is a key that is nowhere.
    if not held and kind ~= 'f' and kind ~= 'x' then
      if body ~= '' then redis.call('HSET', at(queue, 'msgs'), key, body) end
      ensure(queue, key, now + delay, '')
    end
    return
  end
  redis.call('HDEL', at(queue, 'held'), key)
  if paced then feed_breaker(queue, lane, token, (unused or kind == 'b') and '' or verdict) end
  if paced and (unused or kind == 'b') then refund(lane, token) end
  if kind == 'f' or kind == 'x' then
    if held.note then
      drop_counts(queue, key)
      put(queue, key, held.note)
      return
    end
    drop_all(queue, key)
    if kind == 'x' then reject(key) end
    if not keyed then redis.call('HDEL', at(queue, 'msgs'), key) end
  elseif kind == 'd' then
    -- A claim that was refused says nothing about those before it.
    if not unused then
      drop_counts(queue, key)
      set_line(queue, key, 'retry')
    end
    if body ~= '' then redis.call('HSET', at(queue, 'msgs'), key, body) end
    local due = now + delay
    if held.note and held.note < due then due = held.note end
    put(queue, key, due)
  elseif kind == 'b' or kind == 'k' then
    if kind == 'k' then drop_counts(queue, key) end
    put(queue, key, now)
  else
    local due = now + stumble_delay(redis.call('HINCRBY', at(queue, 'stumbles'), key, 1))
    if held.note and held.note < due then due = held.note end
    put(queue, key, due)
  end
end

local finishes = tonumber(ARGV[i])
i = i + 1
for _ = 1, finishes do
  finish(ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5] == '1', ARGV[i + 6],
    tonumber(ARGV[i + 7]))
  i = i + 8
end
while i <= #ARGV do
  ensure(ARGV[i], ARGV[i + 1], now + tonumber(ARGV[i + 2]), ARGV[i + 3])
  i = i + 4
end

if room <= 0 then
  redis.call('SREM', at(queue, 'idle'), process)
  return {1, '-1', {}, {}}
end
if keyed and redis.call('EXISTS', P .. 'epoch') == 0 then return {0, '-1', {}, {}} end

-- What has come due goes into its lane.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', at(queue, 'delayed'), '-inf', ms(now), 'LIMIT', 0, 500)) do
  redis.call('ZREM', at(queue, 'delayed'), key)
  put(queue, key, now)
end

local active = at(queue, 'active')
-- A queue without lanes has one line, and finds it without the index.
if not paced and redis.call('EXISTS', lane_key(queue, '-')) == 1 then redis.call('ZADD', active, 'NX', ms(now), '-') end
local grants, missing, lanes = {}, {}, {}
local served = 0

-- Makes the list of places again from what is held: it may be lost while calls are under way. Its mark `-` says that it
-- is whole, for one lease.
local function recount(lane)
  local all = redis.call('HGETALL', at(queue, 'held'))
  for n = 1, #all, 2 do
    if lane_of(all[n]) == lane.name then
      local held = read_held(queue, all[n])
      if held and held.till > now then redis.call('ZADD', lane.places, ms(held.till), held.token) end
    end
  end
  redis.call('ZADD', lane.places, ms(now + lane.lease), '-')
  redis.call('PEXPIRE', lane.places, math.ceil(2 * lane.lease))
end

-- How often a lane is looked at that somebody holds (ms); letting it go has it looked at at once.
local HELD_LOOK = 10000

-- The state of a lane as this call sees it. `closed` says why no more may go: 'empty', 'rate', 'cap', 'room', 'unset',
-- 'paused', 'disabled', 'breaker', 'retry_after'; of the last four `chance` says when to look again.
local function open_lane(name)
  local lane = {name = name, line = lane_key(queue, name), here = held_here[name] or 0}
  if not paced then
    lane.lease = plain_lease
    return lane
  end
  local cfg = read_settings(name)
  if not cfg or cfg.version < tonumber(version) then
    lane.closed = 'unset'
    return lane
  end
  if cfg.hold ~= '' then
    lane.closed, lane.chance = cfg.hold, now + HELD_LOOK
    return lane
  end
  lane.gap, lane.credit, lane.cap, lane.lease = cfg.gap, cfg.credit, cfg.cap, cfg.lease
  local breaker = cfg.broken > 0 and read_breaker(name, cfg)
  if breaker then
    local broken, till = is_broken(name, breaker)
    if broken then
      lane.closed, lane.chance = 'breaker', till
      return lane
    end
    if breaker.allow > 0 then lane.cap = math.min(lane.cap, breaker.allow) else lane.breaker = breaker end
  end
  local patient = patient_until(name)
  if patient then
    lane.closed, lane.chance = 'retry_after', patient
    return lane
  end
  lane.places = places_of(name)
  redis.call('ZREMRANGEBYSCORE', lane.places, '-inf', ms(now))
  -- Nor can a place outlive any lease: one that claims to would lower the cap for ever.
  redis.call('ZREMRANGEBYSCORE', lane.places, ms(now + 4 * lane.lease), '+inf')
  if not redis.call('ZSCORE', lane.places, '-') then recount(lane) end
  lane.taken = redis.call('ZCARD', lane.places) - 1
  if lane.gap > 0 then
    lane.tat, lane.last, lane.paid = read_tat(name, lane.gap)
    lane.tat = lane.tat or now
  end
  return lane
end

local function room_for(lane)
  if not paced then return true end
  if lane.here >= math.max(1, math.floor(threads / 2)) then return false end
  local free = threads - in_hand
  return lane.here == 0 or free > math.floor(threads / 4)
end

-- The order in which the lines of a lane have their turns: four for fresh, two for retry, one for replay.
local ORDER = {0, 1, 0, 2, 0, 1, 0}

-- Whether more than the first line of a lane has something waiting.
local function is_mixed(lane)
  return redis.call('ZRANGEBYSCORE', lane.line, ms(SPAN), '+inf', 'LIMIT', 0, 1)[1] ~= nil
end

-- The first key of the line whose turn it is; one in which nothing waits lets the next have its turn.
local function first_of_lines(lane)
  lane.slot = lane.slot or number(redis.pcall('GET', pace_key(lane.name, 'slot'))) or 0
  for _ = 1, #ORDER do
    local line = ORDER[lane.slot % #ORDER + 1]
    lane.slot = lane.slot + 1
    local from, to = string.format('%.0f', line * SPAN), string.format('(%.0f', (line + 1) * SPAN)
    local key = redis.call('ZRANGEBYSCORE', lane.line, from, to, 'LIMIT', 0, 1)[1]
    if key then return key end
  end
  -- Scores that no key of ours has.
  return redis.call('ZRANGE', lane.line, 0, 0)[1]
end

local function take_first(lane)
  if lane.mixed == nil then lane.mixed = paced and is_mixed(lane) end
  if not lane.mixed then return redis.call('ZPOPMIN', lane.line)[1] end
  local key = first_of_lines(lane)
  if key then redis.call('ZREM', lane.line, key) end
  return key
end

local function pop(lane)
  while true do
    local key = take_first(lane)
    if not key then return nil end
    -- A copy put here by hand while the key is in somebody's hands has no effect, nor has a message without its body.
    if redis.call('HEXISTS', at(queue, 'held'), key) == 0 then
      local body = keyed and '' or redis.call('HGET', at(queue, 'msgs'), key)
      if body then return key, body end
    end
  end
end

local function grant(lane)
  if lane.closed then return end
  if lane.taken and lane.taken >= lane.cap then lane.closed = 'cap' return end
  if lane.tat and lane.tat > now then lane.closed = 'rate' return end
  if not room_for(lane) then lane.closed = 'room' return end
  local key, body = pop(lane)
  if not key then lane.closed = 'empty' return end
  served, lane.served = served + 1, true
  local token = process .. '#' .. nonce .. '.' .. served
  write_held(queue, key, {token = token, process = process, till = now + lane.lease})
  if paced then
    redis.call('ZADD', lane.places, ms(now + lane.lease), token)
    lane.taken = lane.taken + 1
    if lane.tat then
      lane.tat = math.max(lane.tat, now - lane.credit) + lane.gap
      lane.paid, lane.last = true, token
    end
  end
  if lane.breaker then
    -- One call tries; whatever else waits, waits for what it comes to.
    lane.breaker.probe, lane.breaker.lease = token, now + lane.lease
    write_breaker(lane.name, lane.breaker)
    lane.closed, lane.chance = 'breaker', lane.breaker.lease
  end
  lane.here, in_hand = lane.here + 1, in_hand + 1
  for _, x in ipairs({key, token, ms(lane.lease), redis.call('HGET', at(queue, 'stumbles'), key) or '0',
                      redis.call('HGET', at(queue, 'losses'), key) or '0', body}) do
    grants[#grants + 1] = x
  end
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', active, '-inf', ms(now), 'LIMIT', 0, 100)) do
  lanes[#lanes + 1] = open_lane(name)
end
local progress = true
while progress and served < room do
  local before = served
  for _, lane in ipairs(lanes) do
    if served >= room then break end
    grant(lane)
  end
  progress = served > before
end

-- When each lane that was looked at has its next chance.
local open = false
for _, lane in ipairs(lanes) do
  if lane.paid then write_tat(lane.name, lane.tat, lane.last) end
  if lane.slot then redis.call('SET', pace_key(lane.name, 'slot'), string.format('%.0f', lane.slot % #ORDER), 'PX', 3600000) end
  if redis.call('EXISTS', lane.line) == 0 then
    redis.call('ZREM', active, lane.name)
  elseif lane.closed == 'unset' then
    missing[#missing + 1] = lane.name
    redis.call('ZADD', active, ms(now + 1000), lane.name)
  elseif lane.chance then
    redis.call('ZADD', active, ms(lane.chance), lane.name)
  elseif lane.tat and lane.tat > now then
    redis.call('ZADD', active, ms(lane.tat), lane.name)
  elseif lane.taken and lane.taken >= lane.cap then
    local first = redis.call('ZRANGE', lane.places, 0, 0, 'WITHSCORES')
    redis.call('ZADD', active, ms(math.max(now + 1, tonumber(first[2] or now))), lane.name)
  else
    open = true
    -- To the back of the row, unless it had no turn yet.
    if lane.served or lane.closed == 'room' then redis.call('ZADD', active, ms(now), lane.name) end
  end
end

redis.call('SREM', at(queue, 'idle'), process)
-- Only who made progress wakes the next one: two processes that both cannot take a lane must not wake each other for ever.
if open and (served > 0 or finishes > 0) then wake(queue, 1) end
if served < room then redis.call('SADD', at(queue, 'idle'), process) end

local chance = -1
local function sooner(t)
  if t and (chance < 0 or tonumber(t) - now < chance) then chance = math.max(0, tonumber(t) - now) end
end
sooner(redis.call('ZRANGEBYSCORE', active, '(' .. ms(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
sooner(redis.call('ZRANGE', at(queue, 'delayed'), 0, 0, 'WITHSCORES')[2])
return {1, ms(chance), missing, grants}
