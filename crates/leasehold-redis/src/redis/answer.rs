//! The scripts, and the parsing of their replies.

use leasehold_core::kit::locked;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::Value;

use super::connection::Script;
use leasehold_core::store::{
    ClaimInfo, ClaimState, Converted, Joined, LockInfo, Place, Renewal, mismatch,
};
use leasehold_core::{Claim, Error, ErrorKind, Holder, HolderInfo, Kind, Name, Result, Token};

/// Scripts, each of which is one atomic step.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) join_mutex: Arc<Script>,
    pub(super) join_shared: Arc<Script>,
    pub(super) renew: Arc<Script>,
    pub(super) beat: Arc<Script>,
    pub(super) leave_mutex: Arc<Script>,
    pub(super) leave_shared: Arc<Script>,
    pub(super) convert: Arc<Script>,
    pub(super) evict: Arc<Script>,
    pub(super) read: Arc<Script>,
}

macro_rules! script {
    ($($file:literal),+) => {
        Arc::new(Script::new(concat!($(include_str!(concat!("scripts/", $file, ".lua")), "\n"),+)))
    };
}

/// Builds a script from the shared functions and this file, without a fast path for the common
/// cases.
macro_rules! common {
    ($file:literal) => {
        script!("restart", "clock", "companions", "grant", "common", $file)
    };
}

impl Scripts {
    /// Creates the scripts. With them, a server grants no lock for `restart_delay` after its start.
    pub(super) fn new(restart_delay: Duration) -> Self {
        let started = |script: Arc<Script>| match restart_delay {
            Duration::ZERO => script,
            delay => Arc::new(script.with("local RESTART = 0", &restart_line(delay))),
        };
        Self {
            join_mutex: started(script!(
                "restart",
                "clock",
                "companions",
                "join_mutex",
                "grant",
                "common",
                "join_mutex_queue"
            )),
            join_shared: started(common!("join_shared")),
            renew: script!("renew"),
            beat: started(common!("beat")),
            leave_mutex: started(script!(
                "restart",
                "clock",
                "grant",
                "leave_mutex",
                "companions",
                "common",
                "leave_mutex_queue"
            )),
            leave_shared: started(common!("leave_shared")),
            convert: started(common!("convert")),
            evict: started(common!("evict")),
            read: started(common!("read")),
        }
    }
}

#[cfg(test)]
impl Scripts {
    /// Returns the scripts to acquire and release a mutex that contain only the general code.
    pub(super) fn without_the_usual() -> (Arc<Script>, Arc<Script>) {
        (common!("join_mutex_queue"), common!("leave_mutex_queue"))
    }
}

fn restart_line(delay: Duration) -> String {
    format!("local RESTART = {}", millis(delay))
}

/// Converts a duration to milliseconds, rounded up, and at most a year.
pub(super) fn millis(d: Duration) -> u64 {
    const YEAR: u64 = 365 * 86_400_000;
    u64::try_from(d.as_micros().div_ceil(1_000)).unwrap_or(YEAR).min(YEAR)
}

pub(super) fn micros(d: Duration) -> u64 {
    const YEAR: u64 = 365 * 86_400_000_000;
    u64::try_from(d.as_micros()).unwrap_or(YEAR).min(YEAR)
}

/// Returns the word for a kind in the scripts.
pub(super) fn kind_word(kind: Kind) -> &'static str {
    match kind {
        Kind::Mutex => "mutex",
        Kind::RwLock => "rwlock",
        Kind::Semaphore => "semaphore",
    }
}

fn kind_of(word: &str) -> Option<Kind> {
    [Kind::Mutex, Kind::RwLock, Kind::Semaphore].into_iter().find(|k| kind_word(*k) == word)
}

/// Cache of a holder's JSON. It keeps only the last one, because nearly all claims of a client have
/// the same holder.
#[derive(Debug, Default)]
pub(super) struct HolderCache(Mutex<Option<(Arc<Holder>, Arc<str>)>>);

impl HolderCache {
    pub(super) fn text(&self, holder: &Arc<Holder>) -> Arc<str> {
        let mut last = locked(&self.0);
        match &*last {
            Some((known, text)) if Arc::ptr_eq(known, holder) => text.clone(),
            _ => {
                let text: Arc<str> = serde_json::to_string(&**holder).unwrap_or_default().into();
                *last = Some((holder.clone(), text.clone()));
                text
            }
        }
    }
}

fn who(text: &str) -> Holder {
    serde_json::from_str(text).unwrap_or_else(|_| Holder {
        host: foreigner(text).into(),
        pid: 0,
        label: String::new(),
    })
}

fn out_of_step() -> Error {
    let what = "unexpected reply to a leasehold script";
    let hint =
        "check that the server is Redis 6 or later, or Valkey; if it is, report this as a bug";
    Error::new(ErrorKind::Corrupt, what).with_hint(hint)
}

/// Describes the owner of a foreign key. `word` is the kind of the key's value, as the scripts
/// return it.
fn foreigner(word: &str) -> &'static str {
    match word {
        "redisson" => "a Redisson client",
        _ => "a client of another library",
    }
}

/// Returns the error for a foreign key that never expires, for which a client could wait forever.
/// The key may be a held lock, so the hint never suggests anything that would break it.
fn endless(name: &Name, word: &str) -> Error {
    let (what, hint) = match word {
        "redisson" => (
            "held by a Redisson client in a key that never expires, so waiting could take forever",
            "release it in that client, or use another lock name",
        ),
        "number" => (
            "the key of this lock holds a number that never expires, such as a counter or a \
             Redisson semaphore",
            "use another lock name, or add ?prefix=… to the URL",
        ),
        _ => (
            "the key of this lock was set by a client of another library and never expires, so \
             waiting could take forever",
            "make that client set an expiry (SET NX PX), or use another lock name",
        ),
    };
    Error::new(ErrorKind::Corrupt, what).with_hint(hint).with_lock(name)
}

/// Returns the error for a foreign key that `evict` does not delete.
fn kept(name: &Name, word: &str, left: i64) -> Error {
    let (what, hint) = match (word, left) {
        ("redisson", _) => (
            "held by a Redisson client, which would not notice an eviction; nothing was deleted",
            "release the lock in that client",
        ),
        ("number", _) => (
            "the key of this lock holds a number that never expires, such as a counter or a \
             Redisson semaphore; nothing was deleted",
            "use another lock name, or add ?prefix=… to the URL",
        ),
        (_, -1) => (
            "the key of this lock was set by another program and never expires; nothing was \
             deleted",
            "find out whether that program still uses the key before you delete it",
        ),
        _ => (
            "the key of this lock may hold another program's data: its value has neither \
             leasehold's format nor that of SET NX PX locks; nothing was deleted",
            "find the program that wrote the key, or use another lock name",
        ),
    };
    Error::new(ErrorKind::Corrupt, what).with_hint(hint).with_lock(name)
}

fn held_by_foreigner(name: &Name, word: &str, left: Duration) -> Error {
    let what = format!("held by {}; its key expires in {} s", foreigner(word), left.as_secs() + 1);
    let hint = "retry later, or call lock() to wait";
    Error::new(ErrorKind::Contended, what).with_hint(hint).with_lock(name)
}

fn just_started(name: &Name, left: Duration) -> Error {
    let what = format!(
        "the Redis server has just started and may have lost held locks: it grants no lock for \
         another {} s (restart_delay_ms in the URL)",
        left.as_secs() + 1
    );
    Error::new(ErrorKind::Unreachable, what).with_hint("retry later").with_lock(name)
}

fn parts(value: Value) -> Result<Vec<Value>> {
    match value {
        Value::Array(parts) => Ok(parts),
        _ => Err(out_of_step()),
    }
}

fn int(value: Option<&Value>) -> Result<i64> {
    match value {
        Some(Value::Int(n)) => Ok(*n),
        Some(Value::BulkString(bytes)) => {
            let text = std::str::from_utf8(bytes).ok();
            text.and_then(|text| text.parse().ok()).ok_or_else(out_of_step)
        }
        _ => Err(out_of_step()),
    }
}

fn text(value: Option<&Value>) -> Result<&str> {
    match value {
        Some(Value::BulkString(bytes)) => std::str::from_utf8(bytes).map_err(|_| out_of_step()),
        Some(Value::SimpleString(text)) => Ok(text),
        _ => Err(out_of_step()),
    }
}

fn token(value: Option<&Value>) -> Result<Token> {
    let n = u64::try_from(int(value)?).ok();
    n.and_then(Token::new).ok_or_else(out_of_step)
}

/// Parses the reply of the common cases: the holder's token, or three numbers for a waiter. These
/// are the number of claims ahead, the microseconds until the next poll (or -1), and the waiter's
/// token.
fn joined_as_usual(claim: &Claim, answer: &[u8]) -> Result<Joined> {
    let words = std::str::from_utf8(answer).map_err(|_| out_of_step())?.split(' ');
    let mut numbers = words.map(|word| word.parse::<i64>().map_err(|_| out_of_step()));
    let mut number = || numbers.next().transpose();
    let token = |n: i64| u64::try_from(n).ok().and_then(Token::new).ok_or_else(out_of_step);
    match (number()?, number()?, number()?, number()?) {
        (Some(held), None, ..) => Ok(Joined::Holding {
            token: token(held)?,
            remaining: Some(Duration::from_millis(millis(claim.lease))),
        }),
        (Some(ahead), Some(head), Some(drawn), None) => Ok(Joined::Waiting(Place {
            ahead: usize::try_from(ahead).unwrap_or(0),
            head_remaining: u64::try_from(head).ok().map(Duration::from_micros),
            token: Some(token(drawn)?),
        })),
        _ => Err(out_of_step()),
    }
}

fn duration(value: Option<&Value>) -> Result<Duration> {
    Ok(Duration::from_micros(u64::try_from(int(value)?).unwrap_or(0)))
}

fn place(parts: &[Value]) -> Result<Place> {
    let head = int(parts.get(2))?;
    Ok(Place {
        ahead: usize::try_from(int(parts.get(1))?).unwrap_or(0),
        head_remaining: u64::try_from(head).ok().map(Duration::from_micros),
        token: Some(token(parts.get(3))?),
    })
}

pub(super) fn joined(claim: &Claim, value: Value) -> Result<Joined> {
    if let Value::BulkString(answer) = &value {
        return joined_as_usual(claim, answer);
    }
    let parts = parts(value)?;
    match int(parts.first())? {
        0 => Ok(Joined::Holding {
            token: token(parts.get(1))?,
            remaining: Some(duration(parts.get(2))?),
        }),
        1 => Ok(Joined::Waiting(place(&parts)?)),
        2 => {
            let holders = parts.iter().skip(1).map(|part| {
                let mut words = text(Some(part))?.splitn(3, ' ');
                let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
                let (Some(token), Some(age)) = (number().and_then(Token::new), number()) else {
                    return Err(out_of_step());
                };
                let holder = who(words.next().unwrap_or_default());
                Ok(HolderInfo::new(holder, token, Duration::from_micros(age)))
            });
            Ok(Joined::Busy { holders: holders.collect::<Result<_>>()? })
        }
        3 => {
            let kind = kind_of(text(parts.get(1))?).ok_or_else(out_of_step)?;
            let capacity = u32::try_from(int(parts.get(2))?).unwrap_or(u32::MAX);
            match parts.get(3) {
                None => Err(mismatch(claim, kind, capacity)),
                word => Err(foreign_mismatch(claim, text(word)?)),
            }
        }
        4 => Err(endless(&claim.name, text(parts.get(1))?)),
        6 => {
            let left = duration(parts.get(2))?;
            Err(held_by_foreigner(&claim.name, text(parts.get(1))?, left))
        }
        7 => Err(just_started(&claim.name, duration(parts.get(1))?)),
        _ => Err(out_of_step()),
    }
}

fn foreign_mismatch(claim: &Claim, word: &str) -> Error {
    let what = format!(
        "the lock was requested as a {}, but its key is held by {}",
        claim.kind,
        foreigner(word)
    );
    let hint = "use another lock name, or add ?prefix=… to the URL";
    Error::new(ErrorKind::Mismatch, what).with_hint(hint).with_lock(&claim.name)
}

/// Parses the reply of `renew.lua`. The result is `None` for a claim that does not hold its main
/// key.
pub(super) fn renewed(value: Value) -> Result<Vec<Option<Renewal>>> {
    let numbers = parts(value)?;
    let one = |pair: &[Value]| match int(pair.first())? {
        0 => Ok(None),
        _ => Ok(Some(Renewal::Holding {
            token: token(pair.first())?,
            remaining: Some(duration(pair.get(1))?),
        })),
    };
    numbers.chunks(2).map(one).collect()
}

/// Parses the reply of `beat.lua` for claims on these locks.
pub(super) fn beaten(names: &[&Name], value: Value) -> Result<Vec<Renewal>> {
    let one = |(answer, name): (Value, &&Name)| {
        let parts = parts(answer)?;
        match int(parts.first())? {
            0 => Ok(Renewal::Holding {
                token: token(parts.get(1))?,
                remaining: Some(duration(parts.get(2))?),
            }),
            1 => Ok(Renewal::Waiting(place(&parts)?)),
            4 => Ok(Renewal::unknown(&endless(name, text(parts.get(1))?))),
            5 => Ok(Renewal::Lost),
            _ => Err(out_of_step()),
        }
    };
    let answers = parts(value)?;
    if answers.len() != names.len() {
        return Err(out_of_step());
    }
    answers.into_iter().zip(names).map(one).collect()
}

pub(super) fn number(value: &Value) -> Result<u64> {
    Ok(u64::try_from(int(Some(value))?).unwrap_or(0))
}

/// Parses the reply of `leave_*.lua`: whether the claim was present, and whether to repeat the
/// call, because dead waiters may remain ahead of the next live one.
pub(super) fn left(value: &Value) -> Result<(bool, bool)> {
    let n = number(value)?;
    Ok((n & 1 > 0, n & 2 > 0))
}

/// Parses the reply of `convert.lua`: the result, and whether to repeat the call, because dead
/// claims may remain ahead of one that fits now.
pub(super) fn converted(value: Value) -> Result<(Converted, bool)> {
    let parts = parts(value)?;
    Ok(match int(parts.first())? {
        0 => (Converted::Done { token: token(parts.get(1))? }, int(parts.get(2))? & 2 > 0),
        1 => (Converted::Busy, false),
        2 => (Converted::Lost, false),
        _ => return Err(out_of_step()),
    })
}

/// Parses the reply of `evict.lua`.
pub(super) fn evicted(name: &Name, value: Value) -> Result<usize> {
    if let Value::Array(parts) = &value {
        return Err(kept(name, text(parts.first())?, int(parts.get(1))?));
    }
    Ok(usize::try_from(number(&value)?).unwrap_or(usize::MAX))
}

/// One reply of `read.lua`.
pub(super) struct Page {
    info: LockInfo,
    /// Token after which the next page begins, or `None` if this is the last page.
    pub(super) more: Option<u64>,
}

impl Page {
    pub(super) fn of(name: &Name, value: Value) -> Result<Self> {
        let parts = parts(value)?;
        let more = match text(parts.get(2))? {
            "" => None,
            after => Some(after.parse().map_err(|_| out_of_step())?),
        };
        Ok(Self { info: described(name, &parts)?, more })
    }

    /// Returns the lock if it has any claims.
    pub(super) fn shown(self) -> Option<LockInfo> {
        (!self.info.claims.is_empty()).then_some(self.info)
    }

    /// Appends claims from further back in the queue. Ignores them if the lock's kind or capacity
    /// has changed between the two reads.
    pub(super) fn append(&mut self, later: Self) {
        if self.info.kind == later.info.kind && self.info.capacity == later.info.capacity {
            self.info.claims.extend(later.info.claims);
        }
    }

    /// Removes the waiters that are among these holders. They were granted the lock after the
    /// waiters were read.
    pub(super) fn without(&mut self, holders: &Self) {
        let held: HashSet<_> = holders.info.claims.iter().filter_map(|c| c.token).collect();
        self.info.claims.retain(|c| c.token.is_none_or(|token| !held.contains(&token)));
    }
}

fn described(name: &Name, parts: &[Value]) -> Result<LockInfo> {
    let kind = kind_of(text(parts.first())?).ok_or_else(out_of_step)?;
    let capacity = u32::try_from(int(parts.get(1))?).unwrap_or(u32::MAX);
    let one = |cells: &[Value]| {
        let claim_state = match text(cells.first())? {
            "h" => ClaimState::Holding,
            "w" => ClaimState::Waiting,
            _ => ClaimState::Cooldown,
        };
        let token = u64::try_from(int(cells.get(1))?).ok().and_then(Token::new);
        let weight = u32::try_from(int(cells.get(2))?).unwrap_or(u32::MAX);
        let since = duration(cells.get(3))?;
        let left = u64::try_from(int(cells.get(4))?).ok().map(Duration::from_micros);
        let holder = who(text(cells.get(5))?);
        Ok(ClaimInfo::new(claim_state, holder, token, weight, since, left))
    };
    let claims = parts.get(3..).unwrap_or_default().chunks(6).map(one);
    Ok(LockInfo::new(name.clone(), kind, capacity, claims.collect::<Result<Vec<_>>>()?))
}

/// Returns whether a main key's value begins like a leasehold claim: 32 hexadecimal digits, then a
/// blank or `!`.
pub(super) fn is_ours(start: &[u8]) -> bool {
    let (id, rest) = start.split_at_checked(32).unwrap_or((start, &[]));
    id.len() == 32 && id.iter().all(u8::is_ascii_hexdigit) && matches!(rest, [b' ' | b'!', ..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_reply_is_parsed_or_refused_in_one_line(answer in values(&[
            "17 3 host 4 label", "mutex", "semaphore", "", "string",
        ])) {
            let name = Name::new("x").unwrap();
            let claim = Claim::new(name.clone(), Kind::Semaphore, 1, 2).unwrap();
            let refused = [
                joined(&claim, answer.clone()).err(),
                renewed(answer.clone()).err(),
                beaten(&[&name, &name], answer.clone()).err(),
                number(&answer).err(),
                left(&answer).err(),
                converted(answer.clone()).err(),
                evicted(&name, answer.clone()).err(),
                Page::of(&name, answer).map(Page::shown).err(),
            ];
            for error in refused.into_iter().flatten() {
                prop_assert_eq!(format!("{error:#}").lines().count(), 1);
            }
        }
    }
}
