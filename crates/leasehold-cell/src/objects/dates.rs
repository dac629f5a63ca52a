//! The age of an object by the servers' clocks: the time from its `Last-Modified` to the `Date` of
//! the reply. Both timestamps have whole seconds, so one second is subtracted. The clocks of the
//! servers that set them may differ by up to [`SKEW`].
//!
//! object_store returns when an object was written, but not the servers' current time. So the date
//! of each reply is passed on to the code that reads the reply.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Datelike};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, GetResult};

/// Maximum difference between the clocks of the servers that set timestamps.
pub(super) const SKEW: Duration = Duration::from_secs(2);
/// The resolution of the timestamps.
const SECOND: Duration = Duration::from_secs(1);

/// Returns a lower bound for the age of an object, if the reply had a date.
pub(super) fn age(found: &GetResult) -> Option<Duration> {
    let Date(date) = *found.extensions.get::<Date>()?;
    Some(between(found.meta.last_modified.timestamp(), date))
}

fn between(modified: i64, date: i64) -> Duration {
    let seconds = u64::try_from(date.saturating_sub(modified)).unwrap_or(0);
    Duration::from_secs(seconds).saturating_sub(SECOND)
}

/// The time of a reply by the server's clock, in seconds since 1970.
#[derive(Clone, Copy, Debug)]
struct Date(i64);

impl Date {
    /// Parses the header of a reply. Returns `None` if it is not a date.
    fn read(header: &str) -> Option<Self> {
        let date = DateTime::parse_from_rfc2822(header).ok()?.to_utc();
        // The format has four digits for the year.
        (0..=9_999).contains(&date.year()).then(|| Self(date.timestamp()))
    }
}

/// A connector that adds a [`Date`] to the extensions of each reply.
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
    fn age_is_the_difference_of_timestamps_minus_their_resolution() {
        assert_eq!(between(1_000, 1_021), Duration::from_secs(20));
        // The clock was set back, or the timestamps are invalid.
        assert_eq!(between(1_000, 900), Duration::ZERO);
        assert_eq!(between(i64::MAX, i64::MIN), Duration::ZERO);
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_date_is_parsed_or_ignored(text in testbed::texts(&[
            "Sun, 06 Nov 1994 08:49:37 GMT", "Tue, 29 Feb 2028 23:59:60 GMT",
            "Wed, 25 Nov 2026 04:31:29 +0200", "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ])) {
            if let Some(Date(seconds)) = Date::read(&text) {
                let date = DateTime::from_timestamp(seconds, 0).unwrap();
                prop_assert_eq!(Date::read(&date.to_rfc2822()).unwrap().0, seconds);
            }
        }

        #[test]
        fn dates_are_parsed_as_servers_write_them(seconds in 0..253_402_300_800_i64) {
            let date = DateTime::from_timestamp(seconds, 0).unwrap();
            let written = date.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
            prop_assert_eq!(Date::read(&written).map(|date| date.0), Some(seconds));
        }
    }
}
