-- How many requests each replica has in flight for one tenant, on the server's clock. KEYS: the tenant's hash. ARGV: op, owner,
-- lease_ms, number. `claim` takes one more unless `number` are there (1: taken, 0: not); `release` gives one back; `state` says how
-- many there are. What a replica said is forgotten after one lease time, which it renews by saying it again.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local op, owner, lease_ms, number = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local mine, total, flat = 0, 0, redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local count, expiry = string.match(flat[i + 1], '^(%d+) (%d+)$')
  if tonumber(expiry) <= now then
    redis.call('HDEL', KEYS[1], flat[i])
  else
    total = total + tonumber(count)
    if flat[i] == owner then mine = tonumber(count) end
  end
end

local answer = 1
if op == 'state' then
  mine = number
elseif op == 'release' then
  mine = math.max(0, mine - 1)
elseif total >= number then
  answer = 0
else
  mine = mine + 1
end
if mine > 0 then
  redis.call('HSET', KEYS[1], owner, string.format('%.0f %.0f', mine, now + lease_ms))
  redis.call('PEXPIRE', KEYS[1], 2 * lease_ms)
else
  redis.call('HDEL', KEYS[1], owner)
end
return answer
