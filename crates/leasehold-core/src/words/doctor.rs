//! What is wrong with a set-up: findings about the store as it is configured, in plain words.
//!
//! [`Leasehold::diagnose`](crate::Leasehold::diagnose) asks the store; `leasehold doctor` prints what
//! it answers. A finding says what was found, why it matters to a lock, and what to do about it.
//! [`Guarantees`](crate::store::Guarantees) already tell what *this* configuration promises; a
//! finding tells where that is less than this kind of store can promise.

use std::borrow::Cow;
use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// Good to know.
    Note,
    /// Locks work, though not as well as they could: something is slower or closer to the edge than
    /// it need be, or something worse than a crash (a fail-over, a power cut, somebody's hand) can
    /// let two hold for as long as a lease. Their tokens still tell them apart.
    Weak,
    /// Locks do not work, or a promise that this kind of store keeps when it is set up well does not
    /// outlast ordinary use and crashes: two may hold at once, tokens may fall, or waiters may sleep
    /// on.
    Broken,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Note => "note",
            Self::Weak => "weak",
            Self::Broken => "BROKEN",
        })
    }
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// A word for programs, the same in every version: `"fsync"`, `"eviction"`, …
    pub id: &'static str,
    /// What was found, in one sentence.
    pub what: String,
    /// Why it matters.
    pub why: Cow<'static, str>,
    /// What to do; empty where there is nothing to be done.
    pub fix: Cow<'static, str>,
}

impl Finding {
    /// A promise that is broken.
    pub fn broken(
        id: &'static str,
        what: impl Into<String>,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<Cow<'static, str>>,
    ) -> Self {
        let (what, why, fix) = (what.into(), why.into(), fix.into());
        Self { severity: Severity::Broken, id, what, why, fix }
    }

    /// A weakness.
    pub fn weak(
        id: &'static str,
        what: impl Into<String>,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { severity: Severity::Weak, ..Self::broken(id, what, why, fix) }
    }

    /// Something that is good to know.
    pub fn note(
        id: &'static str,
        what: impl Into<String>,
        why: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { severity: Severity::Note, ..Self::broken(id, what, why, "") }
    }
}

/// What a wall clock before 2025 has not been told yet.
const NEWER_THAN: u64 = 1_735_689_600_000_000;
/// Two clocks that differ by more than this are not both kept by NTP.
const APART: u64 = 2_000_000;

/// What this machine's own wall clock, in µs since 1970, gives rise to.
pub fn own_clock(now: u64) -> Option<Finding> {
    (now < NEWER_THAN).then(|| {
        Finding::broken(
            "clock",
            "this machine's clock says that it is before 2025",
            "tokens are drawn from it: they would be smaller than those of earlier holders",
            "set the clock, and run an NTP client (chrony, systemd-timesyncd)",
        )
    })
}

/// What a server's wall clock gives rise to, which said `theirs` between `before` and `after` by
/// ours (all in µs since 1970).
pub fn clocks(before: u64, theirs: u64, after: u64) -> Vec<Finding> {
    let mut findings: Vec<Finding> = own_clock(before).into_iter().collect();
    if theirs < NEWER_THAN {
        findings.push(Finding::broken(
            "server-clock",
            "the server's clock says that it is before 2025",
            "tokens are drawn from it: they would be smaller than those of earlier holders",
            "set the server's clock, and run an NTP client there",
        ));
    }
    let apart = before.saturating_sub(theirs).max(theirs.saturating_sub(after));
    if apart > APART && findings.is_empty() {
        findings.push(Finding::weak(
            "clock-difference",
            format!("the server's clock and this machine's are {:.1} s apart", apart as f64 / 1e6),
            "no lease depends on their agreement, but one of them is not kept by NTP, and when it \
             is put right in one step, leases end early or late",
            "run an NTP client on both (chrony, systemd-timesyncd) that slews and does not step",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_judged_by_what_is_certain() {
        let now = NEWER_THAN * 2;
        let found = |before, theirs, after| clocks(before, theirs, after).len();
        assert_eq!(found(now, now + 5, now + 10), 0);
        // A slow answer proves nothing: the server may have looked at any time in between.
        assert_eq!(found(now, now + 9_000_000, now + 10_000_000), 0);
        assert_eq!(found(now, now + 9_000_000, now + 10), 1);
        assert_eq!(found(now, now - 9_000_000, now + 10), 1);
        assert_eq!(found(now, 0, now), 1);
        assert_eq!(own_clock(0).unwrap().severity, Severity::Broken);
    }
}
