//! The results of a run, for people and for programs.

use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use leasehold::Kind;
use serde::Serialize;

use super::checker::{Findings, Property, Violation};
use super::history::{Fault, History};
use super::trial::{Fence, Trial};

/// Maximum number of violations shown per property. All are counted.
const SHOWN: usize = 3;
/// Minimum number of grants of a kind of lock. With fewer, the run is inconclusive.
const LEAST_GRANTS: usize = 10;

/// The outcome in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Every promise was kept.
    Fine,
    /// A promise was broken.
    Violated,
    /// No violation, but the run is inconclusive.
    Void,
}

/// How the unfenced resources fared in runs in which they must lose updates.
#[derive(Clone, Debug, Serialize)]
struct NegativeControl {
    /// Whether the unfenced resources must lose updates. That needs leases, pauses and a lock that
    /// excludes.
    required: bool,
    acknowledged_updates_lost: usize,
    late_writes_taken: usize,
}

#[derive(Clone, Debug, Serialize)]
struct Line {
    property: Property,
    #[serde(skip)]
    name: String,
    claimed: bool,
    violations: usize,
    /// Number of cases, if they are counted. A promised property with 0 cases and no violation is
    /// shown as "not exercised".
    cases: Option<usize>,
}

/// The report of one run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    verdict: Verdict,
    /// The verdict in a sentence.
    summary: String,
    /// Why the run is inconclusive, if it is.
    void: Vec<String>,
    store: String,
    seconds: Option<u64>,
    clients: Option<u32>,
    lease_ms: Option<u64>,
    seed: Option<u64>,
    /// Where the fenced resource was.
    fence: Fence,
    leases: bool,
    operations: usize,
    grants: usize,
    grants_by_kind: BTreeMap<String, usize>,
    lost_holds: usize,
    faults: BTreeMap<Fault, usize>,
    /// Number of calls that the store did not answer in time although no fault was active.
    unanswered: usize,
    fenced_updates_kept: usize,
    fenced_writes_refused: usize,
    negative_control: NegativeControl,
    /// Number of killed holders whose lock another client waited for.
    recoveries: usize,
    median_recovery_ms: Option<u128>,
    longest_recovery_ms: Option<u128>,
    allowed_recovery_ms: Option<u64>,
    properties: Vec<Line>,
    violations: Vec<Violation>,
}

impl Report {
    pub(super) fn new(trial: &Trial, history: &History, findings: &Findings) -> Self {
        let injected = trial.injected(history);
        let line = |property: Property| Line {
            property,
            name: property.to_string(),
            claimed: trial.terms.claimed.contains(&property),
            violations: findings.violations.iter().filter(|v| v.property == property).count(),
            cases: match property {
                Property::Exclusion | Property::TokenOrder | Property::TokenUnique => {
                    Some(findings.grants)
                }
                Property::Updates => Some(findings.fenced_kept),
                Property::Fifo => Some(findings.fair_waiters),
                Property::Recovery => Some(findings.recoveries.len()),
                _ => None,
            },
        };
        let properties: Vec<Line> = Property::ALL.into_iter().map(line).collect();
        let mut shown: BTreeMap<Property, usize> = BTreeMap::new();
        let mut violations = findings.violations.clone();
        violations.sort_by_key(|v| v.property);
        violations.retain(|v| {
            let n = shown.entry(v.property).or_default();
            *n += 1;
            *n <= SHOWN
        });
        let excludes = history.locks.iter().any(|l| l.kind != Kind::Semaphore);
        let negative_control = NegativeControl {
            required: trial.leases && injected.contains_key(&Fault::Pause) && excludes,
            acknowledged_updates_lost: findings.plain_lost.len(),
            late_writes_taken: findings.plain_late.len(),
        };
        let words = |kind: Kind| match kind {
            Kind::Mutex => "mutex",
            Kind::RwLock => "rwlock",
            Kind::Semaphore => "semaphore",
        };
        let mut grants_by_kind: BTreeMap<String, usize> = BTreeMap::new();
        for (lock, grants) in history.locks.iter().zip(&findings.grants_by_lock) {
            *grants_by_kind.entry(words(lock.kind).to_owned()).or_default() += grants;
        }
        let mut recoveries = findings.recoveries.clone();
        recoveries.sort_unstable();
        let mut report = Self {
            verdict: Verdict::Fine,
            summary: String::new(),
            void: Vec::new(),
            store: trial.store.clone(),
            seconds: trial.seconds,
            clients: trial.clients,
            lease_ms: trial.lease_ms,
            seed: trial.seed,
            fence: trial.fence,
            leases: trial.leases,
            operations: findings.operations,
            grants: findings.grants,
            grants_by_kind,
            lost_holds: findings.lost_holds,
            faults: injected,
            unanswered: findings.unanswered,
            fenced_updates_kept: findings.fenced_kept,
            fenced_writes_refused: findings.fenced_refused,
            negative_control,
            recoveries: recoveries.len(),
            median_recovery_ms: recoveries.get(recoveries.len() / 2).map(Duration::as_millis),
            longest_recovery_ms: recoveries.last().map(Duration::as_millis),
            allowed_recovery_ms: trial.terms.recovery_ms,
            properties,
            violations,
        };
        report.judge();
        report
    }

    fn judge(&mut self) {
        for (kind, grants) in &self.grants_by_kind {
            if *grants < LEAST_GRANTS {
                self.void.push(format!("the {kind} was granted only {grants} times"));
            }
        }
        for (fault, times) in &self.faults {
            if *times == 0 {
                self.void.push(format!("the fault {fault} was never injected"));
            }
        }
        let NegativeControl { required, acknowledged_updates_lost, late_writes_taken } =
            self.negative_control;
        if required && acknowledged_updates_lost + late_writes_taken == 0 {
            self.void.push(
                "the unfenced resources lost nothing, although processes were paused".to_owned(),
            );
        }
        let broken: Vec<&str> =
            self.properties.iter().filter(|p| p.violations > 0).map(|p| p.name.as_str()).collect();
        (self.verdict, self.summary) = match (broken.is_empty(), self.void.is_empty()) {
            (false, _) => (
                Verdict::Violated,
                format!("FAIL: {} did not keep its promises: {}", self.store, broken.join(", ")),
            ),
            (true, false) => (
                Verdict::Void,
                format!(
                    "INCONCLUSIVE: no violation, but the run was too short to show anything ({}). Run \
                     longer, with more processes or with a longer lease",
                    self.void.join("; ")
                ),
            ),
            (true, true) => (Verdict::Fine, format!("PASS: {} kept all its promises", self.store)),
        };
    }

    /// Returns the outcome in one word.
    pub(super) fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Returns the outcome in a sentence.
    pub(super) fn summary(&self) -> &str {
        &self.summary
    }

    /// Returns 0 if all promises were kept, 1 if one was broken, and 3 if the run is inconclusive.
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.verdict {
            Verdict::Fine => 0,
            Verdict::Violated => 1,
            Verdict::Void => 3,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.clients.map(|n| format!("{n} processes")),
            self.seconds.map(|n| format!("{n} s")),
            self.lease_ms.map(|n| format!("lease {n} ms")),
            self.seed.map(|n| format!("seed {n}")),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        match parts.is_empty() {
            true => writeln!(f, "{}", self.store)?,
            false => writeln!(f, "{} ({})", self.store, parts.join(", "))?,
        }
        let by_kind: Vec<String> =
            self.grants_by_kind.iter().map(|(kind, n)| format!("{kind} {n}")).collect();
        let (operations, grants) = (self.operations, self.grants);
        writeln!(f, "{operations} operations, {grants} grants ({})", by_kind.join(", "))?;
        let faults: Vec<String> =
            self.faults.iter().map(|(fault, n)| format!("{fault} {n}")).collect();
        let faults = if faults.is_empty() { "none".into() } else { faults.join(", ") };
        writeln!(f, "faults: {faults}; {} holds lost", self.lost_holds)?;
        writeln!(
            f,
            "fenced resource in the {}: {} updates kept, {} late writes rejected",
            match self.fence {
                Fence::Process => "process",
                Fence::Store => "store",
            },
            self.fenced_updates_kept,
            self.fenced_writes_refused
        )?;
        let NegativeControl { required, acknowledged_updates_lost, late_writes_taken } =
            &self.negative_control;
        writeln!(
            f,
            "unfenced resource: {acknowledged_updates_lost} acknowledged updates lost, \
             {late_writes_taken} late writes accepted ({})",
            match required {
                true => "expected where leases expire: fencing prevents this",
                false if self.leases => "nothing is promised",
                false => "must be none: without leases, no hold expires",
            }
        )?;
        if let (Some(median), Some(longest)) = (self.median_recovery_ms, self.longest_recovery_ms) {
            writeln!(
                f,
                "{} holders were killed while others waited: the lock was free after {median} ms \
                 (median), {longest} ms (longest{})",
                self.recoveries,
                self.allowed_recovery_ms.map_or(String::new(), |ms| format!("; allowed: {ms} ms")),
            )?;
        }
        if self.unanswered > 0 {
            writeln!(
                f,
                "{} calls timed out although no fault was injected: the store is slow or the \
                 machine is busy",
                self.unanswered
            )?;
        }
        writeln!(f)?;
        for line in &self.properties {
            let state = match (line.claimed, line.violations, line.cases) {
                (false, ..) => "not promised".into(),
                (true, 0, Some(0)) => "not exercised".into(),
                (true, 0, Some(n)) => format!("kept ({n} cases)"),
                (true, 0, None) => "kept".into(),
                (true, n, _) => format!("VIOLATED {n} times"),
            };
            writeln!(f, "  {:<32} {state}", line.name)?;
            for violation in self.violations.iter().filter(|v| v.property == line.property) {
                writeln!(f, "      {}", violation.what)?;
            }
        }
        write!(f, "\n{}", self.summary)
    }
}
