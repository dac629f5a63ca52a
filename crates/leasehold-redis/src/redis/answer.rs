//! What the scripts are given, and what they answer.

use leasehold_core::kit::locked;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::Value;

use super::connection::Script;
use leasehold_core::store::{
    ClaimInfo, Joined, LockInfo, Place, Renewal, Reweighed, Standing, mismatch,
};
use leasehold_core::{Claim, Error, ErrorKind, Holder, HolderInfo, Kind, Name, Result, Token};

/// The scripts, each one atomic step.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) join_mutex: Arc<Script>,
    pub(super) join_shared: Arc<Script>,
    pub(super) renew: Arc<Script>,
    pub(super) beat: Arc<Script>,
    pub(super) leave_mutex: Arc<Script>,
    pub(super) leave_shared: Arc<Script>,
    pub(super) reweigh: Arc<Script>,
    pub(super) evict: Arc<Script>,
    pub(super) read: Arc<Script>,
}

macro_rules! script {
    ($($file:literal),+) => {
        Arc::new(Script::new(concat!($(include_str!(concat!("scripts/", $file, ".lua")), "\n"),+)))
    };
}

/// A script that has no usual case that comes before all others.
macro_rules! common {
    ($file:literal) => {
        script!("restart", "clock", "companions", "grant", "common", $file)
    };
}

impl Scripts {
    /// Scripts by which a server lets nobody in for so long after its start.
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
            reweigh: started(common!("reweigh")),
            evict: started(common!("evict")),
            read: started(common!("read")),
        }
    }
}

#[cfg(test)]
impl Scripts {
    /// Those of mutexes, to join and to leave, by the general way alone.
    pub(super) fn without_the_usual() -> (Arc<Script>, Arc<Script>) {
        (common!("join_mutex_queue"), common!("leave_mutex_queue"))
    }
}

fn restart_line(delay: Duration) -> String {
    format!("local RESTART = {}", millis(delay))
}

/// Whole milliseconds, at most a year; what is shorter is not none.
pub(super) fn millis(d: Duration) -> u64 {
    const YEAR: u64 = 365 * 86_400_000;
    u64::try_from(d.as_micros().div_ceil(1_000)).unwrap_or(YEAR).min(YEAR)
}

pub(super) fn micros(d: Duration) -> u64 {
    const YEAR: u64 = 365 * 86_400_000_000;
    u64::try_from(d.as_micros()).unwrap_or(YEAR).min(YEAR)
}

/// A kind as the scripts write it.
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

/// Holders as JSON; the last one is kept, since nearly all claims of a client have the same.
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
    let what = "a script of leasehold's answered what it never answers: is the server a Redis?";
    Error::new(ErrorKind::Corrupt, what)
}

/// Whose the key of a lock is that is not one of ours, by the word of the scripts.
fn foreigner(word: &str) -> &'static str {
    match word {
        "redisson" => "a Redisson client",
        _ => "a client of another library",
    }
}

/// A key of somebody else's that nobody can wait for. It may be a lock that is held: nothing is
/// advised that would break it.
fn endless(name: &Name, word: &str) -> Error {
    let what = match word {
        "redisson" => {
            "held by a Redisson client, in a key that never expires, so waiting could last for \
             ever: release it there, or use another name"
        }
        "number" => {
            "the key of this lock holds a number that never expires, as a counter or a semaphore of \
             Redisson's does: use another name, or a prefix in the URL"
        }
        _ => {
            "the key of this lock was set by a client of another library and never expires, so \
             waiting could last for ever: have that client set an expiry, or use another name"
        }
    };
    Error::new(ErrorKind::Corrupt, what).on(name)
}

/// A key of somebody else's that is not taken away by force.
fn kept(name: &Name, word: &str, left: i64) -> Error {
    let what = match (word, left) {
        ("redisson", _) => {
            "held by a Redisson client, which does not stop when its lock is taken away: release it \
             there (nothing was deleted)"
        }
        ("number", _) => {
            "the key holds a number that never expires, as a counter or a semaphore of Redisson's \
             does, and no lock of ours (nothing was deleted)"
        }
        (_, -1) => {
            "the key was set by somebody else and never expires: whether it is a lock, and whether \
             it is held, only they know (nothing was deleted)"
        }
        _ => {
            "what the key holds is no lock of ours, nor the random word of a lock by SET NX PX: it \
             may be anybody's data (nothing was deleted)"
        }
    };
    Error::new(ErrorKind::Corrupt, what).on(name)
}

fn held_by_foreigner(name: &Name, word: &str, left: Duration) -> Error {
    let what = format!(
        "{}, by a key with {} s left: try again later, or wait for it with lock()",
        foreigner(word),
        left.as_secs() + 1
    );
    Error::new(ErrorKind::Contended, what).on(name)
}

fn just_started(name: &Name, left: Duration) -> Error {
    let what = format!(
        "the Redis server has just started and may have forgotten who holds: nobody is let in for \
         another {} s (restart_delay_ms in the URL)",
        left.as_secs() + 1
    );
    Error::new(ErrorKind::Unreachable, what).on(name)
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

/// The answer to what is usual: the token of whoever holds; or how many are before a waiter and itself,
/// when to ask again, and its token.
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
        "asked for a {}, but the key of this name is held by {}: use another name, or a prefix in \
         the URL",
        claim.kind,
        foreigner(word)
    );
    Error::new(ErrorKind::Mismatch, what).on(&claim.name)
}

/// The answers of `renew.lua`: nothing for those that hold nothing there.
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

/// The answers of `beat.lua`, for claims on these locks.
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

/// The answer of `leave_*.lua`: whether the claim was there, and whether there may be dead waiters
/// before the next that lives, so that the call is to be made again.
pub(super) fn left(value: &Value) -> Result<(bool, bool)> {
    let n = number(value)?;
    Ok((n & 1 > 0, n & 2 > 0))
}

/// The answer of `reweigh.lua`, and whether the call is to be made again, as of `leave_*.lua`.
pub(super) fn reweighed(value: Value) -> Result<(Reweighed, bool)> {
    let parts = parts(value)?;
    Ok(match int(parts.first())? {
        0 => (Reweighed::Done { token: token(parts.get(1))? }, int(parts.get(2))? & 2 > 0),
        1 => (Reweighed::Busy, false),
        2 => (Reweighed::Lost, false),
        _ => return Err(out_of_step()),
    })
}

/// The answer of `evict.lua`.
pub(super) fn evicted(name: &Name, value: Value) -> Result<usize> {
    if let Value::Array(parts) = &value {
        return Err(kept(name, text(parts.first())?, int(parts.get(1))?));
    }
    Ok(usize::try_from(number(&value)?).unwrap_or(usize::MAX))
}

/// One answer of `read.lua`.
pub(super) struct Page {
    info: LockInfo,
    /// The token after which there is more.
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

    /// The lock, if anybody is there.
    pub(super) fn shown(self) -> Option<LockInfo> {
        (!self.info.claims.is_empty()).then_some(self.info)
    }

    /// Adds a later page, or what was seen before this one of what is further behind.
    pub(super) fn append(&mut self, later: Self) {
        if self.info.kind == later.info.kind && self.info.capacity == later.info.capacity {
            self.info.claims.extend(later.info.claims);
        }
    }

    /// Takes out those that wait by these claims and hold by others: granted between two pages.
    pub(super) fn without(&mut self, holders: &Self) {
        let held: HashSet<_> = holders.info.claims.iter().filter_map(|c| c.token).collect();
        self.info.claims.retain(|c| c.token.is_none_or(|token| !held.contains(&token)));
    }
}

fn described(name: &Name, parts: &[Value]) -> Result<LockInfo> {
    let kind = kind_of(text(parts.first())?).ok_or_else(out_of_step)?;
    let capacity = u32::try_from(int(parts.get(1))?).unwrap_or(u32::MAX);
    let one = |cells: &[Value]| {
        let standing = match text(cells.first())? {
            "h" => Standing::Holding,
            "w" => Standing::Waiting,
            _ => Standing::Departed,
        };
        let token = u64::try_from(int(cells.get(1))?).ok().and_then(Token::new);
        let weight = u32::try_from(int(cells.get(2))?).unwrap_or(u32::MAX);
        let since = duration(cells.get(3))?;
        let left = u64::try_from(int(cells.get(4))?).ok().map(Duration::from_micros);
        let holder = who(text(cells.get(5))?);
        Ok(ClaimInfo::new(standing, holder, token, weight, since, left))
    };
    let claims = parts.get(3..).unwrap_or_default().chunks(6).map(one);
    Ok(LockInfo::new(name.clone(), kind, capacity, claims.collect::<Result<Vec<_>>>()?))
}

/// Whether what a main key begins with is one of ours: 32 hexadecimal digits and a blank or `!`.
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
        fn an_answer_from_outside_is_read_or_refused(answer in values(&[
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
                reweighed(answer.clone()).err(),
                evicted(&name, answer.clone()).err(),
                Page::of(&name, answer).map(Page::shown).err(),
            ];
            for error in refused.into_iter().flatten() {
                prop_assert_eq!(format!("{error:#}").lines().count(), 1);
            }
        }
    }
}
