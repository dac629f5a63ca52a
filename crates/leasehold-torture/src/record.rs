//! One line of a history file, in the format that docs/reference/history-format.md documents.
//!
//! A line is flat and self-contained, so that a short program can write it. The types in memory may
//! change. This format may change only with another [`VERSION`].

use serde::{Deserialize, Serialize};

use super::checker::Terms;
use super::history::{
    Ask, Event, Fault, LockSpec, OpId, Resource, Time, Trouble, What, WorkerId, Write,
};
use super::trial::Trial;

/// The name of the format in a file's first line.
pub(super) const FORMAT: &str = "leasehold-history";
/// The version of the format that is written, and the only one that is read.
pub(super) const VERSION: u32 = 1;

/// The beginning of the first line, in every version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Preamble {
    pub(super) format: String,
    pub(super) version: u32,
}

/// The first line, for writing. It is read in parts, and each part ignores the fields of the
/// others.
#[derive(Debug, Serialize)]
pub(super) struct Header<'a> {
    #[serde(flatten)]
    pub(super) preamble: Preamble,
    #[serde(flatten)]
    pub(super) trial: &'a Trial,
    #[serde(flatten)]
    pub(super) terms: &'a Terms,
    pub(super) locks: &'a [LockSpec],
}

/// The part of the first line that belongs to the history.
#[derive(Debug, Deserialize)]
pub(super) struct Locks {
    pub(super) locks: Vec<LockSpec>,
}

/// Every line except the first.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(super) enum Record {
    Invoked {
        worker: WorkerId,
        n: u32,
        at: Time,
        lock: usize,
        #[serde(default = "one")]
        weight: u32,
        #[serde(default)]
        ask: Ask,
    },
    Waiting {
        worker: WorkerId,
        n: u32,
        at: Time,
        #[serde(default)]
        ahead: usize,
    },
    Acquired {
        worker: WorkerId,
        n: u32,
        at: Time,
        token: Option<u64>,
    },
    Held {
        worker: WorkerId,
        n: u32,
        at: Time,
        until: Option<Time>,
    },
    Lost {
        worker: WorkerId,
        n: u32,
        at: Time,
        #[serde(default)]
        expired: bool,
        #[serde(default)]
        reason: String,
    },
    Wrote {
        worker: WorkerId,
        n: u32,
        at: Time,
        plain: bool,
        fenced: Option<bool>,
    },
    Releasing {
        worker: WorkerId,
        n: u32,
        at: Time,
    },
    Released {
        worker: WorkerId,
        n: u32,
        at: Time,
    },
    Failed {
        worker: WorkerId,
        n: u32,
        at: Time,
        kind: String,
        #[serde(default)]
        error: String,
    },
    Abandoned {
        worker: WorkerId,
        n: u32,
        at: Time,
    },
    Write {
        worker: WorkerId,
        n: u32,
        at: Option<Time>,
        lock: usize,
        resource: Resource,
        token: Option<u64>,
    },
    Killed {
        worker: WorkerId,
        at: Time,
    },
    Fault {
        fault: Fault,
        worker: Option<WorkerId>,
        from: Time,
        to: Time,
        excuses_until: Option<Time>,
    },
    Stall {
        worker: Option<WorkerId>,
        from: Time,
        to: Time,
    },
    Crashed {
        what: String,
    },
    Residue {
        what: String,
    },
    Final {
        lock: usize,
        resource: Resource,
        value: u64,
        /// Pairs of `worker` and `n`.
        set: Vec<(WorkerId, u32)>,
    },
    End {
        at: Time,
    },
}

fn one() -> u32 {
    1
}

/// Returns the token, or `None` for 0. In memory, 0 means no token, because no leasehold store
/// grants it.
fn token(value: u64) -> Option<u64> {
    (value != 0).then_some(value)
}

/// Returns the end, or `None` for `Time::MAX`. In memory, `Time::MAX` means no end.
fn until(value: Time) -> Option<Time> {
    (value != Time::MAX).then_some(value)
}

impl From<&Event> for Record {
    fn from(event: &Event) -> Self {
        let Event { op: OpId { worker, n }, at, ref what } = *event;
        match what.clone() {
            What::Invoked { lock, weight, ask } => {
                Self::Invoked { worker, n, at, lock, weight, ask }
            }
            What::Waiting { ahead } => Self::Waiting { worker, n, at, ahead },
            What::Acquired { token: value } => {
                Self::Acquired { worker, n, at, token: token(value) }
            }
            What::Held { until: value } => Self::Held { worker, n, at, until: until(value) },
            What::Lost { expired, reason } => Self::Lost { worker, n, at, expired, reason },
            What::Wrote { plain, fenced } => Self::Wrote { worker, n, at, plain, fenced },
            What::Releasing => Self::Releasing { worker, n, at },
            What::Released => Self::Released { worker, n, at },
            What::Failed { kind, error } => Self::Failed { worker, n, at, kind, error },
            What::Abandoned => Self::Abandoned { worker, n, at },
        }
    }
}

impl From<&Write> for Record {
    fn from(write: &Write) -> Self {
        let Write { lock, resource, op: OpId { worker, n }, token: number, at } = *write;
        Self::Write { worker, n, at, lock, resource, token: token(number) }
    }
}

impl From<&Trouble> for Record {
    fn from(trouble: &Trouble) -> Self {
        let Trouble { worker, fault, from, to, excuses_until } = *trouble;
        match fault {
            Some(fault) => {
                Self::Fault { fault, worker, from, to, excuses_until: Some(excuses_until) }
            }
            None => Self::Stall { worker, from, to },
        }
    }
}

/// The contents of a line, as they are kept in memory.
pub(super) enum Content {
    Event(Event),
    Write(Write),
    Trouble(Trouble),
    Killed(WorkerId, Time),
    Crashed(String),
    Residue(String),
    Final(usize, Resource, super::history::Final),
    End(Time),
}

impl From<Record> for Content {
    fn from(record: Record) -> Self {
        let event = |worker, n, at, what| Self::Event(Event { op: OpId { worker, n }, at, what });
        match record {
            Record::Invoked { worker, n, at, lock, weight, ask } => {
                event(worker, n, at, What::Invoked { lock, weight, ask })
            }
            Record::Waiting { worker, n, at, ahead } => {
                event(worker, n, at, What::Waiting { ahead })
            }
            Record::Acquired { worker, n, at, token } => {
                event(worker, n, at, What::Acquired { token: token.unwrap_or(0) })
            }
            Record::Held { worker, n, at, until } => {
                event(worker, n, at, What::Held { until: until.unwrap_or(Time::MAX) })
            }
            Record::Lost { worker, n, at, expired, reason } => {
                event(worker, n, at, What::Lost { expired, reason: clean(&reason) })
            }
            Record::Wrote { worker, n, at, plain, fenced } => {
                event(worker, n, at, What::Wrote { plain, fenced })
            }
            Record::Releasing { worker, n, at } => event(worker, n, at, What::Releasing),
            Record::Released { worker, n, at } => event(worker, n, at, What::Released),
            Record::Failed { worker, n, at, kind, error } => {
                event(worker, n, at, What::Failed { kind, error: clean(&error) })
            }
            Record::Abandoned { worker, n, at } => event(worker, n, at, What::Abandoned),
            Record::Write { worker, n, at, lock, resource, token } => {
                let (op, token) = (OpId { worker, n }, token.unwrap_or(0));
                Self::Write(Write { lock, resource, op, token, at })
            }
            Record::Killed { worker, at } => Self::Killed(worker, at),
            Record::Fault { fault, worker, from, to, excuses_until } => {
                let excuses_until = excuses_until.unwrap_or(to);
                Self::Trouble(Trouble { worker, fault: Some(fault), from, to, excuses_until })
            }
            Record::Stall { worker, from, to } => Self::Trouble(Trouble::stall(worker, from, to)),
            Record::Crashed { what } => Self::Crashed(clean(&what)),
            Record::Residue { what } => Self::Residue(clean(&what)),
            Record::Final { lock, resource, value, set } => {
                let set = set.into_iter().map(|(worker, n)| OpId { worker, n }).collect();
                Self::Final(lock, resource, super::history::Final { value, set })
            }
            Record::End { at } => Self::End(at),
        }
    }
}

/// Makes text from outside safe for a terminal: it cannot move the cursor or begin a new line.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}
