//! Durations as people write them on a command line.

use std::time::Duration;

/// A duration such as `10s`, `500ms` or `1h30m`; a bare number is seconds, as for `sleep` and
/// `flock -w`.
///
/// # Errors
/// What is wrong with it, in one line.
pub fn duration(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    humantime::parse_duration(text)
        .map_err(|e| format!("{e}; write it like 10s, 500ms, 5m or 1h30m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_what_people_write() {
        assert_eq!(duration("0").unwrap(), Duration::ZERO);
        assert_eq!(duration("90").unwrap(), Duration::from_secs(90));
        assert_eq!(duration("1h30m").unwrap(), Duration::from_secs(5400));
        for bad in ["", "-1", "soon", "5 parsecs", "1.5.2s", "99999999999999999999"] {
            let error = duration(bad).unwrap_err();
            assert!(error.contains("write it like"), "{bad}: {error}");
            assert_eq!(error.lines().count(), 1, "{bad}: {error}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_time_from_outside_is_read_or_refused_in_one_line(text in testbed::texts(&[
            "10s", "500ms", "1h30m", "90", "2days 3us",
        ])) {
            match duration(&text) {
                Ok(read) => {
                    let written = humantime::format_duration(read).to_string();
                    proptest::prop_assert_eq!(duration(&written), Ok(read));
                }
                Err(error) => proptest::prop_assert_eq!(error.lines().count(), 1, "{}", error),
            }
        }
    }
}
