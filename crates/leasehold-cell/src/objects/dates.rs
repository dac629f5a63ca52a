//! How old an object is, by the servers' clock: between its `Last-Modified` and the `Date` of the answer that
//! shows it. Both are stamped in whole seconds, so a second is taken off; and the servers that stamped them
//! may differ by [`SKEW`].
//!
//! object_store tells when an object was written, but not by the same clock what time it is. So the date of
//! each answer is handed on to where the answer is read.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Datelike};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, GetResult};

/// How far the clocks of the servers that stamp may be apart.
pub(super) const SKEW: Duration = Duration::from_secs(2);
/// The grain of the stamps.
const SECOND: Duration = Duration::from_secs(1);

/// How old at least what was found is, if its answer had a date.
pub(super) fn age(found: &GetResult) -> Option<Duration> {
    let Date(date) = *found.extensions.get::<Date>()?;
    Some(between(found.meta.last_modified.timestamp(), date))
}

fn between(modified: i64, date: i64) -> Duration {
    let seconds = u64::try_from(date.saturating_sub(modified)).unwrap_or(0);
    Duration::from_secs(seconds).saturating_sub(SECOND)
}

/// When the server says that it answered, in seconds since 1970.
#[derive(Clone, Copy, Debug)]
struct Date(i64);

impl Date {
    /// From an answer's header; `None` for what is no date.
    fn read(header: &str) -> Option<Self> {
        let date = DateTime::parse_from_rfc2822(header).ok()?.to_utc();
        // A year has four digits.
        (0..=9_999).contains(&date.year()).then(|| Self(date.timestamp()))
    }
}

/// Makes connections whose answers have a [`Date`] among their extensions.
#[derive(Debug)]
pub(super) struct Dated(pub(super) reqwest::Client);

impl HttpConnector for Dated {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Service(HttpClient::new(self.0.clone()))))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut response = self.0.execute(request).await?;
        let date = response.headers().get("date").and_then(|date| date.to_str().ok());
        if let Some(date) = date.and_then(Date::read) {
            response.extensions_mut().insert(date);
        }
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_age_is_what_lies_between_the_stamps_less_their_grain() {
        assert_eq!(between(1_000, 1_021), Duration::from_secs(20));
        // A clock that was set back, and stamps from nowhere.
        assert_eq!(between(1_000, 900), Duration::ZERO);
        assert_eq!(between(i64::MAX, i64::MIN), Duration::ZERO);
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_date_from_outside_is_read_or_passed_by(said in testbed::texts(&[
            "Sun, 06 Nov 1994 08:49:37 GMT", "Tue, 29 Feb 2028 23:59:60 GMT",
            "Wed, 25 Nov 2026 04:31:29 +0200", "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ])) {
            if let Some(Date(seconds)) = Date::read(&said) {
                let date = DateTime::from_timestamp(seconds, 0).unwrap();
                prop_assert_eq!(Date::read(&date.to_rfc2822()).unwrap().0, seconds);
            }
        }

        #[test]
        fn a_date_is_read_as_servers_write_it(seconds in 0..253_402_300_800_i64) {
            let date = DateTime::from_timestamp(seconds, 0).unwrap();
            let written = date.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
            prop_assert_eq!(Date::read(&written).map(|date| date.0), Some(seconds));
        }
    }
}
