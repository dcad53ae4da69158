-- Writes the settings of lanes; older ones never replace newer ones, and what waits feels a change at once. Whoever writes
-- them may not have heard yet that somebody holds the endpoint.
--
-- ARGV  1 queue, then per lane: name, version, gap (ms), credit (ms), cap, lease (ms), hold, broken (ms), longest (ms),
--                    era: by what its receiver is known; when that changes, its breaker and its wish are forgotten

local queue = ARGV[1]
for i = 2, #ARGV, 10 do
  local name, version = ARGV[i], ARGV[i + 1]
  local cfg = pace_key(name, 'cfg')
  local known = read_settings(name)
  if not known or known.version <= tonumber(version) then
    local told, hold = told_hold(string.match(name, '^[^@]*'))
    if not told or told <= tonumber(version) then hold = ARGV[i + 6] end
    redis.call('DEL', cfg)
    redis.call('HSET', cfg, 'version', version, 'gap', ARGV[i + 2], 'credit', ARGV[i + 3], 'cap', ARGV[i + 4],
      'lease', ARGV[i + 5], 'hold', hold, 'broken', ARGV[i + 7], 'longest', ARGV[i + 8])
    redis.call('PEXPIRE', cfg, SETTINGS_TTL)
    note_receiver(name, ARGV[i + 9])
    if look(queue, name) then wake(queue, 1) end
  end
end
return 1
