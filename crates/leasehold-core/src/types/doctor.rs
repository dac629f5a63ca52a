//! Findings about the configuration of a store.
//!
//! [`Client::diagnose`](crate::Client::diagnose) returns them, and `leasehold doctor` prints them.
//! A finding states what was found, why it matters and how to fix it.
//! [`Guarantees`](crate::store::Guarantees) state what *this* configuration guarantees. A finding
//! reports where the configuration guarantees less than this kind of store can.

use std::borrow::Cow;
use std::fmt;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// For information.
    Note,
    /// Locks work, but not as well as they could. Something is slower or closer to a limit than
    /// necessary. Or a fault worse than a crash (a fail-over, a power failure, an operator's
    /// mistake) can let two clients hold the same lock for up to a lease. Their tokens still
    /// differ.
    Weak,
    /// Locks do not work. Or ordinary use and crashes break a guarantee that this kind of store has
    /// when it is configured well. Two clients may hold the same lock, tokens may decrease, or
    /// waiters may never be notified.
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

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// A stable ID for programs: `"fsync"`, `"eviction"`, …
    pub id: &'static str,
    /// What was found, in one sentence.
    pub what: String,
    /// Why it matters.
    pub why: Cow<'static, str>,
    /// How to fix it. Empty if there is nothing to do.
    pub fix: Cow<'static, str>,
}

impl Finding {
    /// Creates a finding about a broken guarantee.
    pub fn broken(
        id: &'static str,
        what: impl Into<String>,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<Cow<'static, str>>,
    ) -> Self {
        let (what, why, fix) = (what.into(), why.into(), fix.into());
        Self { severity: Severity::Broken, id, what, why, fix }
    }

    /// Creates a finding about a weakness.
    pub fn weak(
        id: &'static str,
        what: impl Into<String>,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { severity: Severity::Weak, ..Self::broken(id, what, why, fix) }
    }

    /// Creates a finding for information.
    pub fn note(
        id: &'static str,
        what: impl Into<String>,
        why: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { severity: Severity::Note, ..Self::broken(id, what, why, "") }
    }
}

/// The start of 2025, in µs since 1970. A wall clock that shows an earlier time has not been set.
const NEWER_THAN: u64 = 1_735_689_600_000_000;
/// The largest difference, in µs, that is expected between two clocks synchronized with NTP.
const APART: u64 = 2_000_000;

/// Checks this machine's wall clock, which shows `now`, in µs since 1970.
pub fn own_clock(now: u64) -> Option<Finding> {
    (now < NEWER_THAN).then(|| {
        Finding::broken(
            "clock",
            "this machine's clock is set to a date before 2025",
            "tokens are derived from this clock, so new tokens would be smaller than those of earlier holders",
            "set the clock, and run an NTP client such as chrony or systemd-timesyncd",
        )
    })
}

/// Checks a server's wall clock. It showed `theirs` between `before` and `after` on this machine's
/// clock, all in µs since 1970.
pub fn clocks(before: u64, theirs: u64, after: u64) -> Vec<Finding> {
    let mut findings: Vec<Finding> = own_clock(before).into_iter().collect();
    if theirs < NEWER_THAN {
        findings.push(Finding::broken(
            "server-clock",
            "the server's clock is set to a date before 2025",
            "tokens are derived from this clock, so new tokens would be smaller than those of earlier holders",
            "set the server's clock, and run an NTP client on the server",
        ));
    }
    let apart = before.saturating_sub(theirs).max(theirs.saturating_sub(after));
    if apart > APART && findings.is_empty() {
        findings.push(Finding::weak(
            "clock-difference",
            format!(
                "the clocks of the server and of this machine differ by {:.1} s",
                apart as f64 / 1e6
            ),
            "leases do not depend on the difference, but one of the clocks is not synchronized. If it is \
             corrected in one step, leases expire early or late",
            "on both, run an NTP client (chrony, systemd-timesyncd) that slews the clock instead of \
             stepping it",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_difference_is_reported_only_if_certain() {
        let now = NEWER_THAN * 2;
        let found = |before, theirs, after| clocks(before, theirs, after).len();
        assert_eq!(found(now, now + 5, now + 10), 0);
        // A slow answer proves nothing, because the server may have read its clock at any time in
        // between.
        assert_eq!(found(now, now + 9_000_000, now + 10_000_000), 0);
        assert_eq!(found(now, now + 9_000_000, now + 10), 1);
        assert_eq!(found(now, now - 9_000_000, now + 10), 1);
        assert_eq!(found(now, 0, now), 1);
        assert_eq!(own_clock(0).unwrap().severity, Severity::Broken);
    }
}
