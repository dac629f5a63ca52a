//! A run together with the checker's findings, which is everything that can be shown.

use super::checker::{self, Findings};
use super::history::History;
use super::report::Report;
use super::trial::Trial;

/// A run together with the checker's findings.
pub(super) struct Judged {
    pub(super) trial: Trial,
    pub(super) history: History,
    pub(super) findings: Findings,
    pub(super) report: Report,
}

impl Judged {
    /// Checks a history. All histories are checked here, from whatever source.
    pub(super) fn new(trial: Trial, history: History) -> Self {
        let findings = checker::check(&history, &trial.terms);
        let report = Report::new(&trial, &history, &findings);
        Self { trial, history, findings, report }
    }
}
