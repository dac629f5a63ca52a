//! Formatting and parsing of durations for people.

use std::time::Duration;

/// Formats a duration for people, with at most two units.
pub fn short(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0 => format!("{} ms", d.as_millis()),
        1..10 if d.subsec_millis() >= 100 => format!("{:.1} s", d.as_secs_f64()),
        1..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Parses a duration such as `10s`, `500ms` or `1h30m`. A bare number is in seconds, as for `sleep`
/// and `flock -w`.
///
/// # Errors
/// A one-line description of what is wrong with the text.
#[cfg(feature = "serde")]
pub fn parse(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    let duration = humantime::parse_duration(text)
        .map_err(|_| "expected a duration such as 10s, 500ms, 5m or 1h30m".to_owned())?;
    // In other programs, M means minutes.
    match text.contains('M') {
        true => Err("the unit M means months: write m for minutes, or 30d for a month".to_owned()),
        false => Ok(duration),
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn human_readable_durations_are_parsed() {
        assert_eq!(parse("0").unwrap(), Duration::ZERO);
        assert_eq!(parse("90").unwrap(), Duration::from_secs(90));
        assert_eq!(parse("1h30m").unwrap(), Duration::from_secs(5400));
        assert!(parse("5M").unwrap_err().contains("m for minutes"));
        for bad in ["", "-1", "soon", "5 parsecs", "1.5.2s", "99999999999999999999"] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("expected a duration such as"), "{bad}: {error}");
            assert_eq!(error.lines().count(), 1, "{bad}: {error}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_text_is_parsed_or_rejected_in_one_line(text in testbed::texts(&[
            "10s", "500ms", "1h30m", "90", "2days 3us",
        ])) {
            match parse(&text) {
                Ok(read) => {
                    let written = humantime::format_duration(read).to_string();
                    proptest::prop_assert_eq!(parse(&written), Ok(read));
                }
                Err(error) => proptest::prop_assert_eq!(error.lines().count(), 1, "{}", error),
            }
        }
    }
}
