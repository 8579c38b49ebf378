"""What the Redis index does in one step on the server, in Lua.

Keys, all under one prefix:
- `rows:N`, hashes, a shard by the first byte of the key: first 16 bytes of the key → packed row (redis_rows.py)
- `group:GID`, sets: the fields of a group's rows
- `names`, a hash: gid → name of the group; exactly the groups that have rows
- `marker`, `complete`, `lease`: generation and rebuild (redis.py)
A row begins with the 8 bytes of its gid and ends, from byte 54 on, with its place.
"""

PUT = """
local prefix, shards, a = ARGV[1], tonumber(ARGV[2]), 4 + 2 * tonumber(ARGV[3])
local groups_end = a - 1
while a < #ARGV do
  local field, packed = ARGV[a], ARGV[a + 1]
  local shard = prefix .. 'rows:' .. string.byte(field, 1) % shards
  local gid = string.sub(packed, 1, 8)
  local old = redis.call('HGET', shard, field)
  if not old or string.sub(old, 1, 8) ~= gid then
    redis.call('SADD', prefix .. 'group:' .. gid, field)
  end
  if old and string.sub(old, 1, 8) ~= gid then
    local left = prefix .. 'group:' .. string.sub(old, 1, 8)
    redis.call('SREM', left, field)
    if redis.call('SCARD', left) == 0 then redis.call('HDEL', prefix .. 'names', string.sub(old, 1, 8)) end
  end
  redis.call('HSET', shard, field, packed)
  a = a + 2
end
for i = 4, groups_end, 2 do
  if redis.call('SCARD', prefix .. 'group:' .. ARGV[i]) > 0 then
    redis.call('HSET', prefix .. 'names', ARGV[i], ARGV[i + 1])
  end
end
return 1
"""
"""prefix, shards, number of groups, (gid, name) …, (field, packed row) …"""

REMOVE = """
local prefix, shards, removed = ARGV[1], tonumber(ARGV[2]), 0
for a = 3, #ARGV, 2 do
  local field, wanted = ARGV[a], ARGV[a + 1]
  local shard = prefix .. 'rows:' .. string.byte(field, 1) % shards
  local held = redis.call('HGET', shard, field)
  if held and string.sub(held, 1, 24) .. string.sub(held, 54) == wanted then
    local gid = string.sub(held, 1, 8)
    redis.call('HDEL', shard, field)
    redis.call('SREM', prefix .. 'group:' .. gid, field)
    if redis.call('SCARD', prefix .. 'group:' .. gid) == 0 then redis.call('HDEL', prefix .. 'names', gid) end
    removed = removed + 1
  end
end
return removed
"""
"""prefix, shards, (field, gid ‖ rest of the key ‖ place) …; returns how many still pointed there."""

DROP = """
local prefix, shards, gid = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local group = prefix .. 'group:' .. gid
local fields, answer = redis.call('SPOP', group, tonumber(ARGV[4])), {}
for _, field in ipairs(fields) do
  local shard = prefix .. 'rows:' .. string.byte(field, 1) % shards
  local held = redis.call('HGET', shard, field)
  if held and string.sub(held, 1, 8) == gid then
    redis.call('HDEL', shard, field)
    answer[#answer + 1] = field
    answer[#answer + 1] = held
  end
end
local left = redis.call('SCARD', group)
if left == 0 then redis.call('HDEL', prefix .. 'names', gid) end
return {left, answer}
"""
"""prefix, shards, gid, at most so many rows at once; returns how many are left, and field, packed row, …"""

CLEAR = """
local prefix = ARGV[1]
for _, gid in ipairs(redis.call('HKEYS', prefix .. 'names')) do redis.call('DEL', prefix .. 'group:' .. gid) end
for shard = 0, tonumber(ARGV[2]) - 1 do redis.call('DEL', prefix .. 'rows:' .. shard) end
return redis.call('DEL', prefix .. 'names')
"""

CLAIM = """
local lease = ARGV[1] .. 'lease'
local held = redis.call('GET', lease)
if held and string.sub(held, 1, #ARGV[2]) ~= ARGV[2] then return 0 end
redis.call('SET', lease, ARGV[2] .. ARGV[3], 'PX', ARGV[4])
return 1
"""
"""prefix, owner with a zero byte at its end, run id of the server, milliseconds; returns 1 for the holder."""

FINISH = """
local lease = ARGV[1] .. 'lease'
if redis.call('GET', lease) ~= ARGV[2] .. ARGV[3] then return 0 end
redis.call('SET', ARGV[1] .. 'complete', ARGV[4])
redis.call('DEL', lease)
return 1
"""
"""prefix, owner with its zero byte, run id, generation; 1 if the lease still held and no restart was between."""
