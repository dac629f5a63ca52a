//! One run as it is in the state: what was done, and the results of torture's report.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Every promise was kept, and the run was conclusive.
    Fine,
    /// No promise was broken, but an expected effect is missing, such as a corrupted unfenced
    /// resource. The run's operations and faults still count.
    Void,
    /// A promise was broken.
    Violated,
    /// The run failed. For example, a server did not start, or torture ended without a report.
    Failed,
}

/// The result for a promise in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promise {
    /// Number of cases in which it was tested, if that is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cases: Option<u64>,
    /// How often it was broken.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub broken: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// A line of the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The run's number, from 1.
    pub run: usize,
    /// When it ended, UTC.
    pub at: String,
    /// Name of the store.
    pub store: String,
    /// `oldest` or `newest`.
    pub version: String,
    /// The server with its version. Empty if the store has no server.
    pub server: String,
    /// The faults: one kind, `all`, or `servers`.
    pub faults: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why the run is inconclusive or has failed, or which promises were broken by which events.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Duration.
    #[serde(default)]
    pub seconds: u64,
    /// Number of processes.
    #[serde(default)]
    pub clients: u64,
    /// Number of locks of each kind.
    #[serde(default)]
    pub locks: u64,
    /// Lease in milliseconds.
    #[serde(default)]
    pub lease_ms: u64,
    /// Seed of torture's random choices.
    #[serde(default)]
    pub seed: u64,
    /// Number of calls that requested a lock.
    #[serde(default)]
    pub operations: u64,
    /// Number of calls that acquired it.
    #[serde(default)]
    pub grants: u64,
    /// Number of holds that ended because they were lost.
    #[serde(default)]
    pub lost_holds: u64,
    /// How often each fault was injected.
    #[serde(default)]
    pub injected: BTreeMap<String, u64>,
    /// Number of calls that were not answered in time although no fault was active.
    #[serde(default)]
    pub unanswered: u64,
    /// Number of late writes that the fenced resources refused.
    #[serde(default)]
    pub late_refused: u64,
    /// Number of updates that the unfenced resources lost, plus late writes that they accepted.
    #[serde(default)]
    pub unfenced_spoilt: u64,
    /// The store's promises that were checked.
    #[serde(default)]
    pub promises: BTreeMap<String, Promise>,
}

impl Run {
    /// Returns how many faults were injected.
    pub fn faults_injected(&self) -> u64 {
        self.injected.values().sum()
    }

    /// Fills in the results of torture's report.
    ///
    /// # Errors
    /// The report is malformed.
    pub(crate) fn learn(&mut self, report: &Value) -> Result<(), String> {
        let number = |name: &str| {
            report[name].as_u64().ok_or_else(|| format!("torture's report has no number {name}"))
        };
        self.seconds = number("seconds")?;
        self.clients = number("clients")?;
        self.lease_ms = number("lease_ms")?;
        self.seed = number("seed")?;
        self.operations = number("operations")?;
        self.grants = number("grants")?;
        self.lost_holds = number("lost_holds")?;
        self.unanswered = number("unanswered")?;
        self.late_refused = number("fenced_writes_refused")?;
        let control = &report["negative_control"];
        let spoilt = ["acknowledged_updates_lost", "late_writes_taken"];
        self.unfenced_spoilt = spoilt.iter().filter_map(|name| control[name].as_u64()).sum();
        let faults = report["faults"].as_object().ok_or("torture's report has no faults")?;
        self.injected =
            faults.iter().filter_map(|(name, n)| Some((name.clone(), n.as_u64()?))).collect();
        let lines = report["properties"].as_array().ok_or("torture's report has no properties")?;
        let claimed = lines.iter().filter(|line| line["claimed"] == true);
        let promise = |line: &Value| {
            let name = line["property"].as_str()?.to_owned();
            let broken = line["violations"].as_u64()?;
            Some((name, Promise { cases: line["cases"].as_u64(), broken }))
        };
        self.promises = claimed.filter_map(promise).collect();
        let (outcome, notes, word) = match report["verdict"].as_str() {
            Some("fine") => (Outcome::Fine, &Value::Null, ""),
            Some("void") => (Outcome::Void, &report["void"], ""),
            Some("violated") => (Outcome::Violated, &report["violations"], "what"),
            _ => return Err("torture's report has no verdict".into()),
        };
        let text = |note: &Value| match word {
            "" => note.as_str().map(str::to_owned),
            word => {
                let property = note["property"].as_str()?;
                Some(format!("{property}: {}", note[word].as_str()?))
            }
        };
        self.outcome = outcome;
        self.notes = notes.as_array().into_iter().flatten().filter_map(text).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(report: &str) -> Result<Run, String> {
        let line = r#"{"run":1,"at":"","store":"redis","version":"oldest","server":"","faults":"all",
            "outcome":"failed"}"#;
        let mut run: Run = serde_json::from_str(line).unwrap();
        run.learn(&serde_json::from_str(report).unwrap()).map(|()| run)
    }

    #[test]
    fn broken_guarantee_is_recorded_with_its_violation() {
        let run = learnt(
            r#"{"verdict":"violated","seconds":9,"clients":2,"lease_ms":500,"seed":7,"operations":30,
            "grants":20,"lost_holds":1,"unanswered":0,"fenced_writes_refused":4,"faults":{"pause":3,"cut":2},
            "negative_control":{"acknowledged_updates_lost":5,"late_writes_taken":6},
            "properties":[{"property":"exclusion","claimed":true,"violations":1,"cases":20},
                {"property":"fifo","claimed":false,"violations":0,"cases":3},
                {"property":"effect","claimed":true,"violations":0,"cases":null}],
            "violations":[{"property":"exclusion","what":"two at once"}],"void":[]}"#,
        )
        .unwrap();
        assert_eq!(run.outcome, Outcome::Violated);
        assert_eq!(run.notes, ["exclusion: two at once"]);
        assert_eq!((run.faults_injected(), run.unfenced_spoilt, run.late_refused), (5, 11, 4));
        let exclusion = Promise { cases: Some(20), broken: 1 };
        let promises: Vec<_> = run.promises.into_iter().collect();
        let effect = ("effect".to_owned(), Promise::default());
        assert_eq!(promises, [effect, ("exclusion".to_owned(), exclusion)]);
    }

    #[test]
    fn invalid_report_is_rejected() {
        assert!(learnt("{}").unwrap_err().contains("no number seconds"));
    }
}
