//! The lines that `leasehold hold` prints for its caller.
//!
//! A separate thread writes them, so a caller that does not read stdout cannot delay the
//! acquisition or the release.

use std::io::{Write, stdout};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::store::LockInfo;
use serde::Serialize;

use crate::events::timed;
use crate::place::Place;
use crate::take::held_by;

/// One line for the caller. The fields of its JSON form are documented, and only new ones may be
/// added.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum HoldLine<'a> {
    /// The hold is in the queue.
    Waiting {
        name: &'a str,
        /// The number of claims ahead, including holders.
        ahead: usize,
        /// The position among the waiters, from 1; `None` if the number of holders is unknown.
        place: Option<usize>,
        /// The holders, or the reason why the lock is unavailable, in words; `None` without a poll.
        held_by: Option<String>,
        /// The holders; empty without a poll.
        holders: Vec<Place<'a>>,
    },
    /// The lock was acquired. Without a renewal, it is held at least for the time in `certain`. If
    /// `certain` has no time, the lock is held until the process ends.
    Held {
        name: &'a str,
        token: u64,
        sequencer: String,
        #[serde(flatten)]
        certain: Certain,
    },
    /// The lease was not renewed in time. The lock is certain to be held only for the time in
    /// `certain`.
    AtRisk {
        name: &'a str,
        #[serde(flatten)]
        certain: Certain,
    },
    /// A renewal succeeded after all.
    Recovered {
        name: &'a str,
        #[serde(flatten)]
        certain: Certain,
    },
    /// The lock is lost: another client may hold it.
    Lost { name: &'a str, reason: &'a str },
    /// The lock was released. If the store did not answer, the lock is freed when its lease
    /// expires.
    Released { name: &'a str, token: u64, answered: bool },
    /// The process ends with this code, and holds nothing.
    Failed {
        code: u8,
        message: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<&'a str>,
    },
}

/// How long the lock is certain to be held from when the line is written, and the time of day when
/// that ends, in seconds since 1970. Both are `None` if the hold needs no renewal.
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

impl<'a> HoldLine<'a> {
    /// Creates the line about a wait, with the store's answer if the store was polled.
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

    /// Returns the line as text: a word followed by its values, for a shell's `read`.
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

/// A printer of lines for the caller, which may not be reading.
#[derive(Clone)]
pub(super) struct Caller {
    lines: mpsc::Sender<String>,
    json: bool,
}

impl Caller {
    /// Starts the writer thread. It ends when all clones of the printer are dropped.
    pub(super) fn new(json: bool) -> (Self, JoinHandle<()>) {
        let (lines, receiver) = mpsc::channel::<String>();
        let writer = thread::spawn(move || {
            for line in receiver {
                let mut stdout = stdout().lock();
                // Errors are ignored, because a closed stdout is detected elsewhere.
                let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
            }
        });
        (Self { lines, json }, writer)
    }

    pub(super) fn report(&self, line: &HoldLine<'_>) {
        let _ = self.lines.send(if self.json { timed(line) } else { line.words() });
    }
}

#[cfg(test)]
mod tests {
    use leasehold::store::{ClaimInfo, ClaimState};
    use leasehold::{Holder, Kind, Name, Token};

    use super::*;

    #[test]
    fn held_event_stays_on_one_line() {
        let held = HoldLine::Held {
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
    fn waiting_event_describes_the_holder() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "a\nb".into() };
        let since = Duration::from_secs(12);
        let claim = ClaimInfo::new(ClaimState::Holding, holder, Token::new(5), 1, since, None);
        let queue = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, vec![claim]);
        let line = HoldLine::waiting("x", 3, Some(3), Some(&queue));
        assert_eq!(line.words(), "waiting 3 held by web-1 pid 7 (a\\nb) for 12s");
        let read: serde_json::Value = serde_json::from_str(&timed(&line)).unwrap();
        assert_eq!((&read["ahead"], &read["place"]), (&3.into(), &3.into()));
        assert_eq!(read["holders"][0]["label"], "a\nb");
        assert_eq!(read["holders"][0]["state"], "held");
        let far = HoldLine::waiting("x", 3, Some(3), None);
        assert_eq!(far.words(), "waiting 3");
        let read: serde_json::Value = serde_json::from_str(&timed(&far)).unwrap();
        assert_eq!((&read["place"], &read["held_by"]), (&3.into(), &serde_json::Value::Null));
        assert_eq!(read["holders"], serde_json::json!([]));
    }
}
