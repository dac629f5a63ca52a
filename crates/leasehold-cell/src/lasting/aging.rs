//! PURE: when the life of something is over that nothing in the system ends by itself.
//!
//! What has a life (a session, a mark in its place, a knock) says in its first line how long it lasts, and
//! is written anew to begin again. Whoever looks judges, by either of two:
//!
//! - *Our own clock*, since we first saw this very version. It was written before that; a clock that only
//!   counts up cannot take it for older than it is, whatever is set anywhere. That takes a second look, a whole
//!   life later: enough for who waits.
//! - *The system's clock*, where it tells how old what it shows is: an object store does, between the
//!   object's `Last-Modified` and the `Date` of the answer that shows it. One look is enough, for a `--try`
//!   from cron. What such an age may be wrong by is the system's grain, which a client adds to the life of
//!   its session and never counts on (`session.rs`).
//!
//! Neither our wall clock nor any other client's comes into it.
//!
//! - *A slow observer*: an answer that took long is older than it seems, so it is reckoned with from when it was
//!   asked for, and what it shows was first seen when it came.
//! - *A stale look* shows an old version, which may seem over. Nothing follows from that alone: whoever takes a
//!   session for gone writes in its place, if it is still what was seen.
//! - *A late write* of a session's client begins a life at its arrival, so later than the client reckons.
//! - *A system's clock that is set forward* ends sessions early. That is what no grain covers, and what the store's
//!   guarantees say.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use leasehold_core::Moment;
use leasehold_core::kit::locked;

/// So many objects are kept in mind: dead clients, and those in whose way somebody stands.
const MOST: usize = 4_096;

/// How long something lives that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// For good.
    Lasting,
    /// For so long.
    Short(Duration),
    /// It is over already: removed.
    Over,
}

/// What is left of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    Nothing,
    Some(Duration),
    All,
}

/// When a look was sent, and answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) sent: Moment,
    pub(crate) answered: Moment,
}

/// What was seen, and since when.
#[derive(Debug, Default)]
pub(crate) struct Ages(Mutex<HashMap<String, (String, Moment)>>);

impl Ages {
    /// Whether the life is over of what was seen under this key, and is at least of this age if that is known.
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

    /// How much is left of the life of what was seen so, as far as this observer can know. Until that has passed, it
    /// does not find the same version over by its own clock.
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

    /// For how long this version is known to have been there.
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

    /// There is nothing any more.
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
    fn our_own_clock_needs_a_whole_life_between_the_end_of_one_look_and_the_beginning_of_another() {
        let ages = Ages::default();
        let is_over = |version: &str, look| ages.is_over("k", version, LIFE, look, None);
        assert!(!is_over("a", look(1_000, 3_000)));
        assert!(!is_over("a", look(22_999, 40_000)));
        assert!(is_over("a", look(23_000, 40_000)));
        // It was touched.
        assert!(!is_over("b", look(41_000, 41_010)));
        assert!(!is_over("b", look(61_000, 61_010)));
        ages.forget("k");
        assert!(!is_over("b", look(90_000, 90_010)));
    }

    #[test]
    fn one_look_is_enough_where_an_age_is_told() {
        let is_over = |age| Ages::default().is_over("k", "a", LIFE, look(0, 1), Some(age));
        assert!(!is_over(Duration::from_millis(19_999)));
        assert!(is_over(Duration::from_secs(20)));
    }

    #[test]
    fn what_lasts_is_never_over_and_what_was_removed_is() {
        let age = Some(Duration::MAX);
        assert!(!Ages::default().is_over("k", "a", Life::Lasting, look(0, 1), age));
        assert!(Ages::default().is_over("k", "a", Life::Over, look(0, 1), None));
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        /// A session's client counts on the life, less the grain, since it *sent* its last touch. Whoever looks, how
        /// slowly and however wrong the ages are within the grain, never finds it over before that.
        #[test]
        fn nobody_is_gone_who_may_still_believe(
            life in 4_000..60_000_u64,
            wrong in 0..=2_000_u64,
            touches in proptest::collection::vec((0..9_000_u64, 0..3_000_u64), 1..8),
            looks in proptest::collection::vec((0..9_000_u64, 0..9_000_u64, 0..9_000_u64), 1..30),
        ) {
            // When each version came to be, and until when its client believes.
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
                    .rfind(|(_, (written, _))| *written <= looked).expect("the first is there");
                let age = Duration::from_millis(looked - written + wrong);
                let life = Life::Short(Duration::from_millis(life));
                if ages.is_over("k", &i.to_string(), life, look(sent, answered), Some(age)) {
                    prop_assert!(looked >= believes, "{looked} < {believes}");
                }
                sent = answered;
            }
        }

        /// And nobody is there for ever who is gone.
        #[test]
        fn who_is_gone_is_found_gone(life in 1_000..60_000_u64, pauses in proptest::collection::vec(1..5_000_u64, 1..40)) {
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
