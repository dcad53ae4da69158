-- A call of a slow lane begins now: the next grant counts from here, not from the hand-out of this one, which was earlier
-- by a claim and whatever else came between.
--
-- ARGV  1 lane, 2 token of the call's grant

local lane, token = ARGV[1], ARGV[2]
local cfg = read_settings(lane)
if not cfg or cfg.gap <= 0 then return 0 end
local tat, last, wrong = read_tat(lane, cfg.gap)
if tat and not wrong and last == token then write_tat(lane, math.max(tat, now - cfg.credit + cfg.gap), last) end
return 1
