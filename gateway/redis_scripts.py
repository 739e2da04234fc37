"""The scripts that Redis runs, each as one step: nobody sees half of one.

A rate is a hash (level, time in ms) that is brought up to date when it is touched and expires when it would
be empty. What is held is a sorted set of leases by the time they end, one member per unit.
"""

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + clock[2] / 1000
local function level(key, rate)
  local state = redis.call('HMGET', key, 'level', 'time')
  if not state[1] then return 0 end
  return math.max(0, state[1] - math.max(0, now - state[2]) * rate)
end
local function set_level(key, used, rate)
  if used <= 0 then
    redis.call('DEL', key)
  else
    redis.call('HSET', key, 'level', tostring(used), 'time', string.format('%.3f', now))
    redis.call('PEXPIRE', key, math.ceil(used / rate) + 1000)
  end
end
local function hold(key, holder, amount, lease)
  for unit = 1, amount do
    redis.call('ZADD', key, now + lease, holder .. '/' .. unit)
  end
  redis.call('PEXPIRE', key, lease + 1000)
end
"""

TAKE = (
    _NOW
    + """
-- ARGV: holder, lease in ms, then for each key: kind, amount, rate per ms, capacity
-- returns the place of the charge refused (0: none), then how much is used of each
local holder, lease = ARGV[1], tonumber(ARGV[2])
local used, before, refused = {}, {}, 0
for i, key in ipairs(KEYS) do
  local at = 2 + (i - 1) * 4
  local amount, rate, capacity = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  if used[key] == nil then
    if ARGV[at + 1] == 'held' then
      redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
      used[key] = redis.call('ZCARD', key)
    else
      used[key] = level(key, rate)
    end
  end
  before[i] = used[key]
  if refused == 0 and used[key] + amount > capacity then refused = i end
  used[key] = used[key] + amount
end
local answer = {refused}
for i, key in ipairs(KEYS) do
  local at = 2 + (i - 1) * 4
  local amount = tonumber(ARGV[at + 2])
  if refused > 0 then
    answer[i + 1] = tostring(before[i])
  else
    if ARGV[at + 1] == 'held' then
      hold(key, holder, amount, lease)
    else
      set_level(key, used[key], tonumber(ARGV[at + 3]))
    end
    answer[i + 1] = tostring(used[key])
  end
end
return answer
"""
)

SETTLE = (
    _NOW
    + """
-- ARGV for each key: kind, holder, amount, rate per ms
for i, key in ipairs(KEYS) do
  local at = (i - 1) * 4
  local holder, amount, rate = ARGV[at + 2], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  if ARGV[at + 1] == 'held' then
    for unit = 1, amount do redis.call('ZREM', key, holder .. '/' .. unit) end
  else
    set_level(key, level(key, rate) - amount, rate)
  end
end
return 1
"""
)

RENEW = (
    _NOW
    + """
-- ARGV: lease in ms, then for each key: holder, amount
for i, key in ipairs(KEYS) do
  local at = 1 + (i - 1) * 2
  hold(key, ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[1]))
end
return 1
"""
)
