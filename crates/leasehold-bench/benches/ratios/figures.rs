//! The results of each round, as they are kept next to the documentation.
//!
//! The file has sorted lines `KIND ⇥ TABLE ⇥ SUBJECT ⇥ NANOSECONDS…`. Each subject of each table
//! has one figure per round, in the order of the rounds, so that ratios can be taken within a
//! round. A later run replaces the lines that it measured again and keeps the others.

use std::collections::BTreeMap;
use std::fmt::Write;

/// The quantity of a figure, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// One pair of acquire and release.
    Pair,
    /// From one holder to the next, as the median of a round.
    HandOver,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Pair, Self::HandOver];

    const fn word(self) -> &'static str {
        match self {
            Self::Pair => "pair",
            Self::HandOver => "hand-over",
        }
    }
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Figures(BTreeMap<(Kind, String, String), Vec<f64>>);

impl Figures {
    pub(crate) fn note(&mut self, kind: Kind, table: &str, subject: &str, rounds: Vec<f64>) {
        self.0.insert((kind, table.to_owned(), subject.to_owned()), rounds);
    }

    /// Returns the rounds of one subject.
    pub(crate) fn of(&self, kind: Kind, table: &str, subject: &str) -> Option<&[f64]> {
        let key = (kind, table.to_owned(), subject.to_owned());
        self.0.get(&key).map(Vec::as_slice)
    }

    /// Adds the figures of `others` for subjects that this one does not have.
    #[allow(dead_code, reason = "each reader uses all of them")]
    pub(crate) fn or(mut self, others: Self) -> Self {
        for (key, rounds) in others.0 {
            self.0.entry(key).or_insert(rounds);
        }
        self
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut figures = Self::default();
        for line in text.lines() {
            let wrong = || format!("not a line of figures: {line}");
            let mut parts = line.split('\t');
            let mut next = || parts.next().ok_or_else(wrong);
            let (word, table, subject) = (next()?, next()?, next()?);
            let kind = Kind::ALL.into_iter().find(|kind| kind.word() == word).ok_or_else(wrong)?;
            let rounds: Result<Vec<f64>, _> = parts.map(str::parse).collect();
            figures.note(kind, table, subject, rounds.map_err(|_| wrong())?);
        }
        Ok(figures)
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for ((kind, table, subject), rounds) in &self.0 {
            let mut line = format!("{}\t{table}\t{subject}", kind.word());
            for nanos in rounds {
                write!(line, "\t{nanos:.0}")?;
            }
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}
