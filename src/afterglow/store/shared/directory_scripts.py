"""Programs that a directory runs, each in one call. They are sent whole: a server that was restarted knows none.

All names hold the id of the object store (see `directory_names`).

whole:MODEL          `RUN EVICTED` (see `STATE`), there while the directory has all of a model's extents: those of that run of the server
MODEL/extent/ID      `KEY-FOLDER/NAME PARENT USED HASHES`, gone when the extent expires: where in the store it is listed, since when (seconds since
                     1970), and the blocks that lead to it
MODEL/block/HASH     ids of the extents that are found under a beginning (see `plan.prefix.block_keys`), by when they were last used
"""

from __future__ import annotations

from typing import Final

FIND: Final = """
-- KEYS: whole  ARGV: prefix, most ids of a block, how many blocks may lead nowhere, the row from which parents matter, the ids after which
-- it ends, hashes: 32 digits each, one after another, since a long prompt's would be hundreds of arguments
-- returns the seconds for which the directory has all, the number of blocks that were looked for (0: no more need be), then entries
-- without their hashes, each with the number of the last block that leads to it; 0: a child alone does
local whole, about = redis.pcall('GET', KEYS[1]), redis.pcall('INFO', 'server')
if type(whole) == 'table' then redis.call('DEL', KEYS[1]) end -- no text, so damaged: the next copy writes it anew
if type(whole) ~= 'string' then return false end
local run = type(about) == 'string' and string.match(about, 'run_id:(%S+)') or '-'
if string.match(whole, '^%S+') ~= run then return false end -- it was restarted, perhaps from an old snapshot
local prefix, row = ARGV[1], tonumber(ARGV[4])
local hashes, most, read = ARGV[6], tonumber(ARGV[5]), 0
local found, places = {redis.call('TTL', KEYS[1]), #hashes / 32}, {}
local function take(id, block)
  local place = places[id]
  if place == nil then
    local entry = redis.pcall('GET', prefix .. 'extent/' .. id)
    places[id] = 0
    entry = type(entry) == 'string' and string.match(entry, '^%S+ %S+ %S+')
    if not entry then return false end
    found[#found + 1] = entry
    found[#found + 1] = block
    places[id] = #found
    local first, parent = string.match(entry, '%-(%d+)%-%d+%-%d+ (%x+) ')
    if first and tonumber(first) > row then take(parent, 0) end
    return true
  end
  if place > 0 and block > found[place] then found[place] = block end
  return place > 0
end
for i = 1, #hashes / 32 do
  local key, leads = prefix .. 'block/' .. string.sub(hashes, 32 * i - 31, 32 * i), false
  local ids = redis.pcall('ZREVRANGE', key, 0, tonumber(ARGV[2]) - 1)
  if ids.err then redis.call('DEL', key) end
  for _, id in ipairs(ids) do
    if take(id, i) then leads = true else redis.call('ZREM', key, id) end
  end
  read = read + #ids
  if not leads and i > tonumber(ARGV[3]) then
    found[2] = 0
    break
  end
  if read >= most then
    found[2] = i
    break
  end
end
return found
"""

STATE: Final = """
-- KEYS: a name of the directory's
-- returns the run of the server, the keys that it has evicted, its memory in bytes (0: all), and what it does when that is full; '-': it
-- does not say
local function info(section, name)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and string.match(text, name .. ':(%S+)') or '-'
end
return {info('server', 'run_id'), info('stats', 'evicted_keys'), info('memory', 'maxmemory'), info('memory', 'maxmemory_policy')}
"""

ADD: Final = """
-- KEYS: the extent's  ARGV: prefix, id, entry, milliseconds that it lives, when it was used, most ids of a block, hashes
-- of two ends of an extent's life the later one holds; clocks may differ by a minute. A block lives as long as what it leads to
local later = tonumber(ARGV[4]) + 60000
local entry = ARGV[3] .. ' ' .. table.concat(ARGV, '', 7)
if redis.call('PTTL', KEYS[1]) < later then redis.call('SET', KEYS[1], entry, 'PX', ARGV[4]) end
for i = 7, #ARGV do
  local block = ARGV[1] .. 'block/' .. ARGV[i]
  redis.call('ZADD', block, ARGV[5], ARGV[2])
  redis.call('ZREMRANGEBYRANK', block, 0, -1 - tonumber(ARGV[6]))
  if redis.call('PTTL', block) < later then redis.call('PEXPIRE', block, later) end
end
return 1
"""

REMOVE: Final = """
-- KEYS: the extent's  ARGV: prefix, id
local entry = redis.pcall('GET', KEYS[1])
redis.call('DEL', KEYS[1])
local hashes = type(entry) == 'string' and string.match(entry, ' (%x+)$') or ''
for hash in string.gmatch(hashes, string.rep('%x', 32)) do redis.pcall('ZREM', ARGV[1] .. 'block/' .. hash, ARGV[2]) end
return 1
"""

TAKE: Final = """
-- a lease that would last longer than any does is damaged
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
local left = redis.call('PTTL', KEYS[1])
if left < 0 or left > tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""

RENEW: Final = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

GIVE_BACK: Final = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
