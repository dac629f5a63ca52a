//! Decides when a value has expired in a system where nothing expires on its own. No I/O.
//!
//! A value with a lifetime (a session, the marker of a dead session, a contention marker) contains
//! the lifetime in its first line. Writing the value again restarts the lifetime. Each client
//! decides by one of two clocks:
//!
//! - *Its own clock*, since it first saw this version. The value was written before that. So the
//!   value never seems older than it is, even if a clock is set, because this clock is monotonic.
//!   This takes a second read after a whole lifetime, which is acceptable for a waiter.
//! - *The system's clock*, if the system reports the age of a value. An object store reports it as
//!   the time between the object's `Last-Modified` and the reply's `Date`. One read is then enough
//!   for a `--try` from cron. The possible error of such an age is the system's grain. A client
//!   adds the grain to its session's lifetime and never relies on it (`session.rs`).
//!
//! Neither this client's wall clock nor another client's clock matters.
//!
//! - *A slow observer.* A slow reply describes an older state than it seems. So the time since a
//!   version was first seen begins when the first reply with it arrived, and ends when the latest
//!   read was sent.
//! - *A stale read* shows an old version, which may seem to have expired. This alone has no
//!   consequences. A client that considers a session dead replaces it only if the session has not
//!   changed.
//! - *A late write* of a session's client starts a lifetime at its arrival, so later than the
//!   client assumes.
//! - *A system clock that is set forward* ends sessions early. No grain covers that, and the
//!   store's guarantees state it.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use leasehold_core::Moment;
use leasehold_core::kit::locked;

/// Maximum number of remembered values, such as sessions of dead clients at the front of a queue.
const MOST: usize = 4_096;

/// The lifetime of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// Permanent.
    Lasting,
    /// Limited to this duration since the last write.
    Short(Duration),
    /// Ended, because the value was removed.
    Over,
}

/// How much of a lifetime is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    Nothing,
    Some(Duration),
    All,
}

/// When a read was sent and when its reply arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) sent: Moment,
    pub(crate) answered: Moment,
}

/// The version of each key's value, and since when this client has known it.
#[derive(Debug, Default)]
pub(crate) struct Ages(Mutex<HashMap<String, (String, Moment)>>);

impl Ages {
    /// Returns whether the value under `key` has expired. `age` is a lower bound for the value's
    /// age, if known.
    pub(crate) fn is_over(
        &self,
        key: &str,
        version: &str,
        life: Life,
        look: Look,
        age: Option<Duration>,
    ) -> bool {
        self.left(key, version, life, look, age) == Left::Nothing
    }

    /// Returns how much of the value's lifetime is left, as far as this client can know. The
    /// client's own clock does not make this version expire any sooner.
    pub(crate) fn left(
        &self,
        key: &str,
        version: &str,
        life: Life,
        look: Look,
        age: Option<Duration>,
    ) -> Left {
        match life {
            Life::Lasting => Left::All,
            Life::Over => Left::Nothing,
            Life::Short(life) => {
                let seen = self.seen_for(key, version, look);
                match life.saturating_sub(seen.max(age.unwrap_or_default())) {
                    Duration::ZERO => Left::Nothing,
                    left => Left::Some(left),
                }
            }
        }
    }

    /// Returns how long the given version has been known to exist.
    fn seen_for(&self, key: &str, version: &str, look: Look) -> Duration {
        let mut all = locked(&self.0);
        if let Some((known, first)) = all.get(key)
            && known == version
        {
            return look.sent.since(*first);
        }
        if all.len() >= MOST && !all.contains_key(key) {
            all.clear();
        }
        all.insert(key.to_owned(), (version.to_owned(), look.answered));
        Duration::ZERO
    }

    /// Forgets the key, because it no longer has a value.
    pub(crate) fn forget(&self, key: &str) {
        locked(&self.0).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIFE: Life = Life::Short(Duration::from_secs(20));

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn look(sent: u64, answered: u64) -> Look {
        Look { sent: at(sent), answered: at(answered) }
    }

    #[test]
    fn expiry_by_own_clock_needs_a_full_lifetime_between_reads() {
        let ages = Ages::default();
        let is_over = |version: &str, look| ages.is_over("k", version, LIFE, look, None);
        assert!(!is_over("a", look(1_000, 3_000)));
        assert!(!is_over("a", look(22_999, 40_000)));
        assert!(is_over("a", look(23_000, 40_000)));
        // The value was renewed.
        assert!(!is_over("b", look(41_000, 41_010)));
        assert!(!is_over("b", look(61_000, 61_010)));
        ages.forget("k");
        assert!(!is_over("b", look(90_000, 90_010)));
    }

    #[test]
    fn one_read_suffices_if_the_store_reports_ages() {
        let is_over = |age| Ages::default().is_over("k", "a", LIFE, look(0, 1), Some(age));
        assert!(!is_over(Duration::from_millis(19_999)));
        assert!(is_over(Duration::from_secs(20)));
    }

    #[test]
    fn lasting_values_never_expire_and_removed_ones_are_expired() {
        let age = Some(Duration::MAX);
        assert!(!Ages::default().is_over("k", "a", Life::Lasting, look(0, 1), age));
        assert!(Ages::default().is_over("k", "a", Life::Over, look(0, 1), None));
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        /// A session's client relies on the lifetime minus the grain, counted from when it *sent*
        /// its last renewal. No client finds the session expired before that, however slow it is
        /// and however wrong the ages are within the grain.
        #[test]
        fn session_is_not_found_expired_while_its_client_relies_on_it(
            life in 4_000..60_000_u64,
            wrong in 0..=2_000_u64,
            touches in proptest::collection::vec((0..9_000_u64, 0..3_000_u64), 1..8),
            looks in proptest::collection::vec((0..9_000_u64, 0..9_000_u64, 0..9_000_u64), 1..30),
        ) {
            // When each version was written, and until when its client relies on it.
            let mut now = 100_000;
            let mut versions = Vec::new();
            for (pause, on_the_way) in touches {
                now += pause;
                versions.push((now + on_the_way, now + life - 2_000));
                now += on_the_way;
            }
            let ages = Ages::default();
            let mut sent = versions[0].0;
            for (pause, there, back) in looks {
                sent += pause;
                let (looked, answered) = (sent + there, sent + there + back);
                let (i, &(written, believes)) = versions.iter().enumerate()
                    .rfind(|(_, (written, _))| *written <= looked)
                    .expect("no version was written before the read");
                let age = Duration::from_millis(looked - written + wrong);
                let life = Life::Short(Duration::from_millis(life));
                if ages.is_over("k", &i.to_string(), life, look(sent, answered), Some(age)) {
                    prop_assert!(looked >= believes, "{looked} < {believes}");
                }
                sent = answered;
            }
        }

        /// Every dead session is found to have expired.
        #[test]
        fn every_dead_session_is_found_expired(life in 1_000..60_000_u64, pauses in proptest::collection::vec(1..5_000_u64, 1..40)) {
            let ages = Ages::default();
            let is_over = |at| {
                ages.is_over("k", "a", Life::Short(Duration::from_millis(life)), look(at, at), None)
            };
            let mut now = 0;
            for pause in pauses {
                prop_assert_eq!(is_over(now), now >= life);
                now += pause;
            }
            prop_assert!(is_over(now.max(life)));
        }
    }
}
