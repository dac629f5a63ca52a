//! Durations as text.

use std::time::Duration;

/// Formats a duration for people, with two significant units.
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
