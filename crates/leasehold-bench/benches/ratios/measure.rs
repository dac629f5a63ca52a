//! How the ratios are measured: alternately, on one clock, and reported as medians.
//!
//! A shared machine never has the same speed twice. So the subjects that are compared run
//! alternately, A B A B, in rounds. A ratio is taken within each round, and its median is reported.

use std::error::Error;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::figures::Kind;
use crate::kept;
pub(crate) use crate::numbers::{digits, duration, median, percentile};

pub(crate) type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// The extent of the measurements.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    /// Duration of one measurement.
    pub(crate) time: Duration,
    /// Number of holders that are killed in a round.
    pub(crate) kills: usize,
    /// Number of contenders in a crowd.
    pub(crate) crowd: usize,
}

impl Effort {
    pub(crate) const FULL: Self =
        Self { rounds: 9, time: Duration::from_millis(500), kills: 20, crowd: 1_000 };
    /// The smallest extent, which only shows that everything runs.
    pub(crate) const QUICK: Self =
        Self { rounds: 1, time: Duration::from_millis(50), kills: 2, crowd: 10 };
}

/// A subject: its name and a measurement of it.
pub(crate) struct Subject<'a, T> {
    name: &'a str,
    run: Box<dyn FnMut() -> Result<T> + 'a>,
}

impl<'a, T> Subject<'a, T> {
    pub(crate) fn new(name: &'a str, run: impl FnMut() -> Result<T> + 'a) -> Self {
        Self { name, run: Box::new(run) }
    }
}

/// All rounds of one subject.
pub(crate) struct Measured<'a, T> {
    pub(crate) name: &'a str,
    pub(crate) rounds: Vec<T>,
}

impl<T> Measured<'_, T> {
    /// Returns the median of one figure over the rounds.
    pub(crate) fn median(&self, figure: impl Fn(&T) -> f64) -> f64 {
        median(self.rounds.iter().map(figure).collect())
    }

    /// Returns the median over the rounds of this figure, relative to `other`'s figure in the same
    /// round.
    pub(crate) fn ratio(&self, other: &Self, figure: impl Fn(&T) -> f64) -> f64 {
        let both = self.rounds.iter().zip(&other.rounds);
        median(both.map(|(a, b)| figure(a) / figure(b)).collect())
    }
}

/// Saves the results of each round of a table, for [`glance`](crate::glance).
pub(crate) fn keep<T>(
    kind: Kind,
    title: &str,
    measured: &[Measured<'_, T>],
    figure: impl Fn(&T) -> f64,
) {
    for m in measured {
        kept::keep(kind, title, m.name, m.rounds.iter().map(&figure).collect());
    }
}

/// Measures the subjects alternately, after one round of each that does not count.
pub(crate) fn alternate<T>(
    effort: Effort,
    mut subjects: Vec<Subject<'_, T>>,
) -> Result<Vec<Measured<'_, T>>> {
    let mut measured: Vec<Measured<'_, T>> =
        subjects.iter().map(|s| Measured { name: s.name, rounds: Vec::new() }).collect();
    for round in 0..=effort.rounds {
        for (subject, measured) in subjects.iter_mut().zip(&mut measured) {
            let measurement = (subject.run)()?;
            if round > 0 {
                measured.rounds.push(measurement);
            }
        }
    }
    Ok(measured)
}

/// Returns nanoseconds on a clock that all processes of this machine share.
pub(crate) fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

/// Returns Jain's fairness index of the shares. It is 1 when all are equal, and 1/n when one has
/// everything.
pub(crate) fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|x| x * x).sum();
    sum * sum / (shares.len() as f64 * squares)
}

/// Formats a count per second with three digits.
pub(crate) fn rate(per_second: f64) -> String {
    match per_second {
        r if r < 1e3 => digits(r),
        r if r < 1e6 => format!("{} k", digits(r / 1e3)),
        r => format!("{} M", digits(r / 1e6)),
    }
}

/// Prints a table in Markdown.
pub(crate) fn table(title: &str, head: &[&str], rows: Vec<Vec<String>>) {
    let mut table = format!("\n### {title}\n\n| {} |\n", head.join(" | "));
    table += &format!("|---|{}\n", "--:|".repeat(head.len() - 1));
    for row in rows {
        table += &format!("| {} |\n", row.join(" | "));
    }
    print!("{table}");
    kept::keep_table(&table);
}
