//! What a node does in one atomic step, in Lua. The rules are those of [`round::Node`]; a test
//! compares the two.
//!
//! # The keys
//! - *the main key*, the prefix and the lock's name: byte for byte what every Redlock client sets.
//!   It alone says whose the node's vote is. Ours is the claim's id, a point, and the number of the
//!   attempt, so that a late release of an earlier attempt cannot touch a later one.
//! - *the record*: the last token for the name, and who holds, for people. It counts as the holder's
//!   only if its id is the main key's value. It outlives the lock by [`MEMORY`], so that a name that
//!   is used again does not depend on others' tokens: see the next.
//! - *the memory*, one for the node: the highest token stored for any name (`cur`), what it was told
//!   when it had forgotten (`told`), and in which run of the server all this was so (`run`); also
//!   since when another run is known to have forgotten (`since`, `lapsed`). A name
//!   without a record has a token of at most `cur`. So tokens rise over names that were not used for
//!   years, though nothing is kept for each, however the server's clock is stepped. The price is a
//!   second round trip where a name has no record and another client, whose clock is ahead, has just
//!   taken another name.
//! - *who waits*, by since when, and until when each counts as alive.
//!
//! # Who is told is kept the node for
//! A node that is freed while somebody waits tells the one who has waited longest, and *keeps* itself
//! for it: the main key is that claim's, as if by an attempt number 0, for [`KEPT`]. So who has just released
//! does not take the node again before the message has arrived: newcomers, and other clients of the
//! recipe, find it taken. Whoever *waits* at the node may take it all the same: nodes may disagree about
//! who has waited longest, and then nobody would get a majority of what is kept.
//! - *It is no vote*: no attempt has the number 0, so nobody counts it, extends it or holds by it; for the
//!   tokens it does not exist.
//! - *Who is told and does not come* (it died, or the message was lost and it asks again later) costs
//!   newcomers that time, once: it counts as alive for [`SOON`] at the most then, until it asks again, at the place
//!   that it had, since it says for how long it has waited.
//! - *Who leaves* deletes what was kept for it, and the next is told.
//! - *Where there is no room* for it nothing is kept: the release must not fail of that.
//!
//! # What is usual
//! A free key, a proposal above all that the node has stored, and nobody who waits: that needs eleven
//! commands for a pair, and comes first in the scripts ([`TAKE_FREE`], [`RELEASE_ALONE`]); what is not so
//! has changed nothing by then, and goes on to the rest, which can do everything.
//! - *The record need not be read*: whatever is stored raises `cur` as well, so a proposal above `cur` is
//!   above every name's last token. (A record may be older than a memory that was lost. Who stored its
//!   token has had its lease's time since, as the delay is longer, and the memory was told of every token
//!   that was complete: it is as if the record had gone too.)
//! - *SET NX* looks and takes in one. Refused, or without room for it, it has written nothing.
//! - *Who waits* is one look at the first of them: where there is none, there is nobody to be taken out or
//!   told. Whoever comes to wait later finds the key free.
//! - *The record is left as it is by a release*: it counts only while its id is in the main key, and an
//!   attempt that was released is never made again.
//!
//! A lost reply, a client that dies and a call that is dropped are as before: it is still one script.
//!
//! # The server's run
//! A restart may lose data, so a vote counts only in the run of the server in which the memory was
//! kept. `INFO` in every script would tell, but costs more than all the rest. Instead the script that
//! votes has the run's id in its text: after a restart no server knows it (NOSCRIPT), and the client
//! looks anew. (Redis 6 may, from a snapshot; it does not tell its version to scripts either, so there
//! `INFO` is asked all the same.) It is put into the server by a call that compares the id with `INFO`'s in the same
//! atomic step, and makes the memory invalid if they differ.
//!
//! # How long a node that has forgotten does not vote
//! Not only who restarted has forgotten: so has who was emptied, who was restored from a copy, or a
//! replica that was promoted, and these have been up for long. So the first client that meets a run
//! which does not remember writes down when that was, and the node is told what it missed (`TELL`)
//! only when the delay has passed since then, whoever tells it. Its own age counts instead only where
//! a client can be certain that nothing but its start took its memory (see [`super::memory`]).
//!
//! [`round::Node`]: super::round::Node

use redis::Value;

use crate::redis::connection::Script;

/// For how many milliseconds the record outlives the lock.
pub(super) const MEMORY: u64 = 120_000;
/// For how many milliseconds a node is kept for who was told: a message and a request, also from afar.
const KEPT: u64 = 200;
/// For how many more milliseconds who was told counts as alive, until it asks.
const SOON: u64 = 1_000;
/// What is read where the key of a lock's name is something else.
pub(super) const NO_LOCK: &str = "no lock";

/// What several scripts begin with.
const COMMON: &str = r"
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local function owner(value)
  if not value then return nil end
  return string.match(value, '^(%x+)%.(%d+)$')
end
local function run()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end
-- What the node remembers of the name's tokens, and of all names'.
local function last(memory, record)
  local m = redis.call('HMGET', memory, 'cur', 'told')
  local cur, told = tonumber(m[1] or 0), tonumber(m[2] or 0)
  local own = redis.call('HGET', record, 'last')
  return math.max(own and tonumber(own) or cur, told), cur
end
-- Since when this run of the server is known to have forgotten, in µs; from now on if nobody knew.
local function lapsed(memory, current, at)
  local m = redis.call('HMGET', memory, 'lapsed', 'since')
  local since = tonumber(m[2] or 0)
  if m[1] ~= current or since > at then
    since = at
    redis.call('HSET', memory, 'lapsed', current, 'since', at)
  end
  return since
end
-- Tells the one who has waited longest, of those who seem to be alive, that the node is free, and keeps
-- it for that one.
local function wake(main, waiting, alive, at)
  local ms = math.floor(at / 1000)
  local dead = redis.call('ZRANGEBYSCORE', alive, '-inf', ms, 'LIMIT', 0, 100)
  for _, who in ipairs(dead) do
    redis.call('ZREM', alive, who)
    redis.call('ZREM', waiting, who)
  end
  local first = redis.call('ZRANGE', waiting, 0, 0)[1]
  if first then
    local id, channel = string.match(first, '^(%x+) (%S+) ')
    if not channel then return end
    redis.pcall('SET', main, id .. '.0', 'NX', 'PX', KEPT)
    local ends = redis.call('ZSCORE', alive, first)
    if ends and tonumber(ends) > ms + SOON then redis.pcall('ZADD', alive, ms + SOON, first) end
    redis.call('PUBLISH', channel, id)
  end
end
-- Whether the node is only kept for somebody.
local function is_kept(value)
  local _, number = owner(value)
  return number == '0'
end
";

/// A key that is free, and a proposal above all that the node has stored: what nearly every vote is, so
/// it comes before all that [`TAKE`] needs. What it stores is what that would; where it cannot it has
/// written nothing, and leaves everything to that. Who asks for the first time does not wait here yet.
const TAKE_FREE: &str = r"
local known = ARGV[1] == 'take' and redis.REDIS_VERSION_NUM and redis.call('HMGET', KEYS[3], 'run', 'cur', 'told')
if known and known[1] == RUN then
  local mine, proposal = ARGV[2] .. '.' .. ARGV[3], ARGV[5]
  local new = tonumber(proposal)
  local set = new > tonumber(known[2] or 0) and new > tonumber(known[3] or 0)
    and redis.pcall('SET', KEYS[1], mine, 'NX', 'PX', ARGV[4])
  if set and set.ok then
    redis.call('HSET', KEYS[3], 'cur', proposal)
    if ARGV[8] and ARGV[3] ~= '1' then
      redis.call('ZREM', KEYS[4], ARGV[8])
      redis.call('ZREM', KEYS[5], ARGV[8])
    end
    local t = redis.call('TIME')
    redis.call('HSET', KEYS[2], 'id', mine, 'last', proposal, 'token', proposal, 'holder', ARGV[6],
      'since', t[1] .. string.sub('00000' .. t[2], -6, -4))
    redis.call('PEXPIRE', KEYS[2], ARGV[7])
    return 'stored'
  end
end
";

/// KEYS: main, record, memory, waiting, alive. ARGV: `check` and nothing else, or
/// `take`, claim, attempt, lease ms, proposal, holder, for how many ms the record is kept, then for who waits: entry, for how
/// many ms it has waited, for how many ms from now it counts as alive.
const TAKE: &str = r"
if ARGV[1] == 'check' then
  if run() ~= RUN then
    redis.call('HDEL', KEYS[1], 'run')
    return 'CHANGED'
  end
  if redis.call('HGET', KEYS[1], 'run') ~= RUN then lapsed(KEYS[1], RUN, now()) end
  return 'OK'
end
if redis.call('HGET', KEYS[3], 'run') ~= RUN then return {'forgot'} end
-- Redis before 7 keeps scripts in its snapshots if it ever had a replica.
if not redis.REDIS_VERSION_NUM and run() ~= RUN then return {'forgot'} end
local at = now()
local value = redis.call('GET', KEYS[1])
if value then
  local claim, number = owner(value)
  local waits_here = is_kept(value) and ARGV[8] and redis.call('ZSCORE', KEYS[4], ARGV[8])
  if not waits_here and (claim ~= ARGV[2] or tonumber(number) > tonumber(ARGV[3])) then
    local ahead = 0
    if ARGV[8] then
      local ms = math.floor(at / 1000) + tonumber(ARGV[10])
      local since = math.floor(at / 1000) - tonumber(ARGV[9])
      redis.call('ZADD', KEYS[4], 'NX', since, ARGV[8])
      redis.call('ZADD', KEYS[5], ms, ARGV[8])
      redis.call('PEXPIREAT', KEYS[4], ms)
      redis.call('PEXPIREAT', KEYS[5], ms)
      ahead = redis.call('ZRANK', KEYS[4], ARGV[8]) or 0
    end
    local r = redis.call('HMGET', KEYS[2], 'id', 'token', 'holder', 'since', 'last')
    local holder = r[1] == value
    return {'busy', value, redis.call('PTTL', KEYS[1]), ahead, tonumber(r[5] or 0),
      holder and tonumber(r[2]) or 0, holder and r[3] or '',
      holder and math.max(0, math.floor(at / 1000) - tonumber(r[4])) or 0}
  end
end
local mine = ARGV[2] .. '.' .. ARGV[3]
redis.call('SET', KEYS[1], mine, 'PX', ARGV[4])
if ARGV[8] then
  redis.call('ZREM', KEYS[4], ARGV[8])
  redis.call('ZREM', KEYS[5], ARGV[8])
end
local highest, cur = last(KEYS[3], KEYS[2])
local proposal = tonumber(ARGV[5])
local stored = proposal > highest
if stored then
  highest = proposal
  if proposal > cur then redis.call('HSET', KEYS[3], 'cur', proposal) end
end
redis.call('HSET', KEYS[2], 'id', mine, 'last', highest, 'token', stored and proposal or 0,
  'holder', ARGV[6], 'since', math.floor(at / 1000))
redis.call('PEXPIRE', KEYS[2], ARGV[7])
return {'granted', stored and 1 or 0, highest}
";

/// KEYS: main, record, memory. ARGV: value, token.
const WRITE_BACK: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {0, 0} end
local token = tonumber(ARGV[2])
local highest, cur = last(KEYS[3], KEYS[2])
if token <= highest then return {0, highest} end
redis.call('HSET', KEYS[2], 'last', token, 'token', token)
if token > cur then redis.call('HSET', KEYS[3], 'cur', token) end
return {1, token}
";

/// KEYS: main, record. ARGV: value, lease ms. 1: extended, 0: free, -1: another's.
const EXTEND: &str = r"
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
if value ~= ARGV[1] then return -1 end
local lease = tonumber(ARGV[2])
if redis.call('PTTL', KEYS[1]) < lease then redis.call('PEXPIRE', KEYS[1], lease) end
if redis.call('PTTL', KEYS[2]) < lease + MEMORY then
  redis.call('PEXPIRE', KEYS[2], lease + MEMORY)
end
return 1
";

/// KEYS: main, record. ARGV: value, lease ms, token, holder.
const HEAL: &str = r"
local lease = tonumber(ARGV[2])
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', lease) then return 0 end
redis.call('HSET', KEYS[2], 'id', ARGV[1], 'token', ARGV[3], 'holder', ARGV[4],
  'since', math.floor(now() / 1000))
redis.call('PEXPIRE', KEYS[2], lease + MEMORY)
return 1
";

/// A release while nobody waits, before all that [`RELEASE`] needs. The record stays: who holds by it
/// counts only while the main key has its id, and the name's last token is needed.
const RELEASE_ALONE: &str = r"
if not redis.call('ZRANGE', KEYS[3], 0, 0)[1] then
  local claim, number = string.match(redis.call('GET', KEYS[1]) or '', '^(%x+)%.(%d+)$')
  if claim ~= ARGV[1] or tonumber(number) > tonumber(ARGV[2]) then return 0 end
  return redis.call('DEL', KEYS[1])
end
";

/// KEYS: main, record, waiting, alive. ARGV: claim, last attempt to release, entry of who waited or
/// nothing.
const RELEASE: &str = r"
if ARGV[3] then
  redis.call('ZREM', KEYS[3], ARGV[3])
  redis.call('ZREM', KEYS[4], ARGV[3])
end
local claim, number = owner(redis.call('GET', KEYS[1]))
if claim ~= ARGV[1] or tonumber(number) > tonumber(ARGV[2]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], 'id', 'token', 'holder', 'since')
wake(KEYS[1], KEYS[3], KEYS[4], now())
return 1
";

/// KEYS: main, record, waiting, alive. ARGV: value, or nothing for whatever is there.
const EVICT: &str = r"
local value = redis.call('GET', KEYS[1])
if not value or is_kept(value) or (ARGV[1] and value ~= ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], 'id', 'token', 'holder', 'since')
wake(KEYS[1], KEYS[3], KEYS[4], now())
return 1
";

/// KEYS: main, record, waiting, alive. Who holds, then who waits: entry and for how many ms. A key of
/// another type is no error here: it must not hide the other locks from who lists them.
const READ: &str = r"
local function read(...)
  local r = redis.pcall(...)
  if type(r) ~= 'table' or not r.err then return r end
  if string.find(r.err, 'WRONGTYPE', 1, true) then return nil, true end
  return redis.call(...)
end
local at = math.floor(now() / 1000)
local value, odd = read('GET', KEYS[1])
if odd then value = NO_LOCK end
if is_kept(value) then value = nil end
local r = read('HMGET', KEYS[2], 'id', 'token', 'holder', 'since') or {}
local holder = value and r[1] == value
local out = {value or '', value and redis.call('PTTL', KEYS[1]) or 0,
  holder and tonumber(r[2]) or 0, holder and r[3] or '',
  holder and math.max(0, at - tonumber(r[4])) or 0}
for _, who in ipairs(read('ZRANGE', KEYS[3], 0, 9999) or {}) do
  local alive, since = read('ZSCORE', KEYS[4], who), redis.call('ZSCORE', KEYS[3], who)
  if alive and tonumber(alive) > at then
    out[#out + 1] = who
    out[#out + 1] = math.max(0, at - tonumber(since))
    out[#out + 1] = tonumber(alive) - at
  end
end
return out
";

/// KEYS: memory. Whether it remembers, the highest token that it knows, its clock, whether it has
/// voted since it was told what it knows.
const KNOWN: &str = r"
local m = redis.call('HMGET', KEYS[1], 'run', 'cur', 'told')
local cur, told = tonumber(m[2] or 0), tonumber(m[3] or 0)
local remembers = m[1] == run()
return {remembers and 1 or 0, math.max(cur, told), now(), remembers and cur > told and 1 or 0}
";

/// KEYS: memory. ARGV: run, token, delay, then for how long the node has certainly forgotten by
/// itself: where it has the memory of another run, and where it has none; all in µs. A node that has
/// forgotten is told, if that is long enough ago. Whether it remembers now; if not, how much longer
/// it does not vote.
const TELL: &str = r"
local current = run()
if current ~= ARGV[1] then return {0, 0} end
local m = redis.call('HMGET', KEYS[1], 'run', 'cur', 'told')
if m[1] == current then return {1, 0} end
local at = now()
local age = tonumber(m[2] and ARGV[4] or ARGV[5])
local left = math.min(lapsed(KEYS[1], current, at), at - age) + tonumber(ARGV[3]) - at
if left > 0 then return {0, left} end
local token = math.max(tonumber(ARGV[2]), tonumber(m[2] or 0), tonumber(m[3] or 0))
redis.call('HSET', KEYS[1], 'run', current, 'cur', token, 'told', token)
redis.call('HDEL', KEYS[1], 'lapsed', 'since')
return {1, 0}
";

/// The scripts that do not vote.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) write_back: Script,
    pub(super) extend: Script,
    pub(super) heal: Script,
    pub(super) release: Script,
    pub(super) evict: Script,
    pub(super) read: Script,
    pub(super) known: Script,
    pub(super) tell: Script,
}

/// A script, whose `usual` case needs nothing of what several share.
fn script(usual: &str, body: &str, run: &str) -> Script {
    keeping(KEPT, usual, body, run)
}

/// The same, where a node is kept for so many milliseconds.
fn keeping(kept: u64, usual: &str, body: &str, run: &str) -> Script {
    let head = format!(
        "local RUN, MEMORY, NO_LOCK, KEPT, SOON = '{run}', {MEMORY}, '{NO_LOCK}', {kept}, {SOON}\n"
    );
    Script::new(format!("{head}{usual}{COMMON}{body}"))
}

/// The script that votes in this run of a server, which is 40 hexadecimal digits.
pub(super) fn take(run: &str) -> Script {
    script(TAKE_FREE, TAKE, run)
}

/// The same as a server before Redis 7 runs it.
#[cfg(test)]
pub(super) fn take_of_old(run: &str) -> Script {
    let old = |body: &str| body.replace("redis.REDIS_VERSION_NUM", "redis.NOT_THERE");
    script(&old(TAKE_FREE), &old(TAKE), run)
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self::keeping(KEPT)
    }

    /// Where a node is kept for so many milliseconds.
    pub(super) fn keeping(kept: u64) -> Self {
        let plain = |body| keeping(kept, "", body, "");
        Self {
            write_back: plain(WRITE_BACK),
            extend: plain(EXTEND),
            heal: plain(HEAL),
            release: keeping(kept, RELEASE_ALONE, RELEASE, ""),
            evict: plain(EVICT),
            read: plain(READ),
            known: plain(KNOWN),
            tell: plain(TELL),
        }
    }
}

/// Walks through the elements of an answer.
pub(super) struct Elements(std::vec::IntoIter<Value>);

impl Elements {
    pub(super) fn of(value: Value) -> Self {
        match value {
            Value::Array(all) => Self(all.into_iter()),
            one => Self(vec![one].into_iter()),
        }
    }

    pub(super) fn number(&mut self) -> Option<i64> {
        match self.0.next()? {
            Value::Int(n) => Some(n),
            _ => None,
        }
    }

    /// A number that is not negative.
    pub(super) fn natural(&mut self) -> Option<u64> {
        u64::try_from(self.number()?).ok()
    }

    pub(super) fn text(&mut self) -> Option<String> {
        match self.0.next()? {
            Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
            Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
            Value::Okay => Some("OK".into()),
            _ => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }
}
