-- What every script shares; put in front of each of them when it is loaded.
--
-- KEYS[1]  the namespace. All other key names are made from it here:
--
--   epoch                       made only by a rebuild; without it keyed queues hand out nothing
--   rebuild                     the nonce of the rebuild under way
--   procs                       zset  process -> time of its last beat (ms)
--   wake:<process>              list  names of queues that have something for this process
--   strays:<process>            set   tokens that its last beat did not list
--   <queue>:delayed             zset  key -> due time (ms)
--   <queue>:lane:<lane>         zset  key -> score; what waits in one lane: its lines one behind the other, each in order
--   <queue>:lines               hash  key -> line, of those that are not in the first one
--   <queue>:held                hash  key -> "token process until note": in a worker's hands
--   <queue>:active              zset  lane -> time of its next chance (ms); an index, rebuilt by `ensure`
--   <queue>:idle                set   processes that found nothing and want to be woken
--   <queue>:stumbles, :losses   hash  key -> times in a row it was given up without a verdict / its holder was gone
--   <queue>:msgs, :XQ, :XQ.msgs the bodies of ordinary messages, and those that were rejected
--   lane:<lane>:cfg             hash  gap (ms between two grants, 0: none), credit (ms), cap, lease (ms), version,
--                                     hold ('', 'paused', 'disabled'),
--                                     broken (ms that the breaker stays open at first, 0: there is none), longest (ms)
--   lane:<lane>:tat             string  time of the next token (ms), and the grant that took the last one
--   lane:<lane>:places          zset  token -> until (ms); and `-`, the mark that none is missing
--   lane:<lane>:until           string  time (ms) until which the receiver asked to be left alone
--   hold:<endpoint>             string  "version hold": what was told ahead of the settings, for a minute
--   lane:<lane>:era             string  by what its receiver is known; see breaker.lua
--   lane:<lane>:slot            string  how many turns the lines of a lane have had
--   lane:<lane>:verdicts, lane:<lane>:breaker   see breaker.lua
--   opened                      hash  lane -> time (ms) at which its breaker opened last, until somebody was told; see opened.lua
--
-- A key is in exactly one of delayed, a lane, held. Times are Redis' own, in ms with a fraction.
--
-- What is below `lane:` always has a time to live, and what cannot be true there does not count: whatever a crash or a
-- hand has left, a lane goes on by itself, at its pace.

local P = KEYS[1] .. ':'
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + tonumber(clock[2]) / 1000

local function ms(x) return string.format('%.3f', x) end
local function at(queue, name) return P .. queue .. ':' .. name end
local function lane_key(queue, lane) return P .. queue .. ':lane:' .. lane end
local function pace_key(lane, name) return P .. 'lane:' .. lane .. ':' .. name end

-- `id:seq:lane` is a delivery; everything else waits in the one lane `-` of its queue.
local function lane_of(key)
  return string.match(key, '^%d+:%d+:(.+)$') or '-'
end

-- The lines of a lane follow each other in one set: which line a key is in is a part of its score.
local LINES = {'fresh', 'retry', 'replay'}
local SPAN = 2 ^ 51
local NUMBER = {fresh = 0, retry = 1, replay = 2}

local function score_of(key, line)
  local seq = string.match(key, '^%d+:(%d+):')
  if not seq then return string.match(key, '^%d+$') or ms(now) end
  return string.format('%.0f', (NUMBER[line] or 0) * SPAN + math.min(tonumber(seq), SPAN - 1))
end

local function line_of(queue, key)
  if lane_of(key) == '-' then return 'fresh' end
  return redis.call('HGET', at(queue, 'lines'), key) or 'fresh'
end

local function set_line(queue, key, line)
  if lane_of(key) == '-' or line == '' then return end
  if line == 'fresh' then
    redis.call('HDEL', at(queue, 'lines'), key)
  else
    redis.call('HSET', at(queue, 'lines'), key, line)
  end
end

local function read_held(queue, key)
  local value = redis.call('HGET', at(queue, 'held'), key)
  if not value then return nil end
  local token, process, till, note = string.match(value, '^(%S+) (%S+) (%S+) (%S+)$')
  return {token = token, process = process, till = tonumber(till) or 0, note = tonumber(note)}
end

-- Whether nobody but Postgres says that a key is held: a rebuild found it `delivering` and no worker had announced it.
local function is_told(held)
  return string.sub(held.token, 1, 3) == 'pg:'
end

local function write_held(queue, key, held)
  redis.call('HSET', at(queue, 'held'), key,
    held.token .. ' ' .. held.process .. ' ' .. ms(held.till) .. ' ' .. (held.note and ms(held.note) or '-'))
end

-- Wakes up to `n` processes that registered as idle on `queue`.
local function wake(queue, n)
  local idle = redis.call('SPOP', at(queue, 'idle'), n)
  for _, process in ipairs(idle) do
    redis.call('RPUSH', P .. 'wake:' .. process, queue)
    redis.call('PEXPIRE', P .. 'wake:' .. process, 60000)
  end
end

-- Lets a lane that is not asleep be looked at now, whatever it waits for.
local function look(queue, lane)
  return redis.call('ZADD', at(queue, 'active'), 'XX', 'CH', 'LT', ms(now), lane) == 1
end

-- Lets a lane be looked at. Only a lane that was asleep wakes somebody: an active one is on somebody's list already.
local function activate(queue, lane)
  if redis.call('ZADD', at(queue, 'active'), 'NX', ms(now), lane) == 1 then wake(queue, 1) end
end

-- Delays below this are told to an idle process at once; longer ones are seen by its next look in time.
local SOON = 1500

-- A structure of another type (written by hand) would stop its queue for ever; what was in it is queued again.
local function sound(key, kind)
  local is = redis.call('TYPE', key).ok
  if is ~= kind and is ~= 'none' then redis.call('DEL', key) end
end

-- Puts a key that is nowhere where it belongs.
local function put(queue, key, due)
  if due > now then
    redis.call('ZADD', at(queue, 'delayed'), ms(due), key)
    if due - now < SOON then wake(queue, 1) end
  else
    local lane = lane_of(key)
    sound(lane_key(queue, lane), 'zset')
    redis.call('ZADD', lane_key(queue, lane), score_of(key, line_of(queue, key)), key)
    activate(queue, lane)
  end
end

-- Where a key is: 'held', 'waiting', 'delayed' (then with its due time), or nil.
local function whereabouts(queue, key)
  if redis.call('HEXISTS', at(queue, 'held'), key) == 1 then return 'held' end
  local due = redis.call('ZSCORE', at(queue, 'delayed'), key)
  if due then return 'delayed', tonumber(due) end
  local line = lane_key(queue, lane_of(key))
  sound(line, 'zset')
  if redis.call('ZSCORE', line, key) then return 'waiting' end
  return nil
end

-- Makes sure that a key is somewhere and not due later than `due`.
-- Held: the time is noted there, and whoever finishes it acts on the note. Returns true when the key was nowhere.
-- `line` is told by whoever knows it; '' leaves it as it is.
local function ensure(queue, key, due, line)
  local where, known = whereabouts(queue, key)
  if where ~= 'waiting' then set_line(queue, key, line) end
  if where == 'held' then
    local held = read_held(queue, key)
    if held and (not held.note or due < held.note) then
      held.note = due
      write_held(queue, key, held)
    end
    return false
  elseif where == 'waiting' then
    activate(queue, lane_of(key))
    return false
  elseif where == 'delayed' then
    if due < known then
      redis.call('ZREM', at(queue, 'delayed'), key)
      put(queue, key, due)
    end
    return false
  end
  put(queue, key, due)
  return true
end

local function drop_counts(queue, key)
  redis.call('HDEL', at(queue, 'stumbles'), key)
  redis.call('HDEL', at(queue, 'losses'), key)
end

-- Nothing is remembered of a key that is gone.
local function drop_all(queue, key)
  drop_counts(queue, key)
  if lane_of(key) ~= '-' then redis.call('HDEL', at(queue, 'lines'), key) end
end

-- A number that can be true; nil otherwise.
local function number(value)
  local n = type(value) == 'string' and tonumber(value)
  if n and n >= 0 and n < 1e15 then return n end
  return nil
end

-- How long the settings of a lane are believed (ms); whoever knows better writes them again.
local SETTINGS_TTL = 60000

-- The settings of a lane; nil when they are missing, or cannot be what was written here.
local function read_settings(lane)
  local left = redis.call('PTTL', pace_key(lane, 'cfg'))
  if left < 0 or left > SETTINGS_TTL then return nil end
  local found = redis.pcall('HMGET', pace_key(lane, 'cfg'), 'gap', 'credit', 'cap', 'lease', 'version', 'hold', 'broken',
    'longest')
  local cfg = {gap = number(found[1]), credit = number(found[2]), cap = number(found[3]), lease = number(found[4]),
               version = number(found[5]), hold = found[6], broken = number(found[7]), longest = number(found[8])}
  if cfg.gap and cfg.credit and cfg.cap and cfg.lease and cfg.version and cfg.hold and cfg.broken and cfg.longest then
    return cfg
  end
  return nil
end

-- Whether an endpoint is held, as somebody told ahead of its settings, and by which version; nothing when nobody did.
local function told_hold(endpoint)
  local value = redis.pcall('GET', P .. 'hold:' .. endpoint)
  if type(value) ~= 'string' then return nil end
  local version, hold = string.match(value, '^(%d+) (%a*)$')
  return tonumber(version), hold
end

-- The name of the list of a lane's places; anything but a list is removed.
local function places_of(lane)
  local key = pace_key(lane, 'places')
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'zset' and kind ~= 'none' then redis.call('DEL', key) end
  return key
end

-- Takes a place for a token, or keeps it.
local function take_place(lane, token, till)
  local key = places_of(lane)
  redis.call('ZADD', key, ms(till), token)
  if redis.call('PTTL', key) < 0 then redis.call('PEXPIRE', key, math.ceil(math.max(1000, 2 * (till - now)))) end
end

-- Frees the place of a token in its lane; a lane that waited for a place may go on.
local function free_place(queue, lane, token)
  if lane == '-' then return end
  if redis.call('ZREM', places_of(lane), token) == 1 then look(queue, lane) end
end

-- The time of a lane's next token (nil: any), the grant that took the last one, and whether the time had to be put
-- right: one that cannot be read, or lies further ahead than one gap (the clock jumped, the rate was raised).
local function read_tat(lane, gap)
  local value = redis.pcall('GET', pace_key(lane, 'tat'))
  if not value then return nil, '', false end
  local tat, last
  if type(value) == 'string' then tat, last = string.match(value, '^(%S+) ?(%S*)$') end
  tat = number(tat)
  if not tat or tat > now + gap then return now + gap, last or '', true end
  return tat, last, false
end

local function write_tat(lane, tat, last)
  redis.call('SET', pace_key(lane, 'tat'), ms(tat) .. ' ' .. (last or ''), 'PX', 86400000)
end

-- Gives a rate token back that was not used. When other grants were made since, only as far as no two of them come
-- closer than the pace allows: a place in time that has passed cannot be given back.
local function refund(lane, token)
  local cfg = read_settings(lane)
  if cfg and cfg.gap <= 0 then return end
  local tat, last, wrong = read_tat(lane, cfg and cfg.gap or math.huge)
  if not tat or wrong then return end
  if last == token then
    -- A process that stood still gives back when the settings are forgotten: the lane may go on at once.
    write_tat(lane, cfg and tat - cfg.gap or math.min(tat, now))
  elseif cfg then
    write_tat(lane, math.max(tat - cfg.gap, math.min(tat, now + cfg.gap - cfg.credit)), last)
  end
end

-- The longest that a receiver is left alone because it asked for it (ms); it may ask again.
local PATIENCE = 300000

-- Until when a lane is left alone because its receiver asked for it; nil when it did not, or that is over.
local function patient_until(lane)
  local till = number(redis.pcall('GET', pace_key(lane, 'until')))
  if till and till > now and till <= now + PATIENCE then return till end
  return nil
end

-- Leaves a lane alone for `ms_more`; the later of two wishes counts.
local function be_patient(lane, ms_more)
  local till = math.max(patient_until(lane) or 0, now + math.min(ms_more, PATIENCE))
  if till > now then redis.call('SET', pace_key(lane, 'until'), ms(till), 'PX', math.ceil(till - now)) end
end

-- A key without a verdict comes back after 5 s, doubling to 5 min.
local function stumble_delay(times)
  return math.min(5000 * 2 ^ math.min(times - 1, 10), 300000)
end
