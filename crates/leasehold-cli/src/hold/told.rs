//! What the caller of `leasehold hold` is told, and how it is written.
//!
//! A caller that does not read stops nobody: a thread of its own writes.

use std::io::{Write, stdout};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::store::LockInfo;
use serde::Serialize;

use crate::events::timed;
use crate::place::Place;
use crate::take::held_by;

/// One line. Its fields are what is documented, and only grow.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Told<'a> {
    /// It stands in the queue.
    Waiting {
        name: &'a str,
        /// How many are before it, holders included.
        ahead: usize,
        /// Its number among the waiters, from 1; `None` if the number of holders is unknown.
        place: Option<usize>,
        /// The holders, or the reason why the lock is taken, in words; `None` without a poll.
        held_by: Option<String>,
        /// The holders; empty without a poll.
        holders: Vec<Place<'a>>,
    },
    /// The lock is the caller's, for so long at least if it is not renewed; without a time, until it ends.
    Held {
        name: &'a str,
        token: u64,
        sequencer: String,
        #[serde(flatten)]
        certain: Certain,
    },
    /// It was not renewed in time, and is certain for so long only.
    AtRisk {
        name: &'a str,
        #[serde(flatten)]
        certain: Certain,
    },
    /// It was renewed after all.
    Recovered {
        name: &'a str,
        #[serde(flatten)]
        certain: Certain,
    },
    /// It may be another's.
    Lost { name: &'a str, reason: &'a str },
    /// It was given back; or its lease is left to do it, where the store did not answer.
    Released { name: &'a str, token: u64, answered: bool },
    /// It ends with this code, and holds nothing.
    Failed {
        code: u8,
        message: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<&'a str>,
    },
}

/// For how long a hold is certain as the line is written, and the time of day when that is over (seconds since 1970):
/// both nothing where it needs no renewal.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Certain {
    remaining_seconds: Option<f64>,
    deadline: Option<f64>,
}

impl Certain {
    pub(super) fn for_the_next(left: Duration) -> Self {
        if left == Duration::MAX {
            return Self { remaining_seconds: None, deadline: None };
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let deadline = now.checked_add(left).map(|end| end.as_secs_f64());
        Self { remaining_seconds: Some(left.as_secs_f64()), deadline }
    }

    fn words(&self) -> String {
        let numbers = [self.remaining_seconds, self.deadline].into_iter().flatten();
        numbers.map(|seconds| format!(" {seconds:.3}")).collect()
    }
}

impl<'a> Told<'a> {
    /// With what the store returned, if it was polled.
    pub(super) fn waiting(
        name: &'a str,
        ahead: usize,
        place: Option<usize>,
        lock: Option<&'a LockInfo>,
    ) -> Self {
        Self::Waiting {
            name,
            ahead,
            place,
            held_by: lock.and_then(held_by),
            holders: lock.into_iter().flat_map(LockInfo::holders).map(Place::of).collect(),
        }
    }

    /// A word, and what belongs to it: for a shell's `read`.
    fn words(&self) -> String {
        match self {
            Self::Waiting { ahead, held_by: Some(by), .. } => format!("waiting {ahead} {by}"),
            Self::Waiting { ahead, .. } => format!("waiting {ahead}"),
            Self::Held { token, sequencer, certain, .. } => {
                format!("held {token} {sequencer}{}", certain.words())
            }
            Self::AtRisk { certain, .. } => format!("at_risk{}", certain.words()),
            Self::Recovered { certain, .. } => format!("recovered{}", certain.words()),
            Self::Lost { reason, .. } => format!("lost {reason}"),
            Self::Released { token, .. } => format!("released {token}"),
            Self::Failed { code, message, .. } => format!("failed {code} {message}"),
        }
    }
}

/// Tells the caller, who may not be reading.
#[derive(Clone)]
pub(super) struct Caller {
    lines: mpsc::Sender<String>,
    json: bool,
}

impl Caller {
    /// The thread that writes ends when there is nobody left who tells.
    pub(super) fn new(json: bool) -> (Self, JoinHandle<()>) {
        let (lines, said) = mpsc::channel::<String>();
        let writer = thread::spawn(move || {
            for line in said {
                let mut stdout = stdout().lock();
                // Who is gone is noticed elsewhere.
                let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
            }
        });
        (Self { lines, json }, writer)
    }

    pub(super) fn tell(&self, told: &Told<'_>) {
        let _ = self.lines.send(if self.json { timed(told) } else { told.words() });
    }
}

#[cfg(test)]
mod tests {
    use leasehold::store::{ClaimInfo, Standing};
    use leasehold::{Holder, Kind, Name, Token};

    use super::*;

    #[test]
    fn a_line_is_a_line_whatever_is_in_it() {
        let held = Told::Held {
            name: "a\u{2028}\"b\"",
            token: 7,
            sequencer: "v1:x".into(),
            certain: Certain { remaining_seconds: Some(14.5), deadline: Some(1e9) },
        };
        assert_eq!(held.words(), "held 7 v1:x 14.500 1000000000.000");
        let json = timed(&held);
        assert!(!json.contains('\n'), "{json}");
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&read["event"], &read["token"]), (&"held".into(), &7.into()));
        assert_eq!((&read["remaining_seconds"], &read["deadline"]), (&14.5.into(), &1e9.into()));
        assert!(read["time"].as_f64().is_some_and(|time| time > 1e9));
    }

    #[test]
    fn who_waits_is_told_who_holds() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "a\nb".into() };
        let since = Duration::from_secs(12);
        let claim = ClaimInfo::new(Standing::Holding, holder, Token::new(5), 1, since, None);
        let queue = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, vec![claim]);
        let told = Told::waiting("x", 3, Some(3), Some(&queue));
        assert_eq!(told.words(), "waiting 3 held by web-1 pid 7 (a\\nb) for 12s");
        let read: serde_json::Value = serde_json::from_str(&timed(&told)).unwrap();
        assert_eq!((&read["ahead"], &read["place"]), (&3.into(), &3.into()));
        assert_eq!(read["holders"][0]["label"], "a\nb");
        assert_eq!(read["holders"][0]["state"], "held");
        let far = Told::waiting("x", 3, Some(3), None);
        assert_eq!(far.words(), "waiting 3");
        let read: serde_json::Value = serde_json::from_str(&timed(&far)).unwrap();
        assert_eq!((&read["place"], &read["held_by"]), (&3.into(), &serde_json::Value::Null));
        assert_eq!(read["holders"], serde_json::json!([]));
    }
}
