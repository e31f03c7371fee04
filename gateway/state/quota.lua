-- One tenant's buckets over all replicas, on the server's clock. KEYS: the bucket. ARGV: op, requests a minute ('' none), tokens a
-- minute ('' none), requests, tokens. `take` answers '' or what is missing and for how many ms; `back` returns what was not used.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local op, per_minute = ARGV[1], {r = tonumber(ARGV[2]), t = tonumber(ARGV[3])}
local amount = {r = tonumber(ARGV[4]), t = tonumber(ARGV[5])}
local found = redis.call('HMGET', KEYS[1], 'r', 't', 'at', 'rl', 'tl')
local level, passed = {}, math.max(0, now - tonumber(found[3] or now))
for index, kind in ipairs({'r', 't'}) do
  local limit = per_minute[kind]
  if limit then
    local kept = tonumber(found[index] or limit)
    if tonumber(found[index + 3] or 0) ~= limit then kept = limit end -- another limit since: begin anew
    level[kind] = math.min(limit, kept + passed * limit / 60000)
  end
end

local answer = {'', '0'}
if op == 'take' then
  for _, kind in ipairs({'r', 't'}) do
    local limit = per_minute[kind]
    if limit and answer[1] == '' and level[kind] < amount[kind] then
      local wait = amount[kind] > limit and -1 or math.ceil((amount[kind] - level[kind]) * 60000 / limit)
      answer = {kind, tostring(wait)}
    end
  end
end
if answer[1] == '' then
  for _, kind in ipairs({'r', 't'}) do
    if level[kind] then
      local by = op == 'take' and -amount[kind] or amount[kind]
      level[kind] = math.min(per_minute[kind], level[kind] + by)
    end
  end
end
redis.call('HSET', KEYS[1], 'r', tostring(level.r or 0), 't', tostring(level.t or 0), 'at', string.format('%.0f', now),
  'rl', ARGV[2], 'tl', ARGV[3])
redis.call('PEXPIRE', KEYS[1], 120000)
return answer
