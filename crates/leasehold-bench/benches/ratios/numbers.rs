//! Computes medians and formats figures.

pub(crate) fn median(values: Vec<f64>) -> f64 {
    percentile(values, 0.5)
}

/// Returns the smallest value that at least this share of the values does not exceed. NaN if
/// `values` is empty.
pub(crate) fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Formats a duration in nanoseconds with three digits.
pub(crate) fn duration(nanos: f64) -> String {
    let (value, unit) = match nanos {
        n if n < 1e3 => (n, "ns"),
        n if n < 1e6 => (n / 1e3, "µs"),
        n if n < 1e9 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    format!("{} {unit}", digits(value))
}

/// Formats a plain number with three digits.
pub(crate) fn digits(value: f64) -> String {
    let places = match value.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.0995 => 2,
        _ => 3,
    };
    format!("{value:.places$}")
}
