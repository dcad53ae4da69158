-- Lets events of a source in, as many as its limit allows: the generic cell rate algorithm.
--
--   limit:<source>   string  when the bucket of the source is full again (ms), as long as it is not
--
-- ARGV  1 source  2 gap (ms between two events)  3 burst  4 how many come now  5 how many may be ahead at the most
-- Returns 0 when they may come, else the ms after which it is worth asking again.
--
-- More than the burst come in when the bucket is full; they are paid for afterwards.

local key = P .. 'limit:' .. ARGV[1]
local gap, burst, n, most = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local full = number(redis.pcall('GET', key)) or now
full = math.min(math.max(full, now), now + gap * most)
local wait = n > burst and full - now or full + (n - burst) * gap - now
-- The clock counts in thousandths, and a gap need not be a whole number of them.
if wait > 0.01 then return ms(wait) end
local after = full + n * gap
redis.call('SET', key, ms(after), 'PX', math.ceil(after - now) + 1000)
return '0'
