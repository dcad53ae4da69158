-- The steps of a rebuild that must be one with its nonce.
--
-- ARGV  1 step: begin | hold | commit   2 nonce
--       hold: 3 queue, then per key: key, token, lease left (ms)
-- begin: Returns 1, or 0 when there is an epoch already. hold, commit: 1, or 0 when another rebuild has begun since.

local step, nonce = ARGV[1], ARGV[2]
if step == 'begin' then
  if redis.call('EXISTS', P .. 'epoch') == 1 then return 0 end
  redis.call('SET', P .. 'rebuild', nonce, 'PX', 600000)
  return 1
end
if redis.call('GET', P .. 'rebuild') ~= nonce then return 0 end
if step == 'hold' then
  for i = 4, #ARGV, 3 do
    local key, token, lease = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
    local lane = lane_of(key)
    if not read_held(ARGV[3], key) then
      redis.call('ZREM', at(ARGV[3], 'delayed'), key)
      redis.call('ZREM', lane_key(ARGV[3], lane), key)
      write_held(ARGV[3], key, {token = token, process = '?', till = now + lease})
      take_place(lane, token, now + lease)
    end
  end
  return 1
end
redis.call('SET', P .. 'epoch', nonce)
redis.call('DEL', P .. 'rebuild')
return 1
