//! `leasehold ls`, `leasehold show` and `leasehold why`: the queues, as tables for people and as
//! JSON for programs.
//!
//! Names, labels and hosts come from other users. Control characters in them never reach the
//! terminal.

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;

use leasehold::store::{ClaimInfo, ClaimState, LockInfo};
use leasehold::{Kind, WaitChain, WaitsFor};
use serde::Serialize;

use crate::args::{LsArgs, ShowArgs, WhyArgs};
use crate::block_on::block_on;
use crate::events::note;
use crate::exit::{self, Failure};
use crate::place::Place;
use crate::slots;
use crate::table::{aligned, clean, short};
use crate::take::{held_by, with_store};

pub(crate) fn ls(args: LsArgs) -> ExitCode {
    finish(block_on(with_store(&args.store, async |locks| {
        let found = slots::hidden(locks.list(&args.prefix).await?);
        let text = if args.json {
            json(&found.iter().map(|info| Lock::of(info, None)).collect::<Vec<_>>())
        } else if found.is_empty() {
            report_none(locks.url(), &args.prefix);
            String::new()
        } else {
            lines(&found)
        };
        Ok((text, ExitCode::SUCCESS))
    })))
}

pub(crate) fn show(args: ShowArgs) -> ExitCode {
    finish(block_on(with_store(&args.store, async |locks| {
        let found = locks.inspect(&args.name).await?;
        let store = Some(locks.url());
        let text = match (&found, args.json) {
            (Some(info), true) => json(&Lock::of(info, store)),
            (None, true) => json(&Lock::free(&args.name, store)),
            (Some(info), false) => details(info, locks.url()),
            (None, false) => {
                let name = clean(&args.name);
                if std::io::stderr().is_terminal() {
                    let ls = args.store.command("ls", None);
                    note(&format!("hint: `{ls}` lists the locks that are in use"));
                }
                format!("lock   {name} (free)\nstore  {}\n", clean(locks.url()))
            }
        };
        let code = if found.is_some() { 0 } else { exit::NOT_HELD };
        Ok((text, ExitCode::from(code)))
    })))
}

pub(crate) fn why(args: WhyArgs) -> ExitCode {
    finish(block_on(with_store(&args.store, async |locks| {
        let chain = locks.wait_chain(&args.name).await?;
        if !args.json && chain.locks.is_empty() {
            note(&format!("{:?} is not in use in {}", args.name, clean(locks.url())));
        }
        if !chain.deadlock.is_empty() {
            note("hint: if each of these processes has only one task, end one of them");
        }
        let text = if args.json { json(&Chain::of(&chain)) } else { explained(&chain) };
        let code = if chain.deadlock.is_empty() { 0 } else { exit::DEADLOCK };
        Ok((text, ExitCode::from(code)))
    })))
}

/// Returns a table of the locks in the chain, and the parties of the deadlock.
fn explained(chain: &WaitChain) -> String {
    let mut text = if chain.locks.is_empty() { String::new() } else { lines(&chain.locks) };
    if !chain.deadlock.is_empty() {
        text.push_str("\npossible deadlock: these processes wait for each other\n");
        for party in &chain.deadlock {
            text.push_str(&format!("  {}\n", clean(&party.to_string())));
        }
    }
    text
}

/// The locks for which the holders of a lock wait, in JSON.
#[derive(Serialize)]
struct Chain<'a> {
    chain: Vec<Lock<'a>>,
    deadlock: &'a [WaitsFor],
}

impl<'a> Chain<'a> {
    fn of(chain: &'a WaitChain) -> Self {
        Self {
            chain: chain.locks.iter().map(|info| Lock::of(info, None)).collect(),
            deadlock: &chain.deadlock,
        }
    }
}

/// Prints on stderr that `ls` has found nothing, so that an empty list is not mistaken for a failure
/// and a wrong store is recognized.
fn report_none(store: &str, prefix: &str) {
    let which = match prefix {
        "" => String::new(),
        prefix => format!(" whose name begins with {prefix:?}"),
    };
    note(&format!("no lock{which} is in use in {}", clean(store)));
}

/// Prints the text or reports the failure, and returns the exit code. Errors on stdout are ignored.
fn finish(seen: Result<(String, ExitCode), Failure>) -> ExitCode {
    match seen {
        Ok((text, code)) => {
            let _ = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
            code
        }
        Err(failure) => failure.report(),
    }
}

/// A lock in JSON.
#[derive(Serialize)]
struct Lock<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<&'a str>,
    kind: Option<Kind>,
    capacity: Option<u32>,
    claims: Vec<Place<'a>>,
    /// The reason why the lock could not be read, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    unreadable: Option<&'a str>,
}

impl<'a> Lock<'a> {
    fn of(info: &'a LockInfo, store: Option<&'a str>) -> Self {
        Self {
            name: info.name.as_str(),
            store,
            kind: info.unreadable.is_none().then_some(info.kind),
            capacity: info.unreadable.is_none().then_some(info.capacity),
            claims: info.claims.iter().map(Place::of).collect(),
            unreadable: info.unreadable.as_deref(),
        }
    }

    fn free(name: &'a str, store: Option<&'a str>) -> Self {
        Self { name, store, kind: None, capacity: None, claims: Vec::new(), unreadable: None }
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).map(|text| text + "\n").unwrap_or_default()
}

/// Returns the kind of a lock in words.
pub(crate) fn kind(info: &LockInfo) -> String {
    match info.kind {
        Kind::Semaphore => format!("semaphore of {}", info.capacity),
        kind => kind.to_string(),
    }
}

/// Returns a table with one line per lock.
fn lines(locks: &[LockInfo]) -> String {
    let mut rows =
        vec![["NAME", "KIND", "WAITING", "SINCE", "HELD BY"].map(str::to_owned).to_vec()];
    rows.extend(locks.iter().map(|info| {
        if let Some(why) = &info.unreadable {
            let unknown = || "-".to_owned();
            let name = clean(info.name.as_str());
            return vec![name, "UNREADABLE".to_owned(), unknown(), unknown(), clean(why)];
        }
        vec![
            clean(info.name.as_str()),
            kind(info),
            info.waiters().count().to_string(),
            longest(info).map_or("-".to_owned(), |c| short(c.since)),
            by(info),
        ]
    }));
    aligned(&rows)
}

/// Returns the holder that has held the lock for the longest time.
pub(crate) fn longest(info: &LockInfo) -> Option<&ClaimInfo> {
    info.holders().max_by_key(|claim| claim.since)
}

/// Returns the holder in words, or why the lock is unavailable without one.
pub(crate) fn by(info: &LockInfo) -> String {
    let more = match info.holders().count() {
        count @ 2.. => format!(" and {} more", count - 1),
        _ => String::new(),
    };
    match longest(info) {
        Some(first) => format!("{}{more}", clean(&first.holder.to_string())),
        // The lock may be frozen or in a cooldown.
        None => held_by(info).unwrap_or_else(|| "-".to_owned()),
    }
}

/// Returns a table with one line per claim.
fn details(info: &LockInfo, store: &str) -> String {
    let (name, kind, store) = (clean(info.name.as_str()), kind(info), clean(store));
    let mut rows = vec![CLAIM.map(str::to_owned).to_vec()];
    rows.extend(info.claims.iter().map(|c| row(info, c)));
    format!("lock   {name} ({kind})\nstore  {store}\n\n{}", aligned(&rows))
}

/// Returns whether this waiter and a holder belong to the same process, which may be a deadlock.
fn waits_for_its_own_process(info: &LockInfo, c: &ClaimInfo) -> bool {
    let same = |other: &ClaimInfo| {
        (&other.holder.host, other.holder.pid) == (&c.holder.host, c.holder.pid)
    };
    c.state == ClaimState::Waiting && c.holder.pid != 0 && info.holders().any(same)
}

/// The headings of a queue's table.
pub(crate) const CLAIM: [&str; 7] =
    ["STATE", "HOST", "PID", "LABEL", "TOKEN", "SINCE", "REMAINING"];

/// Returns the cells of one claim, in the order of [`CLAIM`].
pub(crate) fn row(info: &LockInfo, c: &ClaimInfo) -> Vec<String> {
    let state = c.state.as_str();
    let behind = if waits_for_its_own_process(info, c) { " for its own process" } else { "" };
    let side = match info.kind {
        Kind::Mutex => String::new(),
        Kind::RwLock if c.weight == 1 => " to read".to_owned(),
        Kind::RwLock => " to write".to_owned(),
        Kind::Semaphore => format!(" {}", c.weight),
    };
    let or_none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    vec![
        format!("{state}{behind}{side}"),
        or_none(clean(&c.holder.host)),
        // Clients of other libraries do not store a pid.
        if c.holder.pid == 0 { "-".to_owned() } else { c.holder.pid.to_string() },
        or_none(clean(&c.holder.label)),
        c.token.map_or("-".to_owned(), |t| t.to_string()),
        short(c.since),
        c.remaining.map_or("-".to_owned(), short),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::{Holder, Name, Token};

    use super::*;

    fn lock(label: &str) -> LockInfo {
        let holder = Holder { host: "web-1".into(), pid: 7, label: label.into() };
        let since = Duration::from_secs(75);
        let claim = ClaimInfo::new(ClaimState::Holding, holder, Token::new(42), 1, since, None);
        LockInfo::new(Name::new("x y").unwrap(), Kind::Mutex, 1, vec![claim])
    }

    #[test]
    fn table_output_is_human_readable() {
        assert_eq!(
            details(&lock("nightly"), "file:/x"),
            "lock   x y (mutex)\nstore  file:/x\n\n\
             STATE  HOST   PID  LABEL    TOKEN  SINCE   REMAINING\n\
             held   web-1  7    nightly  42     1m 15s  -\n"
        );
        assert!(lines(&[lock("")]).contains("x y   mutex  0        1m 15s  web-1 pid 7\n"));
    }

    #[test]
    fn a_frozen_lock_is_listed_with_its_reason() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "frozen: moved".into() };
        let (since, left) = (Duration::from_secs(5), Some(Duration::from_secs(9)));
        let claim = ClaimInfo::new(ClaimState::Cooldown, holder, Token::new(1), 1, since, left);
        let closed = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, vec![claim]);
        let text = lines(&[closed]);
        assert!(
            text.contains("x     mutex  0        -      frozen for 9s more by web-1: moved\n"),
            "{text}"
        );
    }

    // F80
    #[test]
    fn waiter_blocked_by_its_own_process_is_marked() {
        let waits = |pid| {
            let holder = Holder { host: "web-1".into(), pid, label: String::new() };
            ClaimInfo::new(ClaimState::Waiting, holder, Token::new(43), 1, Duration::ZERO, None)
        };
        let mut seen = lock("");
        seen.claims.extend([waits(7), waits(8)]);
        let text = details(&seen, "file:/x");
        assert!(text.contains("waiting for its own process  web-1  7 "), "{text}");
        assert!(text.contains("waiting                      web-1  8 "), "{text}");
    }

    // S90
    #[test]
    fn control_characters_in_labels_are_escaped() {
        for text in [details(&lock("a\x1b]0;x\x07"), "file:"), lines(&[lock("a\x1b]0;x\x07")])] {
            assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text}");
        }
    }

    // F06
    #[test]
    fn unreadable_lock_is_listed_with_the_others() {
        let damaged = LockInfo::unreadable(Name::new("torn").unwrap(), "written by halves");
        let text = lines(&[damaged.clone(), lock("")]);
        assert!(text.contains("torn  UNREADABLE  -        -       written by halves\n"), "{text}");
        assert!(text.contains("x y   mutex"), "{text}");
        let value: serde_json::Value =
            serde_json::from_str(&json(&Lock::of(&damaged, None))).unwrap();
        assert_eq!(value["unreadable"], "written by halves");
        assert!(value["kind"].is_null() && value["claims"].as_array().unwrap().is_empty());
    }

    #[test]
    fn json_output_is_machine_readable() {
        let value: serde_json::Value =
            serde_json::from_str(&json(&Lock::of(&lock("a"), Some("file:")))).unwrap();
        assert_eq!(value["claims"][0]["token"], 42);
        assert_eq!(value["claims"][0]["state"], "held");
        assert_eq!(value["claims"][0]["since_seconds"], 75.0);
        assert_eq!(value["store"], "file:");
    }
}
