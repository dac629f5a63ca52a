//! `leasehold doctor`: what a store guarantees with its present configuration, what breaks the
//! guarantees, and how to fix it.
//!
//! The library diagnoses each store, and this module prints the findings. A store that rejects its
//! configuration is a finding as well.

use std::io::{Write, stdout};
use std::process::ExitCode;

use leasehold::doctor::{Finding, Severity};
use leasehold::store::Guarantees;
use leasehold::store::kit::{is_no_store, public_secrets};
use leasehold::{Error, ErrorKind};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::block_on::block_on;
use crate::exit::{self, Failure};
use crate::table::{aligned, clean};
use crate::take::connect_to_existing;

pub(crate) fn main(args: &DoctorArgs) -> ExitCode {
    match block_on(examine(args)) {
        Ok(seen) => {
            let text = if args.json { seen.json() } else { seen.text() };
            // A closed stdout is not a failure.
            let _ = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
            ExitCode::from(if seen.is_broken() { exit::BROKEN } else { 0 })
        }
        Err(failure) => failure.report(),
    }
}

/// The diagnosis of a store.
struct Seen {
    store: Option<String>,
    guarantees: Option<Guarantees>,
    findings: Vec<Finding>,
}

async fn examine(args: &DoctorArgs) -> Result<Seen, Failure> {
    let url = args.store.url();
    let scheme = url.split(':').next().unwrap_or_default();
    // A new store can be examined only after it has been created.
    let (connected, is_new) = match connect_to_existing(&args.store).await {
        Err(error) if is_no_store(&error) => (args.store.connect().await, true),
        connected => (connected, false),
    };
    let locks = match connected {
        Ok(locks) => locks,
        Err(error) if is_refusal(&error) && is_known(scheme) => {
            let store = error.store().map(str::to_owned);
            return Ok(Seen { store, guarantees: None, findings: vec![refused(&error)] });
        }
        Err(error) => return Err(error.into()),
    };
    let guarantees = Some(locks.guarantees().clone());
    let store = Some(locks.url().to_owned());
    let diagnosed = locks.diagnose().await;
    // Nothing is held, so a failure to close has no effect.
    let _ = locks.close().await;
    let mut findings = match diagnosed {
        Ok(findings) => findings,
        // The service answers this user's claims, if they have the token's prefix.
        Err(error) if error.kind() == ErrorKind::Denied && scheme.starts_with("http") => {
            vec![Finding::note("denied", error.reason(), NO_RIGHT)]
        }
        Err(error) if is_refusal(&error) => vec![refused(&error)],
        Err(error) => return Err(error.into()),
    };
    findings.extend(public_secrets(url));
    findings.extend(is_new.then(created));
    Ok(Seen { store, guarantees, findings })
}

fn is_known(scheme: &str) -> bool {
    leasehold::BUILT_IN.contains(&scheme)
        || matches!(
            scheme,
            "postgresql" | "mariadb" | "rediss" | "redlocks" | "https" | "http+unix"
        )
}

/// Returns whether the store itself returned the error, which means that it is reachable.
fn is_refusal(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Closed | ErrorKind::Timeout)
}

/// What the token of a service lacks.
const NO_RIGHT: &str = "only a token with the right inspect for all names can check the store";

fn created() -> Finding {
    Finding::note(
        "created",
        "this store did not exist, so doctor has created it",
        "if you expected an existing store, check the URL",
    )
}

fn refused(error: &Error) -> Finding {
    Finding::broken(
        "refused",
        error.reason(),
        "this store cannot keep locks with its current configuration",
        error.hint().unwrap_or_default().to_owned(),
    )
}

impl Seen {
    fn is_broken(&self) -> bool {
        self.findings.iter().any(|f| f.severity == Severity::Broken)
    }

    fn json(&self) -> String {
        #[derive(Serialize)]
        struct Shown<'a> {
            store: Option<&'a str>,
            ok: bool,
            findings: &'a [Finding],
            guarantees: Option<&'a Guarantees>,
        }
        let shown = Shown {
            store: self.store.as_deref(),
            ok: !self.is_broken(),
            findings: &self.findings,
            guarantees: self.guarantees.as_ref(),
        };
        serde_json::to_string_pretty(&shown).map(|text| text + "\n").unwrap_or_default()
    }

    fn text(&self) -> String {
        let mut text = format!("Store: {}\n\n", clean(self.store.as_deref().unwrap_or("unknown")));
        for finding in &self.findings {
            let Finding { severity, what, why, fix, .. } = finding;
            text.push_str(&format!("{severity}: {}\n  why: {}\n", clean(what), clean(why)));
            if !fix.is_empty() {
                text.push_str(&format!("  fix: {}\n", clean(fix)));
            }
            text.push('\n');
        }
        let counted = |severity| self.findings.iter().filter(|f| f.severity == severity).count();
        let summary = match (counted(Severity::Broken), counted(Severity::Weak)) {
            (0, 0) => "No problems found".to_owned(),
            (0, weak) => format!("{weak} weak, no guarantee is broken"),
            (broken, 0) => format!("{broken} broken"),
            (broken, weak) => format!("{broken} broken, {weak} weak"),
        };
        text.push_str(&format!("Result: {summary}\n"));
        if let Some(guarantees) = &self.guarantees {
            text.push_str("\nGuarantees with this configuration:\n");
            let row = |(question, answer): (&str, String)| vec![format!("  {question}"), answer];
            let rows: Vec<Vec<String>> = guarantees.in_words().into_iter().map(row).collect();
            text.push_str(&aligned(&rows));
            if !guarantees.notes.is_empty() {
                text.push_str("\nNotes:\n");
            }
            for note in guarantees.notes.iter() {
                text.push_str(&format!("  - {}\n", clean(note)));
            }
        }
        text
    }
}
