//! The options of an acquisition.

use std::time::Duration;

use crate::words::error::{Error, ErrorKind, Result};
use crate::words::limits::{DEFAULT_LEASE, MAX_LEASE, MIN_LEASE, drift};

/// What the builder methods of every lock set.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) lease: Duration,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_validity: Duration,
    pub(crate) lock_delay: Duration,
    pub(crate) at_least: Duration,
    pub(crate) label: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lease: DEFAULT_LEASE,
            renew: true,
            max_hold: None,
            min_validity: Duration::ZERO,
            lock_delay: Duration::ZERO,
            at_least: Duration::ZERO,
            label: String::new(),
        }
    }
}

impl Options {
    /// Refuses what could never work, before anything is sent. `lease` is what the store makes of the
    /// lease asked for.
    pub(crate) fn check(&self, lease: Duration) -> Result<()> {
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
        if self.lease < MIN_LEASE || self.lease > MAX_LEASE {
            return refused(format!(
                "a lease of {:?} is out of range: choose {MIN_LEASE:?} to {MAX_LEASE:?}",
                self.lease
            ));
        }
        let longest = || lease.saturating_sub(drift(lease));
        if !self.min_validity.is_zero() && self.min_validity > longest() {
            let longest = longest();
            return refused(format!(
                "min_validity {:?} can never be met by a lease of {lease:?} (at most \
                 {longest:?}): ask for less or lease for longer",
                self.min_validity
            ));
        }
        if self.max_hold.is_some_and(|m| m.is_zero()) {
            return refused("max_hold is zero: nothing could be held".into());
        }
        if self.max_hold.is_some_and(|m| m < self.min_validity) {
            return refused("max_hold is shorter than min_validity: nothing could be held".into());
        }
        for (what, d) in [("lock_delay", self.lock_delay), ("at_least", self.at_least)] {
            if d > MAX_LEASE * 366 {
                return refused(format!("{what} {d:?} is longer than a year"));
            }
        }
        Ok(())
    }
}

/// The builder methods that every kind of lock has.
macro_rules! option_methods {
    () => {
        /// How long a grant lasts unrenewed (default 15 s, at least 50 ms). A crashed holder's
        /// lock is free after this; a store without leases (`file:`) takes it for information.
        ///
        /// What is handed over to a waiter lasts six seconds at first, if that is less, and is renewed
        /// to a whole lease within moments; [`min_validity`](Self::min_validity) waits for that.
        pub fn lease(mut self, lease: std::time::Duration) -> Self {
            self.handle.options.lease = lease;
            self
        }

        /// Never renews: the hold ends when its lease does, whatever the holder is doing.
        pub fn no_renewal(mut self) -> Self {
            self.handle.options.renew = false;
            self
        }

        /// Holds no longer than this: then the guard is lost and the lock released, even though
        /// the holder lives.
        pub fn max_hold(mut self, longest: std::time::Duration) -> Self {
            self.handle.options.max_hold = Some(longest);
            self
        }

        /// Takes the lock only with at least this much validity left when the caller gets it.
        pub fn min_validity(mut self, least: std::time::Duration) -> Self {
            self.handle.options.min_validity = least;
            self
        }

        /// Keeps the lock closed this long after an *unclean* end of the hold, for resources
        /// that cannot check tokens (Chubby's lock-delay; its default there is a minute).
        /// `Unsupported` where the store keeps nothing of an unclean end.
        pub fn lock_delay(mut self, delay: std::time::Duration) -> Self {
            self.handle.options.lock_delay = delay;
            self
        }

        /// Keeps the lock taken for this long after it was granted, even when it is released
        /// earlier: once per period, on however many machines.
        pub fn at_least(mut self, period: std::time::Duration) -> Self {
            self.handle.options.at_least = period;
            self
        }

        /// Called with our place in the queue when we join it and whenever it changes, from
        /// whatever thread waits.
        pub fn on_waiting(
            mut self,
            tell: impl Fn(crate::store::Place) + Send + Sync + 'static,
        ) -> Self {
            self.handle.on_waiting = Some(std::sync::Arc::new(tell));
            self
        }

        /// What the holder says of itself to people who look (at most 256 bytes are kept).
        pub fn label(mut self, text: impl Into<String>) -> Self {
            self.handle.options.label = text.into();
            self
        }
    };
}
pub(crate) use option_methods;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_options_are_refused_in_one_line() {
        let bad = [
            Options { lease: Duration::ZERO, ..Options::default() },
            Options { lease: Duration::MAX, ..Options::default() },
            Options { min_validity: DEFAULT_LEASE, ..Options::default() },
            Options { max_hold: Some(Duration::ZERO), ..Options::default() },
            Options { lock_delay: Duration::MAX, ..Options::default() },
        ];
        for options in bad {
            let error = options.check(options.lease).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert_eq!(error.to_string().lines().count(), 1);
        }
        Options::default().check(DEFAULT_LEASE).unwrap();
    }
}
