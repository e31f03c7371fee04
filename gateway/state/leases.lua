-- Admission over all replicas of one backend; the rules are in the docstring of gateway.state.leases.
-- A library of functions, made once: what changes from call to call is set by `run`, at the end.
-- KEYS: sum, own, lea, head, vt (one hash tag). ARGV: op, owner, session, lease_ms, ttl_ms, run id, then what the op takes.
-- Server time only. Every key that is written gets its TTL in the same call.
local SUM, OWN, LEA, HEAD, VT, CHANNEL, all_keys
local owner, session, run, lease_ms, ttl_ms, now
local rows_of, owners_read
local WOKEN_MS, OVERTAKINGS, AGED_EVERY = 200, 8, 20
local due
-- Positions in a packed request.
local ID, MASK, TASK, FEATURES, INPUT, OUTPUT, SEQS, BLOCKS, PRIO, TENANT, WEIGHT, COST, WAITED, EXEC, DIGEST, AGED =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16

local function whole(value) return string.format('%.0f', value) end

local function keep()
  for _, key in ipairs(all_keys) do redis.call('PEXPIRE', key, ttl_ms) end
end

-- Envelopes ---------------------------------------------------------------------------------------------------------

-- What a digest stands for never changes, so that it is read once for all calls; whether it is in use is asked every time.
local read, reads = {}, 0
local function known_rows(digest, in_use)
  if not in_use then return false end
  if not read[digest] then
    if reads >= 1000 then read, reads = {}, 0 end
    read[digest], reads = cjson.decode(redis.call('HGET', SUM, 'e|' .. digest)), reads + 1
  end
  return read[digest]
end

local function rows(digest)
  if rows_of[digest] == nil then rows_of[digest] = known_rows(digest, redis.call('HEXISTS', SUM, 'e|' .. digest) == 1) end
  return rows_of[digest]
end

local function digests()
  local text = redis.call('HGET', SUM, 'envs')
  local found = {}
  if text then for digest in string.gmatch(text, '[^,]+') do found[#found + 1] = digest end end
  return found
end

local function subset(features, of)
  local known = {}
  for _, name in ipairs(of) do known[name] = true end
  for _, name in ipairs(features) do if not known[name] then return false end end
  return true
end

-- Which boxes of an envelope hold a request: '1' or '0' for each.
local function mask_under(digest, ask)
  if ask[DIGEST] == digest then return ask[MASK] end
  local out = {}
  for i, box in ipairs(rows(digest).boxes) do
    local inside = box[1] == ask[TASK] and subset(ask[FEATURES], box[2]) and box[3] <= ask[INPUT] and ask[INPUT] <= box[4]
      and box[5] <= ask[OUTPUT] and ask[OUTPUT] <= box[6]
    out[i] = inside and '1' or '0'
  end
  return table.concat(out)
end

-- Counts ------------------------------------------------------------------------------------------------------------

local function add(name, by) if by ~= 0 then redis.call('HINCRBY', SUM, name, whole(by)) end end

local function outside(digest, mask, sign)
  for i = 1, #mask do
    if string.byte(mask, i) == 48 then add('o|' .. digest .. '|' .. i, sign) end
  end
end

local function count(who, ask, sign, known)
  add('s', sign * ask[SEQS])
  add('b', sign * ask[BLOCKS])
  add('s|' .. who, sign * ask[SEQS])
  add('b|' .. who, sign * ask[BLOCKS])
  for _, digest in ipairs(known or digests()) do outside(digest, mask_under(digest, ask), sign) end
end

local function pack_lease(who, deadline, text) return who .. '\n' .. whole(deadline) .. '\n' .. text end

local function unpack_lease(value)
  local who, deadline, text = string.match(value, '^([^\n]*)\n(%d+)\n(.*)$')
  return who, tonumber(deadline), text
end

local function drop(id, value)
  local who, _, text = unpack_lease(value)
  local ask = cjson.decode(text)
  redis.call('HDEL', LEA, id)
  count(who, ask, -1)
  return ask
end

-- What is in flight, seen under one envelope, in one read: sequences, blocks, of which the owner's own, and per box how many
-- requests are outside; and the epoch.
local function look(digest, size, who)
  local names = {'run', 'from', 'strange', 'envs', 'u|' .. digest, 's', 'b', 's|' .. who, 'b|' .. who}
  for i = 1, size do names[9 + i] = 'o|' .. digest .. '|' .. i end
  local found = redis.call('HMGET', SUM, unpack(names))
  if rows_of[digest] == nil then rows_of[digest] = known_rows(digest, found[5]) end
  local seen = {
    run = found[1], from = tonumber(found[2] or 0), strange = tonumber(found[3] or 0), envs = found[4], digest = digest, who = who,
    s = tonumber(found[6] or 0), b = tonumber(found[7] or 0), own_s = tonumber(found[8] or 0), own_b = tonumber(found[9] or 0),
    out = {},
  }
  for i = 1, size do seen.out[i] = tonumber(found[9 + i] or 0) end
  return seen
end

local function load(digest) return look(digest, #rows(digest).boxes, owner) end

-- Count a request of `seen.who` in or out, in one write where there is one envelope; `seen` is true afterwards.
local function recount(seen, ask, sign)
  if seen.envs ~= ask[DIGEST] or seen.digest ~= ask[DIGEST] then
    count(seen.who, ask, sign)
    local fresh = look(seen.digest, #seen.out, seen.who)
    for name, value in pairs(fresh) do seen[name] = value end
    return
  end
  seen.s, seen.b = seen.s + sign * ask[SEQS], seen.b + sign * ask[BLOCKS]
  seen.own_s, seen.own_b = seen.own_s + sign * ask[SEQS], seen.own_b + sign * ask[BLOCKS]
  local write = {'s', whole(seen.s), 'b', whole(seen.b), 's|' .. seen.who, whole(seen.own_s), 'b|' .. seen.who, whole(seen.own_b)}
  for i = 1, #seen.out do
    if string.byte(ask[MASK], i) == 48 then
      seen.out[i] = seen.out[i] + sign
      write[#write + 1] = 'o|' .. seen.digest .. '|' .. i
      write[#write + 1] = whole(seen.out[i])
    end
  end
  redis.call('HSET', SUM, unpack(write))
end

local function fits(digest, ask, seen)
  local env, mask = rows(digest), ask[MASK]
  if env.budget >= 0 and seen.b + ask[BLOCKS] > env.budget then return false end
  for i, box in ipairs(env.boxes) do
    if string.byte(mask, i) == 49 and seen.out[i] == 0 and seen.s + ask[SEQS] <= box[7] then return true end
  end
  return false
end

-- The view of one owner: what the others hold, and which boxes still hold everything.
local function view_of(seen)
  local possible = {}
  for i, outs in ipairs(seen.out) do possible[i] = outs == 0 and '1' or '0' end
  return whole(seen.s - seen.own_s) .. ' ' .. whole(seen.b - seen.own_b) .. ' ' .. table.concat(possible)
end

local function view(who, digest)
  if not rows(digest) then return '0 0 -' end
  return view_of(look(digest, #rows(digest).boxes, who))
end

-- Owners ------------------------------------------------------------------------------------------------------------

local function owners()
  if not owners_read then
    owners_read = {}
    local flat = redis.call('HGETALL', OWN)
    for i = 1, #flat, 2 do owners_read[flat[i]] = flat[i + 1] end
  end
  return owners_read
end

local function alive(who)
  local value
  if owners_read then value = owners_read[who] else value = redis.call('HGET', OWN, who) end
  if not value then return nil end
  local expiry, held_session = string.match(value, '^(%d+) (.*)$')
  return tonumber(expiry) > now, held_session
end

local function forget(who)
  redis.call('HDEL', OWN, who)
  if owners_read then owners_read[who] = nil end
  redis.call('HDEL', HEAD, who)
  redis.call('HDEL', SUM, 's|' .. who, 'b|' .. who)
end

-- Order over replicas -----------------------------------------------------------------------------------------------

local function vtime(prio, tenant)
  return tonumber(redis.call('HGET', VT, whole(prio) .. '|' .. tenant) or 0)
end

local function set_vtime(prio, tenant, value) redis.call('HSET', VT, whole(prio) .. '|' .. tenant, string.format('%.6f', value)) end

local function heads()
  local flat, found = redis.call('HGETALL', HEAD), {}
  for i = 1, #flat, 2 do
    local since, passed, woken, text = string.match(flat[i + 1], '^(%d+) (%d+) (%d+) (.*)$')
    local ask = cjson.decode(text)
    if alive(flat[i]) and rows(ask[DIGEST]) then
      found[#found + 1] = {
        who = flat[i], since = tonumber(since), passed = tonumber(passed), woken = tonumber(woken), text = text, ask = ask,
      }
    else
      redis.call('HDEL', HEAD, flat[i])
    end
  end
  return found
end

local function put_head(head)
  redis.call('HSET', HEAD, head.who, table.concat({whole(head.since), whole(head.passed), whole(head.woken), head.text}, ' '))
  redis.call('PEXPIRE', HEAD, ttl_ms)
end

local function waits_already(tenant, prio, list)
  for _, head in ipairs(list) do if head.ask[TENANT] == tenant and head.ask[PRIO] == prio then return true end end
  return false
end

local function tag(ask, list)
  local own = vtime(ask[PRIO], ask[TENANT])
  return waits_already(ask[TENANT], ask[PRIO], list) and own or math.max(own, vtime(ask[PRIO], ''))
end

-- Grants by priority while anything waited, and how many more urgent ones there were when a level last had its aged turn.
local function priorities()
  local found = {}
  for prio in string.gmatch(redis.call('HGET', VT, 'prios') or '', '[^,]+') do found[#found + 1] = prio end
  return found
end

local function more_urgent(prio)
  local total = 0
  for _, each in ipairs(priorities()) do
    if tonumber(each) < prio then total = total + tonumber(redis.call('HGET', VT, 'g|' .. each) or 0) end
  end
  return total
end

-- The levels whose aged requests may pass the more urgent ones now: one grant in AGED_EVERY, counted over all replicas.
local function find_due(list, ask, since)
  due = {}
  local function consider(each, from)
    if (each[AGED] or -1) >= 0 and now - from >= each[AGED] then due[each[PRIO]] = true end
  end
  for _, head in ipairs(list) do consider(head.ask, head.since) end
  if ask then consider(ask, since) end
  for prio in pairs(due) do
    due[prio] = more_urgent(prio) - tonumber(redis.call('HGET', VT, 'm|' .. whole(prio)) or 0) >= AGED_EVERY - 1
  end
end

local function before(one, since_one, other, since_other, list)
  if one[PRIO] ~= other[PRIO] then
    local left, right = due[one[PRIO]] or false, due[other[PRIO]] or false
    if left ~= right then return left end
    return one[PRIO] < other[PRIO]
  end
  if one[TENANT] ~= other[TENANT] then
    local left, right = tag(one, list), tag(other, list)
    if left ~= right then return left < right end
  end
  return since_one < since_other
end

local function set_head(text)
  if text == '' then
    redis.call('HDEL', HEAD, owner)
    return
  end
  local ask = cjson.decode(text)
  local list = heads()
  local head = {who = owner, since = now - ask[WAITED], passed = 0, woken = 0, text = text, ask = ask}
  for _, old in ipairs(list) do
    if old.who == owner and old.ask[ID] == ask[ID] then head.since, head.passed = old.since, old.passed end
  end
  if not waits_already(ask[TENANT], ask[PRIO], list) then
    set_vtime(ask[PRIO], ask[TENANT], math.max(vtime(ask[PRIO], ask[TENANT]), vtime(ask[PRIO], '')))
    redis.call('PEXPIRE', VT, ttl_ms)
  end
  put_head(head)
end

-- Tell the replica whose head is next and fits that it may come. A head that was woken and did not come loses its turn.
-- Whether it is the caller's own, which is told by the answer (`loud`: by a message like the others).
local function wake_next(loud)
  local list = heads()
  find_due(list)
  local best = nil
  for _, head in ipairs(list) do
    if head.woken > 0 and now - head.woken > WOKEN_MS then
      redis.call('HDEL', HEAD, head.who)
    elseif fits(head.ask[DIGEST], head.ask, load(head.ask[DIGEST])) then
      if not best or before(head.ask, head.since, best.ask, best.since, list) then best = head end
    end
  end
  if best and (loud or best.who ~= owner) then
    if best.woken == 0 then
      best.woken = now
      put_head(best)
    end
    redis.call('PUBLISH', CHANNEL, best.who .. ' ' .. view(best.who, best.ask[DIGEST]))
  end
  return best ~= nil and best.who == owner
end

-- Who stands before this request: 'behind' one that fits now, or 'held' for one that was passed often enough.
local function in_the_way(ask, since, list)
  local passed = {}
  for _, head in ipairs(list) do
    local turn_lost = head.woken > 0 and now - head.woken > WOKEN_MS
    if head.who ~= owner and not turn_lost and before(head.ask, head.since, ask, since, list) then
      if fits(head.ask[DIGEST], head.ask, load(head.ask[DIGEST])) then return 'behind' end
      if head.passed >= OVERTAKINGS then return 'held' end
      passed[#passed + 1] = head
    end
  end
  for _, head in ipairs(passed) do
    head.passed = head.passed + 1
    put_head(head)
  end
  return nil
end

-- The epoch: after a restart or a flush nothing is granted for one lease time, while replicas say what they hold.
local function epoch()
  local known = redis.call('HMGET', SUM, 'run', 'from', 'strange')
  if known[1] ~= run then
    redis.call('HSET', SUM, 'run', run, 'from', whole(now + lease_ms))
    return now + lease_ms
  end
  return math.max(tonumber(known[2]), tonumber(known[3] or 0))
end

-- Operations --------------------------------------------------------------------------------------------------------

local function waits_since(ask, list)
  for _, head in ipairs(list) do
    if head.who == owner and head.ask[ID] == ask[ID] then return head.since end
  end
  return now - ask[WAITED]
end

-- A grant while others wait counts for the turns of the aged; one that passes more urgent ones was such a turn.
local function count_grant(ask, list, following)
  local prio, passes = whole(ask[PRIO]), following and following[PRIO] < ask[PRIO]
  for _, head in ipairs(list) do passes = passes or head.ask[PRIO] < ask[PRIO] end
  if redis.call('HINCRBY', VT, 'g|' .. prio, 1) == 1 then
    local known = redis.call('HGET', VT, 'prios')
    redis.call('HSET', VT, 'prios', known and (known .. ',' .. prio) or prio)
  end
  if passes then redis.call('HSET', VT, 'm|' .. prio, whole(more_urgent(ask[PRIO]))) end
end

-- The start tag of a grant moves the clock and the tenant's own time.
local function charge(ask, list)
  local clock, own = whole(ask[PRIO]) .. '|', whole(ask[PRIO]) .. '|' .. ask[TENANT]
  local found = redis.call('HMGET', VT, clock, own)
  local now_at, used = tonumber(found[1] or 0), tonumber(found[2] or 0)
  local start = waits_already(ask[TENANT], ask[PRIO], list) and used or math.max(used, now_at)
  redis.call('HSET', VT, clock, string.format('%.6f', math.max(start, now_at)),
    own, string.format('%.6f', start + ask[COST] / ask[WEIGHT]))
  if not found[1] then redis.call('PEXPIRE', VT, ttl_ms) end
end

local function acquire(text, next_text)
  local ask = cjson.decode(text)
  local digest = ask[DIGEST]
  local seen = look(digest, #ask[MASK], owner)
  local from = math.max(seen.from, seen.strange)
  if seen.run ~= run then from = epoch() end
  local lives, held_session = alive(owner)
  if not lives or held_session ~= session or not rows(digest) then
    keep()
    return {'unregistered', '0 0 -'}
  end
  local list, verdict = heads(), 'denied'
  local since, following = waits_since(ask, list), next_text ~= '' and cjson.decode(next_text) or nil
  if #list > 0 or following then find_due(list, ask, since) else due = {} end
  if now < from then
    verdict = 'cold'
  elseif following and following[PRIO] < ask[PRIO] and not due[ask[PRIO]] then
    verdict = 'early'
  elseif fits(digest, ask, seen) then
    verdict = in_the_way(ask, since, list) or 'granted'
  end
  if verdict ~= 'granted' then
    set_head(verdict == 'early' and next_text or text)
    if verdict == 'behind' then wake_next() end
    return {verdict, view_of(seen), whole(math.max(0, from - now))}
  end
  charge(ask, list)
  redis.call('HSET', LEA, ask[ID], pack_lease(owner, now + ask[EXEC], text))
  if seen.s == 0 then redis.call('PEXPIRE', LEA, ttl_ms) end
  recount(seen, ask, 1)
  if #list > 0 or following then
    count_grant(ask, list, following)
    set_head(next_text)
    wake_next()
  end
  return {'granted', view_of(seen)}
end

local function settle(id, refund, digest, size)
  local mine, value = false, redis.call('HGET', LEA, id)
  local seen = look(digest, size, owner)
  if value and string.sub(value, 1, #owner + 1) == owner .. '\n' then
    local _, _, text = unpack_lease(value)
    local ask, back = cjson.decode(text), tonumber(refund)
    redis.call('HDEL', LEA, id)
    recount(seen, ask, -1)
    if back > 0 then
      set_vtime(ask[PRIO], ask[TENANT], vtime(ask[PRIO], ask[TENANT]) - back / ask[WEIGHT])
    end
    if redis.call('EXISTS', HEAD) == 1 then mine = wake_next() end
  end
  return {mine and 'next' or 'ok', view_of(seen)}
end

local function learn(digest, text)
  local known = digests()
  local is_new = true
  for _, each in ipairs(known) do if each == digest then is_new = false end end
  redis.call('HSET', SUM, 'u|' .. digest, whole(now))
  if not is_new then return end
  known[#known + 1] = digest
  redis.call('HSET', SUM, 'e|' .. digest, text, 'envs', table.concat(known, ','))
  rows_of[digest] = nil
  local flat = redis.call('HGETALL', LEA)
  for i = 2, #flat, 2 do
    local _, _, packed = unpack_lease(flat[i])
    outside(digest, mask_under(digest, cjson.decode(packed)), 1)
  end
end

local function unlearn()
  local kept, known = {}, digests()
  for _, digest in ipairs(known) do
    if now - tonumber(redis.call('HGET', SUM, 'u|' .. digest) or 0) > 3 * lease_ms then
      for i = 1, #rows(digest).boxes do redis.call('HDEL', SUM, 'o|' .. digest .. '|' .. i) end
      redis.call('HDEL', SUM, 'e|' .. digest, 'u|' .. digest)
      rows_of[digest] = nil
    else
      kept[#kept + 1] = digest
    end
  end
  if #kept ~= #known then redis.call('HSET', SUM, 'envs', table.concat(kept, ',')) end
end

-- Leases of owners that are gone end at their execution deadline; the owners that still have some are suspects.
local function suspects()
  owners()
  local holds, found, flat = {}, {}, redis.call('HGETALL', LEA)
  for i = 1, #flat, 2 do
    local who, deadline = unpack_lease(flat[i + 1])
    if not alive(who) then
      if deadline <= now then drop(flat[i], flat[i + 1]) else holds[who] = true end
    end
  end
  local gone = {}
  for who in pairs(owners()) do if not alive(who) then gone[#gone + 1] = who end end
  for _, who in ipairs(gone) do
    redis.call('HDEL', HEAD, who)
    if not holds[who] then forget(who) end
  end
  for who in pairs(holds) do found[#found + 1] = who end
  return found
end

-- Take the owner's word for what it holds: leases it does not name were never used, those it names run.
local function register(held)
  local named = {}
  for _, each in ipairs(held) do named[each[ID]] = each end
  local flat = redis.call('HGETALL', LEA)
  for i = 1, #flat, 2 do
    if unpack_lease(flat[i + 1]) == owner then
      if named[flat[i]] then named[flat[i]] = nil else drop(flat[i], flat[i + 1]) end
    end
  end
  for id, each in pairs(named) do
    redis.call('HSET', LEA, id, pack_lease(owner, now + each[EXEC], cjson.encode(each)))
    count(owner, each, 1)
  end
end

local function beat(digest, env, head, held)
  epoch()
  learn(digest, env)
  local lives, held_session = alive(owner)
  if held ~= '' then
    redis.call('HSET', OWN, owner, whole(now + lease_ms) .. ' ' .. session)
    register(cjson.decode(held))
  elseif lives and held_session == session then
    redis.call('HSET', OWN, owner, whole(now + lease_ms) .. ' ' .. session)
  else
    keep()
    return {'unregistered', '0 0 -'}
  end
  unlearn()
  local found = suspects()
  set_head(head)
  keep()
  local mine = redis.call('EXISTS', HEAD) == 1 and wake_next()
  local lives_now = {}
  for who in pairs(owners()) do if alive(who) then lives_now[#lives_now + 1] = who end end
  return {mine and 'next' or 'ok', view(owner, digest), table.concat(lives_now, ','), table.concat(found, ',')}
end

local function release(who)
  local flat = redis.call('HGETALL', LEA)
  for i = 1, #flat, 2 do
    if unpack_lease(flat[i + 1]) == who then drop(flat[i], flat[i + 1]) end
  end
  forget(who)
  keep()
  if redis.call('EXISTS', HEAD) == 1 then wake_next(true) end
  return {'ok', '0 0 -'}
end

local function reap(who)
  if alive(who) then return {'alive', '0 0 -'} end
  return release(who)
end

-- Requests of gateways that nobody knows are at the backend: their shapes are unknown, so nothing is granted beside them.
local function strange(names)
  for _, who in ipairs(cjson.decode(names)) do
    if redis.call('HEXISTS', OWN, who) == 0 then
      redis.call('HSET', SUM, 'strange', whole(now + 2500))
      keep()
      return {'ok', '0 0 -'}
    end
  end
  redis.call('HDEL', SUM, 'strange')
  return {'ok', '0 0 -'}
end

local operations = {
  acquire = function(a) return acquire(a[7], a[8]) end,
  settle = function(a) return settle(a[7], a[8], a[9], tonumber(a[10])) end,
  beat = function(a) return beat(a[7], a[8], a[9], a[10]) end,
  reap = function(a) return reap(a[7]) end,
  strange = function(a) return strange(a[7]) end,
  withdraw = function() return release(owner) end,
}

redis.register_function('FUNCTION_NAME', function(keys, args)
  SUM, OWN, LEA, HEAD, VT, all_keys = keys[1], keys[2], keys[3], keys[4], keys[5], keys
  CHANNEL = SUM .. ':wake'
  owner, session, run = args[2], args[3], args[6]
  lease_ms, ttl_ms = tonumber(args[4]), tonumber(args[5])
  rows_of, owners_read, due = {}, nil, {}
  local clock = redis.call('TIME')
  now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  return operations[args[1]](args)
end)
