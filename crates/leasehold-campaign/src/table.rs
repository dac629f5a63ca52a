//! Makes the numbers of `docs/internals/reliability.md` from the runs.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::faults::Faults;
use crate::run::{Outcome, Promise, Run};
use crate::store::Store;

/// Number of operations after which the campaign is complete, if there are enough faults.
pub const ENOUGH_OPERATIONS: u64 = 10_000_000;
/// Number of faults after which the campaign is complete, if there are enough operations.
pub const ENOUGH_FAULTS: u64 = 50_000;

/// The promises in the order of the rows, with their descriptions.
const PROMISES: [(&str, &str); 12] = [
    ("exclusion", "one holder at a time"),
    ("token-order", "tokens increase"),
    ("token-unique", "no token is granted twice"),
    ("effect", "the fenced resource accepts no stale write"),
    ("updates", "the fenced resource loses no acknowledged update"),
    ("unfenced", "the unfenced resource loses no acknowledged update (stores without leases)"),
    ("fifo", "FIFO order"),
    ("recovery", "a dead holder's lock is freed in time"),
    ("wakeup", "every call returns"),
    ("renewal", "live holders keep their locks"),
    ("residue", "nothing is left in the store at the end"),
    ("outcome", "every error has a cause"),
];

/// The totals of some runs.
#[derive(Default)]
struct Sum {
    runs: u64,
    void: u64,
    failed: u64,
    seconds: u64,
    operations: u64,
    grants: u64,
    lost_holds: u64,
    late_refused: u64,
    unfenced_spoilt: u64,
    injected: BTreeMap<String, u64>,
    promises: BTreeMap<String, Promise>,
    /// Numbers of the runs that broke a promise.
    violated: Vec<usize>,
}

impl Sum {
    fn of<'r>(runs: impl IntoIterator<Item = &'r Run>) -> Self {
        let mut sum = Self::default();
        for run in runs {
            sum.add(run);
        }
        sum
    }

    fn add(&mut self, run: &Run) {
        self.runs += 1;
        self.void += u64::from(run.outcome == Outcome::Void);
        self.failed += u64::from(run.outcome == Outcome::Failed);
        self.seconds += run.seconds;
        self.operations += run.operations;
        self.grants += run.grants;
        self.lost_holds += run.lost_holds;
        self.late_refused += run.late_refused;
        self.unfenced_spoilt += run.unfenced_spoilt;
        for (kind, times) in &run.injected {
            *self.injected.entry(kind.clone()).or_default() += times;
        }
        for (name, promise) in &run.promises {
            let all = self.promises.entry(name.clone()).or_default();
            all.broken += promise.broken;
            if let Some(cases) = promise.cases {
                *all.cases.get_or_insert(0) += cases;
            }
        }
        if run.outcome == Outcome::Violated {
            self.violated.push(run.run);
        }
    }

    fn faults(&self) -> u64 {
        self.injected.values().sum()
    }

    /// Returns the kept promises as `11 of 11`.
    fn kept(&self) -> String {
        let kept = self.promises.values().filter(|promise| promise.broken == 0).count();
        format!("{kept} of {}", self.promises.len())
    }

    /// Returns `none`, or a link for each run that broke a promise.
    fn violations(&self) -> String {
        let link = |run: &usize| format!("[run {run}](#run-{run})");
        match self.violated.as_slice() {
            [] => "none".into(),
            runs => runs.iter().map(link).collect::<Vec<_>>().join(", "),
        }
    }

    /// Formats the number of runs, for example `1,234 (12 void)`.
    fn runs(&self) -> String {
        let odd = [(self.void, "void"), (self.failed, "not run")];
        let odd: Vec<String> =
            odd.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        match odd.is_empty() {
            true => grouped(self.runs),
            false => format!("{} ({})", grouped(self.runs), odd.join(", ")),
        }
    }

    fn counts(&self) -> String {
        [self.operations, self.grants, self.faults()].map(grouped).join(" | ")
    }
}

/// Formats `1234567` as `1,234,567`.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Returns the progress of the campaign in one or two sentences.
pub fn progress(runs: &[Run]) -> String {
    let sum = Sum::of(runs);
    let (operations, faults) = (sum.operations, sum.faults());
    let mut text = format!(
        "{} runs, {} minutes: {} operations and {} faults.",
        grouped(sum.runs),
        grouped(sum.seconds / 60),
        grouped(operations),
        grouped(faults),
    );
    let short = [
        (ENOUGH_OPERATIONS.saturating_sub(operations), "operations", ENOUGH_OPERATIONS),
        (ENOUGH_FAULTS.saturating_sub(faults), "faults", ENOUGH_FAULTS),
    ];
    for (missing, what, wanted) in short.into_iter().filter(|(missing, ..)| *missing > 0) {
        let (missing, wanted) = (grouped(missing), grouped(wanted));
        let _ = write!(text, " The campaign still needs {missing} of {wanted} {what}.");
    }
    text
}

/// Returns all of the page's numbers.
pub fn tables(runs: &[Run]) -> String {
    let mut text = format!("{}\n\n", progress(runs));
    text.push_str(&by_store(runs));
    text.push_str(&by_faults(runs));
    text.push_str(&by_promise(runs));
    text
}

fn by_store(runs: &[Run]) -> String {
    let mut text = "\
### By store

| store | server | runs | operations | grants | faults | guarantees kept | violations |
|---|---|--:|--:|--:|--:|--:|---|
"
    .to_owned();
    for store in Store::ALL {
        for version in ["oldest", "newest"] {
            let of_it = |run: &&Run| run.store == store.name() && run.version == version;
            let here: Vec<&Run> = runs.iter().filter(of_it).collect();
            let Some(last) = here.last() else { continue };
            let sum = Sum::of(here.iter().copied());
            let server = if last.server.is_empty() { "–" } else { &last.server };
            let _ = writeln!(
                text,
                "| `{}` | {server} | {} | {} | {} | {} |",
                store.name(),
                sum.runs(),
                sum.counts(),
                sum.kept(),
                sum.violations(),
            );
        }
    }
    let sum = Sum::of(runs);
    let _ = writeln!(
        text,
        "| **all** | | {} | {} | {} | {} |\n",
        sum.runs(),
        sum.counts(),
        sum.kept(),
        sum.violations(),
    );
    text
}

fn by_faults(runs: &[Run]) -> String {
    let mut text = "\
### By fault

| fault | runs | minutes | operations | grants | faults | holds lost | stale writes rejected | damage without fencing | violations |
|---|--:|--:|--:|--:|--:|--:|--:|--:|---|
"
    .to_owned();
    for faults in Faults::ALL {
        let name = faults.to_string();
        let sum = Sum::of(runs.iter().filter(|run| run.faults == name));
        if sum.runs == 0 {
            continue;
        }
        let words = match faults {
            Faults::All => "all client faults",
            Faults::Servers => "server faults (crash, pause, fail-over) and client faults",
            Faults::Pause => "clients paused",
            Faults::Kill => "clients killed",
            Faults::Cut => "clients partitioned",
            Faults::Stale => "clients paused between the requests of a call",
            Faults::Clocks => "clients' wall clocks up to an hour wrong, and all client faults",
            Faults::Outage => "servers partitioned, power of all servers cut, and client faults",
        };
        let _ = writeln!(
            text,
            "| {words} | {} | {} | {} | {} | {} | {} | {} |",
            sum.runs(),
            grouped(sum.seconds / 60),
            sum.counts(),
            grouped(sum.lost_holds),
            grouped(sum.late_refused),
            grouped(sum.unfenced_spoilt),
            sum.violations(),
        );
    }
    text.push('\n');
    text
}

fn by_promise(runs: &[Run]) -> String {
    let mut text = "\
### By guarantee

| guarantee | checked in | cases | broken |
|---|--:|--:|--:|
"
    .to_owned();
    let sum = Sum::of(runs);
    for (name, words) in PROMISES {
        let Some(promise) = sum.promises.get(name) else { continue };
        let judged = runs.iter().filter(|run| run.promises.contains_key(name)).count() as u64;
        let cases = promise.cases.map_or("–".into(), grouped);
        let _ = writeln!(
            text,
            "| {words} | {} runs | {cases} | {} |",
            grouped(judged),
            grouped(promise.broken)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")];
        for (n, text) in cases {
            assert_eq!(grouped(n), text);
        }
    }

    #[test]
    fn broken_guarantee_is_counted_and_links_to_its_run() {
        let line = r#"{"run":1,"at":"","store":"memory","version":"newest","server":"","faults":"all",
            "outcome":"fine","operations":5,"injected":{"pause":2},
            "promises":{"effect":{},"exclusion":{"cases":4}}}"#;
        let fine: Run = serde_json::from_str(line).unwrap();
        let mut broken = Run { run: 2, outcome: Outcome::Violated, ..fine.clone() };
        broken.promises.insert("exclusion".into(), Promise { cases: Some(3), broken: 1 });
        let kept = tables(std::slice::from_ref(&fine));
        assert!(kept.contains("| 5 | 0 | 2 | 2 of 2 | none |"), "{kept}");
        let all = tables(&[fine, broken]);
        assert!(all.contains("| 10 | 0 | 4 | 1 of 2 | [run 2](#run-2) |"), "{all}");
        assert!(all.contains("| one holder at a time | 2 runs | 7 | 1 |"), "{all}");
    }
}
