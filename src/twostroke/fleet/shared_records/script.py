"""The Lua script that Redis runs for each batch of a router: the whole batch, or nothing.

Everything that routers share has keys that begin with `PREFIX`:

| key | type | content |
|---|---|---|
| `identity` | text | a random word; if it is missing, or all keys are, the data were removed |
| `begun` | text | exists for `BEGUN_S` after a command or router has written to an empty store |
| `keys`, `last-used` | hash | an API key's record, and the minute of its last use, by its id |
| `change` | text | another random word after each change of the API keys |
| `usage:DAY`, `usage-days` | hash, set | counts of requests and tokens, and the days with any |
| `limits:ID` | hash | the levels of a key's buckets, and what each router's requests hold |
| `costs:DAY`, `cost-days` | hash, set | costs by owner, and the days with any |
| `cost-sums:DAY` | hash | sums of a day's costs by account, which is an upstream with a currency |
| `reserved` | hash | the most that a router's requests may cost, and when: by router and account |
| `lease:ROUTER` | text | exists while the router lives, and for `LEASE_MS` longer |
| `routers` | hash | digests of each router's own keys and of its secret |
| `written:ROUTER` | hash | the numbers of the router's newest batch, and of its newest usage |

A router sends one batch after another. A batch has a number, and is ignored if a later batch has
been run: it may arrive late, over a connection that the router has given up. Its usage has a number
of its own: a router that does not know whether its usage was added sends it again with the same
number, and it is added once.

Counts of open requests and of held tokens are changed by one request after another. If the lease
has ended, or the data were removed, the batch does nothing, and the reply says so: the router then
sends a batch with `sync`, which sets its counts. When the lease of a router has ended, its keys get
back the turns and tokens that its requests hold. The costs that it has reserved stay reserved on
that day, since the vendor may charge for its requests. If the router comes back, it sets them anew;
a router that stops has set them to 0.

If a store has just begun, and a router knows another identity, the router concludes that the data
were removed, and adds its keys, even if `twostroke keys add` was quicker than the router.

A script that ends with an error keeps the writes that it has done. So the types of all entries are
checked before the first write, with the right to use the commands that add counts. An entry of
limits that is damaged is removed, with all leases: every router then sets its counts again.

All times are times of the Redis server, so that the clocks of routers do not matter.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "twostroke:router:"
LEASE_MS: Final = 3000
BEGUN_S: Final = 60
SCRIPT: Final = """
local prefix = KEYS[1]
local batch = cjson.decode(ARGV[1])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local now_text = string.format('%.6f', now)
local lease = prefix .. 'lease:' .. batch.router
local written = prefix .. 'written:' .. batch.router
local tolerance = 0.000001
local week_s, day_s = 604800, 86400

-- Damaged entries.
local expected_types = {
    [prefix .. 'identity'] = 'string', [prefix .. 'begun'] = 'string',
    [prefix .. 'change'] = 'string', [prefix .. 'keys'] = 'hash', [prefix .. 'routers'] = 'hash',
    [prefix .. 'reserved'] = 'hash', [prefix .. 'last-used'] = 'hash',
    [prefix .. 'usage-days'] = 'set', [prefix .. 'cost-days'] = 'set',
    [lease] = 'string', [written] = 'hash',
}
for _, row in ipairs(batch.usage and batch.usage.rows or {}) do
    expected_types[prefix .. 'usage:' .. row[1]] = 'hash'
end
for _, row in ipairs(batch.usage and batch.usage.costs or {}) do
    expected_types[prefix .. 'costs:' .. row[1]] = 'hash'
    expected_types[prefix .. 'cost-sums:' .. row[1]] = 'hash'
end
if batch.spending then
    expected_types[prefix .. 'cost-sums:' .. batch.spending.day] = 'hash'
end
for name, type in pairs(expected_types) do
    local present = redis.call('TYPE', name).ok
    if present ~= 'none' and present ~= type then
        local entry = string.sub(name, #prefix + 1)
        local reason = 'its entry %s is damaged: restore a backup, or delete the entry'
        return redis.error_reply(string.format(reason, entry))
    end
end

local function read(name)
    local fields, state = redis.call('HGETALL', name), {}
    for index = 1, #fields, 2 do
        state[fields[index]] = tonumber(fields[index + 1]) or 0 / 0
    end
    return state
end

local function is_damaged(name)
    local present = redis.call('TYPE', name).ok
    if present == 'none' then
        return false
    end
    if present ~= 'hash' then
        return true
    end
    local state = read(name)
    for _, value in pairs(state) do
        if value ~= value or math.abs(value) > 1e18 then
            return true
        end
    end
    local has_requests = state['requests:level'] and state['requests:size']
    local has_tokens = state['tokens:level'] and state['tokens:size']
    return not (state.at and has_requests and has_tokens)
end

local damaged = {}
for _, op in ipairs(batch.ops) do
    local name = prefix .. 'limits:' .. op.key
    if is_damaged(name) then
        redis.call('DEL', name)
        damaged[#damaged + 1] = op.key
    end
end
if #damaged > 0 then
    for _, router in ipairs(redis.call('HKEYS', prefix .. 'routers')) do
        redis.call('DEL', prefix .. 'lease:' .. router)
    end
    return {now_text, 0, damaged}
end

local identity = redis.call('GET', prefix .. 'identity')
local is_late = (tonumber(redis.call('HGET', written, 'batch') or 0) or 0) >= batch.number
-- A key is never deleted. If all are missing, a router that started with an empty store may have
-- been the first to write after the data were removed.
local are_keys_missing = batch.num_keys > 0 and redis.call('EXISTS', prefix .. 'keys') == 0
local needs_sync = not identity or are_keys_missing or redis.call('EXISTS', lease) == 0
if is_late or (needs_sync and not batch.sync) then
    return {now_text, 0, {}}
end

-- The first write: a server that is full, or a replica, refuses the whole batch here.
redis.call('SET', lease, '1', 'PX', batch.lease_ms)
redis.call('HSET', written, 'batch', string.format('%.0f', batch.number))
redis.call('EXPIRE', written, week_s)
redis.call('HINCRBY', written, 'usage', 0)
local was_removed = 0
local has_begun = batch.sync and redis.call('EXISTS', prefix .. 'begun') == 1
local is_new = has_begun and batch.known_identity ~= '' and batch.known_identity ~= identity
if not identity or are_keys_missing or is_new then
    if not identity and batch.known_identity == '' then
        redis.call('SET', prefix .. 'begun', '1', 'EX', batch.begun_s)
    end
    identity, was_removed = identity or batch.identity, 1
    redis.call('SET', prefix .. 'identity', identity)
    for id, record in pairs(batch.keys) do
        redis.call('HSETNX', prefix .. 'keys', id, record)
    end
    redis.call('SET', prefix .. 'change', 'restored by ' .. batch.router)
end
if batch.sync then
    redis.call('HSET', prefix .. 'routers', batch.router, batch.digests)
end

-- Sums of costs that were removed or are damaged are set to the sums that a router knows.
local spending = batch.spending
local cost_sums = spending and prefix .. 'cost-sums:' .. spending.day
if spending then
    for field, count in pairs(spending.sums) do
        local sum = tonumber(redis.call('HGET', cost_sums, field) or 0) or -1
        if sum < tonumber(count) then
            redis.call('HSET', cost_sums, field, count)
        end
    end
end

-- Usage.
local usage = batch.usage
if usage and tonumber(redis.call('HGET', written, 'usage') or 0) < usage.number then
    for _, row in ipairs(usage.rows) do
        redis.call('SADD', prefix .. 'usage-days', row[1])
    end
    redis.call('HSET', written, 'usage', string.format('%.0f', usage.number))
    for _, row in ipairs(usage.rows) do
        for _, count in ipairs(row[2]) do
            -- An error, such as of a damaged count, must not end a batch that has been begun.
            redis.pcall('HINCRBY', prefix .. 'usage:' .. row[1], count[1], count[2])
        end
    end
    for _, row in ipairs(usage.costs or {}) do
        redis.call('SADD', prefix .. 'cost-days', row[1])
        for _, count in ipairs(row[2]) do
            redis.pcall('HINCRBY', prefix .. 'costs:' .. row[1], count[1], count[2])
        end
        for _, count in ipairs(row[3]) do
            redis.pcall('HINCRBY', prefix .. 'cost-sums:' .. row[1], count[1], count[2])
        end
        redis.call('EXPIRE', prefix .. 'cost-sums:' .. row[1], week_s)
    end
    for id, minute in pairs(usage.uses) do
        redis.call('HSET', prefix .. 'last-used', id, minute)
    end
end

-- Limits.
local is_alive = {[batch.router] = true}
local function lives(router)
    if is_alive[router] == nil then
        is_alive[router] = redis.call('EXISTS', prefix .. 'lease:' .. router) == 1
    end
    return is_alive[router]
end

local function write(name, state)
    local fields = {}
    for field, value in pairs(state) do
        fields[#fields + 1] = field
        fields[#fields + 1] = string.format('%.17g', value)
    end
    redis.call('HSET', name, unpack(fields))
    redis.call('EXPIRE', name, day_s)
end

local function refill(state, bucket, size)
    local level, old_size = state[bucket .. ':level'], state[bucket .. ':size']
    if size == 0 or level == nil or old_size == 0 then
        state[bucket .. ':level'], state[bucket .. ':size'] = size, size
        return
    end
    local gained = math.max(0, now - state.at) * old_size / 60
    level = math.min(level + gained, old_size)
    if level > 0 and old_size ~= size then
        level = level * size / old_size
    end
    state[bucket .. ':level'], state[bucket .. ':size'] = level, size
end

local function give_back(name, state)
    local dead = {}
    for field in pairs(state) do
        local router = string.match(field, '^open:(.*)')
        if router and not lives(router) then
            dead[#dead + 1] = router
        end
    end
    for _, router in ipairs(dead) do
        state['tokens:level'] = state['tokens:level'] + (state['held:' .. router] or 0)
        state['open:' .. router], state['held:' .. router] = nil, nil
        redis.call('HDEL', name, 'open:' .. router, 'held:' .. router)
    end
end

local function num_open(state)
    local count = 0
    for field, value in pairs(state) do
        if string.sub(field, 1, 5) == 'open:' then
            count = count + value
        end
    end
    return count
end

local open, held = 'open:' .. batch.router, 'held:' .. batch.router

local function sync(state, op)
    local tokens = state['tokens:level'] + (state[held] or 0) - op.held
    state['tokens:level'] = math.min(tokens, op.levels.tokens or tokens)
    local requests = state['requests:level']
    state['requests:level'] = math.min(requests, op.levels.requests or requests)
    state[open], state[held] = op.open, op.held
    return 'synced'
end

local function admit(state, op)
    for _, bucket in ipairs({'requests', 'tokens'}) do
        if state[bucket .. ':size'] > 0 and state[bucket .. ':level'] < 1 - tolerance then
            return bucket
        end
    end
    if op.parallel > 0 and num_open(state) >= op.parallel then
        return 'parallel'
    end
    if op.kind == 'admit' then
        state['requests:level'] = state['requests:level'] - 1
        state['tokens:level'] = state['tokens:level'] - op.held
        state[open] = (state[open] or 0) + 1
        state[held] = (state[held] or 0) + op.held
        return 'admitted'
    end
    return 'allowed'
end

local function finish(state, op)
    state['requests:level'] = state['requests:level'] - op.requests
    state['tokens:level'] = state['tokens:level'] + op.held - op.used
    state[open] = math.max(0, (state[open] or 0) - op.open)
    state[held] = math.max(0, (state[held] or 0) - op.held)
    return 'ended'
end

local handlers = {sync = sync, admit = admit, check = admit, finish = finish}
local results = {}
for _, op in ipairs(batch.ops) do
    local name = prefix .. 'limits:' .. op.key
    local state = read(name)
    refill(state, 'requests', op.requests_per_minute)
    refill(state, 'tokens', op.tokens_per_minute)
    state.at = now
    give_back(name, state)
    local result = handlers[op.kind](state, op)
    for _, bucket in ipairs({'requests', 'tokens'}) do
        local level = bucket .. ':level'
        state[level] = math.min(state[level], state[bucket .. ':size'])
    end
    write(name, state)
    results[#results + 1] = {
        result,
        string.format('%.6f', state['requests:level']),
        string.format('%.6f', state['tokens:level']),
    }
end

-- Other routers.
local others = {}
local routers = redis.call('HGETALL', prefix .. 'routers')
for index = 1, #routers, 2 do
    if not lives(routers[index]) then
        redis.call('HDEL', prefix .. 'routers', routers[index])
    elseif routers[index] ~= batch.router then
        others[#others + 1] = routers[index + 1]
    end
end

-- Costs that running requests may reach: a router's own, and the sums of the others.
local report = {{}, {}}
if spending then
    local name, sums = prefix .. 'reserved', {}
    local fields = redis.call('HGETALL', name)
    for index = 1, #fields, 2 do
        local router, account = string.match(fields[index], '^(%S+) (.*)$')
        local count, day = string.match(fields[index + 1], '^(%d+) ?(.*)$')
        local nanos = tonumber(count) or 0
        -- The requests of a router that has died may have been charged by the vendor.
        local is_left = nanos > 0 and day == spending.day
        if not router or not (lives(router) or is_left) then
            redis.call('HDEL', name, fields[index])
        elseif router ~= batch.router then
            sums[account] = (sums[account] or 0) + nanos
        end
    end
    for account, nanos in pairs(spending.reserved) do
        redis.call('HSET', name, batch.router .. ' ' .. account, nanos .. ' ' .. spending.day)
    end
    report[1] = redis.call('HGETALL', cost_sums)
    for account, nanos in pairs(sums) do
        table.insert(report[2], account)
        table.insert(report[2], string.format('%.0f', nanos))
    end
end
local change = redis.call('GET', prefix .. 'change') or ''
return {now_text, 1, identity, change, was_removed, others, results, report}
"""
