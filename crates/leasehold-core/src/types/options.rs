//! The options of an acquisition.

use std::time::Duration;

use crate::types::error::{Error, ErrorKind, Result};
use crate::types::limits::{DEFAULT_LEASE, MAX_LEASE, MIN_LEASE, drift};

/// The options with which a lock is acquired, as one value.
///
/// Use it for [all locks of a client](crate::Builder::options), or for [one
/// lock](crate::Mutex::options). The documentation of each field names the method that sets it for
/// one lock.
///
/// With the feature `serde`, it can be part of a program's configuration. Durations are text such
/// as `15s`, missing fields have their default, and unknown fields are rejected:
///
/// ```
/// # #[cfg(feature = "serde")] {
/// let options: leasehold::LockOptions =
///     serde_json::from_str(r#"{"lease": "1m 30s", "max_hold": "2h", "label": "billing"}"#).unwrap();
/// assert_eq!(options.lease.as_secs(), 90);
/// assert!(serde_json::from_str::<leasehold::LockOptions>(r#"{"leese": "1m"}"#).is_err());
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct LockOptions {
    /// The lease; see [`Mutex::lease`](crate::Mutex::lease).
    #[cfg_attr(feature = "serde", serde(with = "as_text"))]
    pub lease: Duration,
    /// Whether the lease is renewed automatically; see
    /// [`Mutex::no_renewal`](crate::Mutex::no_renewal).
    pub renew: bool,
    /// The longest hold; see [`Mutex::max_hold`](crate::Mutex::max_hold).
    #[cfg_attr(
        feature = "serde",
        serde(with = "as_text_if_any", skip_serializing_if = "Option::is_none")
    )]
    pub max_hold: Option<Duration>,
    /// The minimum validity of a new hold; see [`Mutex::min_validity`](crate::Mutex::min_validity).
    #[cfg_attr(feature = "serde", serde(with = "as_text"))]
    pub min_validity: Duration,
    /// The cooldown after an unclean end; see [`Mutex::lock_delay`](crate::Mutex::lock_delay).
    #[cfg_attr(feature = "serde", serde(with = "as_text"))]
    pub lock_delay: Duration,
    /// The minimum time from the grant until the lock is available again; see
    /// [`Mutex::min_hold`](crate::Mutex::min_hold).
    #[cfg_attr(feature = "serde", serde(with = "as_text"))]
    pub min_hold: Duration,
    /// The label of the holder; see [`Mutex::label`](crate::Mutex::label). If it is empty, the
    /// client's label is used.
    pub label: String,
}

impl Default for LockOptions {
    fn default() -> Self {
        Self {
            lease: DEFAULT_LEASE,
            renew: true,
            max_hold: None,
            min_validity: Duration::ZERO,
            lock_delay: Duration::ZERO,
            min_hold: Duration::ZERO,
            label: String::new(),
        }
    }
}

impl LockOptions {
    /// Rejects options that can never work, before anything is sent. `lease` is the requested
    /// lease, limited to what the store can guarantee.
    pub(crate) fn check(&self, lease: Duration) -> Result<()> {
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
        if self.lease < MIN_LEASE || self.lease > MAX_LEASE {
            return refused(format!(
                "invalid lease {:?}: expected {MIN_LEASE:?} to {MAX_LEASE:?}",
                self.lease
            ));
        }
        let longest = || lease.saturating_sub(drift(lease));
        if !self.min_validity.is_zero() && self.min_validity > longest() {
            let longest = longest();
            let what = format!(
                "min_validity {:?} is too long for a lease of {lease:?}, which allows at most \
                 {longest:?}",
                self.min_validity
            );
            let hint = "use a shorter min_validity or a longer lease";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        if self.max_hold.is_some_and(|m| m.is_zero()) {
            return refused("max_hold must be greater than zero".into());
        }
        if self.max_hold.is_some_and(|m| m < self.min_validity) {
            return refused(format!(
                "max_hold {:?} is shorter than min_validity {:?}",
                self.max_hold.unwrap_or_default(),
                self.min_validity
            ));
        }
        for (what, d) in [("lock_delay", self.lock_delay), ("min_hold", self.min_hold)] {
            if d > MAX_LEASE * 366 {
                return refused(format!("{what} {d:?} is longer than a year (366 days)"));
            }
        }
        Ok(())
    }
}

/// Durations in a human-readable form, such as `1m 30s`.
#[cfg(feature = "serde")]
mod as_text {
    use std::time::Duration;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(d: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*d))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(from)?;
        humantime::parse_duration(&text).map_err(|e| {
            D::Error::custom(format!(
                "invalid duration {text:?}: {e} (expected, for example, 15s or 1h 30m)"
            ))
        })
    }
}

#[cfg(feature = "serde")]
mod as_text_if_any {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// A duration in the form of `as_text`, for an optional field.
    #[derive(Deserialize)]
    struct Text(#[serde(with = "super::as_text")] Duration);

    pub(super) fn serialize<S: Serializer>(d: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match d {
            Some(d) => super::as_text::serialize(d, to),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<Text>::deserialize(from)?.map(|text| text.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_rejected_in_one_line() {
        let bad = [
            LockOptions { lease: Duration::ZERO, ..LockOptions::default() },
            LockOptions { lease: Duration::MAX, ..LockOptions::default() },
            LockOptions { min_validity: DEFAULT_LEASE, ..LockOptions::default() },
            LockOptions { max_hold: Some(Duration::ZERO), ..LockOptions::default() },
            LockOptions { lock_delay: Duration::MAX, ..LockOptions::default() },
        ];
        for options in bad {
            let error = options.check(options.lease).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert_eq!(format!("{error:#}").lines().count(), 1);
        }
        LockOptions::default().check(DEFAULT_LEASE).unwrap();
    }

    #[cfg(feature = "serde")]
    #[test]
    fn options_round_trip_through_json() {
        let mut options = LockOptions { label: "x".into(), ..LockOptions::default() };
        options.lease = Duration::from_millis(61_500);
        let text = serde_json::to_value(&options).unwrap();
        assert_eq!(text["lease"], "1m 1s 500ms");
        assert!(text.get("max_hold").is_none());
        assert_eq!(serde_json::from_value::<LockOptions>(text).unwrap(), options);
        options.max_hold = Some(Duration::from_secs(3600));
        let text = serde_json::to_value(&options).unwrap();
        assert_eq!(text["max_hold"], "1h");
        assert_eq!(serde_json::from_value::<LockOptions>(text).unwrap(), options);
        let read = |text: &str| serde_json::from_str::<LockOptions>(text);
        assert_eq!(read("{}").unwrap(), LockOptions::default());
        assert_eq!(read(r#"{"max_hold": null}"#).unwrap(), LockOptions::default());
        for bad in [r#"{"lease": "soon"}"#, r#"{"max_hold": "soon"}"#] {
            let error = read(bad).unwrap_err().to_string();
            assert!(
                error.contains("invalid duration \"soon\"") && error.contains("15s"),
                "{error}"
            );
        }
        assert!(read(r#"{"lese": "1s"}"#).unwrap_err().to_string().contains("lese"));
    }

    #[cfg(feature = "serde")]
    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_json_is_parsed_as_options_or_rejected(text in testbed::texts(&[
            r#"{"lease": "1m 30s", "max_hold": "2h", "label": "billing"}"#,
            r#"{"min_hold": "5s", "lock_delay": "1s", "min_validity": "9s", "renew": false, "max_hold": null}"#,
        ])) {
            if let Ok(read) = serde_json::from_str::<LockOptions>(&text) {
                let written = serde_json::to_string(&read).unwrap();
                proptest::prop_assert_eq!(serde_json::from_str::<LockOptions>(&written).unwrap(), read);
            }
        }
    }
}
