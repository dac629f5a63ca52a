//! A run and what the checker makes of it, together: what there is to be shown.

use super::checker::{self, Findings};
use super::history::History;
use super::report::Report;
use super::trial::Trial;

/// A run and what the checker makes of it.
pub(super) struct Judged {
    pub(super) trial: Trial,
    pub(super) history: History,
    pub(super) findings: Findings,
    pub(super) report: Report,
}

impl Judged {
    /// The one way in which a history is judged, wherever it comes from.
    pub(super) fn new(trial: Trial, history: History) -> Self {
        let findings = checker::check(&history, &trial.terms);
        let report = Report::new(&trial, &history, &findings);
        Self { trial, history, findings, report }
    }
}
