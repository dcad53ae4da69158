-- The breaker of a lane; put in front of every script, behind common.lua.
--
--   lane:<lane>:verdicts        hash  n<k>, f<k>: verdicts, and failures among them, of the k-th slice of time; row: failures
--                                     in a row
--   lane:<lane>:breaker         hash  only while it is not closed: till (ms; open until then), hold (ms that it was open for),
--                                     probe (token of the call that tries), lease (ms; until when its verdict is waited for),
--                                     allow (calls at a time that the ramp allows; 0: not closed again yet), since (ms),
--                                     why ('row' or 'share'), of and bad: what it was opened by
--
-- closed -> open (enough verdicts of the last minute are failures, or those in a row) -> after its time one call may try,
-- the probe -> closed with a ramp (one call at a time, one more with each success), or open again for twice as long. A probe
-- without a verdict when its lease has run out (its worker died) opens it again; one that was given back leaves its place to
-- the next. Losing either key closes the breaker; nothing here can hold a lane for good.

local SLICE, SLICES = 5000, 12
-- Verdicts that are enough to judge by, the share of failures that opens, and failures in a row that do so too.
local ENOUGH, SHARE, ROW = 10, 0.7, 5
-- How long an open breaker is remembered beyond its time (ms), and how long the verdicts on a receiver that is called rarely.
local KEEP, KEEP_VERDICTS = 3600000, 86400000
-- How long it is remembered which receiver a lane had (ms): longer than anything else about it.
local KEEP_ERA = 2 * KEEP_VERDICTS
-- How long it is remembered that breakers have opened, should nobody be there to tell of it (ms).
local KEEP_OPENED = 172800000

local function breaker_key(lane) return pace_key(lane, 'breaker') end

-- The breaker of a lane; nil when it is closed, or what is there cannot be true. With the settings of the lane, not open for
-- longer than they allow now.
local function read_breaker(lane, cfg)
  local key = breaker_key(lane)
  local left = redis.call('PTTL', key)
  if left < 0 or left > 2 * KEEP then return nil end
  local found = redis.pcall('HMGET', key, 'till', 'hold', 'probe', 'lease', 'allow', 'since', 'why', 'of', 'bad')
  local b = {till = number(found[1]), hold = number(found[2]), probe = found[3], lease = number(found[4]),
             allow = number(found[5]), since = number(found[6]), why = found[7], of = number(found[8]), bad = number(found[9])}
  if not (b.till and b.hold and b.probe and b.lease and b.allow and b.since) then return nil end
  if b.till > now + KEEP or b.lease > now + KEEP then return nil end
  if cfg and cfg.longest > 0 and b.hold > cfg.longest then
    b.till, b.hold = b.till - (b.hold - cfg.longest), cfg.longest
  end
  return b
end

local function write_breaker(lane, b)
  local key = breaker_key(lane)
  sound(key, 'hash')
  redis.call('HSET', key, 'till', ms(b.till), 'hold', ms(b.hold), 'probe', b.probe, 'lease', ms(b.lease), 'allow', b.allow,
    'since', ms(b.since), 'why', b.why or '', 'of', b.of or 0, 'bad', b.bad or 0)
  redis.call('PEXPIRE', key, math.ceil(math.max(0, b.till - now) + KEEP))
end

local function close_breaker(lane)
  redis.call('DEL', breaker_key(lane))
end

-- Forgets what was learnt of the receiver of a lane: somebody has let it go, or it is another one now.
local function forget_receiver(lane)
  redis.call('DEL', breaker_key(lane), pace_key(lane, 'verdicts'), pace_key(lane, 'until'))
end

-- Notes by what the receiver of a lane is known; when that has changed, what was learnt of the one before is forgotten.
local function note_receiver(lane, era)
  local key = pace_key(lane, 'era')
  local known = redis.pcall('GET', key)
  if known and known ~= era then forget_receiver(lane) end
  redis.call('SET', key, era, 'PX', KEEP_ERA)
end

-- Opens it (again). `known` is what it was before, nil when it was closed.
local function open_breaker(lane, known, hold, why, of, bad)
  local b = known or {since = now}
  if not known or known.allow > 0 then b.since, b.why, b.of, b.bad = now, why, of, bad end
  b.till, b.hold, b.probe, b.lease, b.allow = now + hold, hold, '', 0, 0
  write_breaker(lane, b)
  sound(P .. 'opened', 'hash')
  redis.call('HSET', P .. 'opened', lane, ms(now))
  redis.call('PEXPIRE', P .. 'opened', KEEP_OPENED)
  redis.call('DEL', pace_key(lane, 'verdicts'))
  return b
end

-- Adds to a number of a hash; one that is none, or another type of key, goes.
local function add(key, field, by)
  local n = redis.pcall('HINCRBY', key, field, by)
  if type(n) == 'number' and n > 0 and n < 1e9 then return n end
  redis.call('DEL', key)
  return redis.call('HINCRBY', key, field, by)
end

-- Counts a verdict; `weight` of it are failures (0: none). Returns verdicts and failures of the last minute, and failures in
-- a row; nothing when it was none.
local function count_verdict(lane, weight)
  local key, slice = pace_key(lane, 'verdicts'), math.floor(now / SLICE)
  if add(key, 'n' .. slice, math.max(1, weight)) <= 2 then
    -- A slice begins: what is older than the window goes.
    for _, field in ipairs(redis.call('HKEYS', key)) do
      local k = tonumber(string.match(field, '^[nf](%d+)$'))
      if field ~= 'row' and not (k and k > slice - SLICES and k <= slice) then redis.call('HDEL', key, field) end
    end
    redis.call('PEXPIRE', key, KEEP_VERDICTS)
  end
  if weight == 0 then
    redis.call('HDEL', key, 'row')
    return nil
  end
  add(key, 'f' .. slice, weight)
  local row = add(key, 'row', 1)
  redis.call('PEXPIRE', key, KEEP_VERDICTS)
  local n, f = 0, 0
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local kind, k = string.match(all[i], '^([nf])(%d+)$')
    if k and tonumber(k) > slice - SLICES then
      local count = number(all[i + 1]) or 0
      if kind == 'n' then n = n + count else f = f + count end
    end
  end
  return n, f, row
end

-- Whether a call has succeeded among the latest verdicts; none of them is older than the last opening.
local function has_succeeded(lane)
  local n, all = 0, redis.pcall('HGETALL', pace_key(lane, 'verdicts'))
  for i = 1, #all, 2 do
    local count, kind = number(all[i + 1]) or 0, string.match(all[i], '^([nf])%d+$')
    n = n + (kind == 'n' and count or kind == 'f' and -count or 0)
  end
  return n > 0
end

-- What a failure of each kind weighs: a timeout has cost a thread all its time.
local WEIGHT = {good = 0, bad = 1, timeout = 2}

-- The probe has come to an end.
local function judge_probe(queue, lane, b, cfg, verdict)
  if verdict == '' then
    b.probe, b.lease = '', 0
    write_breaker(lane, b)
  elseif verdict == 'good' then
    b.probe, b.lease, b.allow = '', 0, 1
    write_breaker(lane, b)
  else
    open_breaker(lane, b, math.min(2 * b.hold, cfg and cfg.longest or KEEP / 2))
  end
  look(queue, lane)
end

-- Hears what a call came to: 'good', 'bad' (the receiver's fault), 'timeout', 'throttled', or '' when there was none.
local function feed_breaker(queue, lane, token, verdict)
  local b = read_breaker(lane, read_settings(lane))
  if not b and (verdict == '' or verdict == 'throttled') then return end
  if not b and verdict == 'good' then
    count_verdict(lane, 0)
    return
  end
  local cfg = read_settings(lane)
  if cfg and cfg.broken <= 0 then
    if b then close_breaker(lane) end
    return
  end
  if b and b.allow == 0 then
    -- Others were under way when it opened: they say nothing new.
    if b.probe == token then judge_probe(queue, lane, b, cfg, verdict) end
    return
  end
  local weight = WEIGHT[verdict]
  if not weight then return end
  local n, f, row = count_verdict(lane, weight)
  if weight > 0 and cfg and (row >= ROW or (n >= ENOUGH and f >= SHARE * n)) then
    local hold = b and math.min(2 * b.hold, cfg.longest) or cfg.broken
    open_breaker(lane, b, hold, row >= ROW and 'row' or 'share', row >= ROW and row or n, row >= ROW and row or f)
    return
  end
  if not b then return end
  b.allow = weight == 0 and b.allow + 1 or math.max(1, math.floor(b.allow / 2))
  if cfg and b.allow >= cfg.cap then close_breaker(lane) else write_breaker(lane, b) end
  look(queue, lane)
end

-- Whether a breaker lets nothing go now, and then until when (ms); opens it again when its probe has not been heard of.
local function is_broken(lane, b)
  if not b or b.allow > 0 then return false end
  if b.probe ~= '' and b.lease <= now then open_breaker(lane, b, b.hold) end
  if b.till > now then return true, b.till end
  if b.probe ~= '' then return true, b.lease end
  return false
end
