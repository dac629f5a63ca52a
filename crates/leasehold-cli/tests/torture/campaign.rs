//! A campaign of many stress runs: it records its runs, and continues after an interruption.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use leasehold_campaign::{Campaign, Ended, Outcome, Run, State, Store, pieces, read, table};

const STORES: [Store; 2] = [Store::Memory, Store::File];

/// Continues the campaign until no further piece fits into six seconds. A piece takes four seconds
/// on stores that are as fast as these.
fn go_on(state: &Path) -> Vec<Run> {
    let campaign = Campaign {
        program: env!("CARGO_BIN_EXE_leasehold").into(),
        stores: STORES.to_vec(),
        time: Duration::from_secs(6),
        piece: Duration::from_secs(1),
        keep: state.with_file_name("kept"),
        is_told: false,
    };
    let mut state_of_it = State::open(state).unwrap();
    let other = State::open(state).map(|_| ()).unwrap_err();
    assert!(other.contains("another campaign"), "{other}");
    assert_eq!(campaign.go_on(&mut state_of_it), Ok(Ended::Time));
    read(&std::fs::read_to_string(state).unwrap()).unwrap()
}

#[test]
fn campaign_resumes_where_it_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("runs.jsonl");
    let first = go_on(&state);
    assert!(!first.is_empty());
    // This simulates a machine that crashed in the middle of a line.
    let mut file = OpenOptions::new().append(true).open(&state).unwrap();
    file.write_all(br#"{"run":99,"at":"20"#).unwrap();
    let all = go_on(&state);
    assert!(all.len() > first.len(), "{} runs at first, and then {}", first.len(), all.len());
    assert_eq!(all[..first.len()], first);
    // Each piece is run once, in order, and then again from the first one.
    for (run, piece) in all.iter().zip(pieces(&STORES).iter().cycle()) {
        let what = (run.store.as_str(), run.faults.as_str());
        assert_eq!(what, (piece.store.name(), piece.faults.to_string().as_str()));
        // Four seconds on a busy machine may be too short to prove every guarantee, or for any
        // operation, but no guarantee may be broken.
        assert!(matches!(run.outcome, Outcome::Fine | Outcome::Void), "{run:?}");
        assert!(run.operations > 0 || run.outcome == Outcome::Void, "{run:?}");
        assert!(!run.promises.is_empty(), "{run:?}");
    }
    let kept = std::fs::read_dir(directory.path().join("kept")).unwrap().count();
    assert_eq!(kept, 0, "a history was kept, although no run broke a promise");
    let operations: u64 = all.iter().map(|run| run.operations).sum();
    assert!(operations > 0, "{all:?}");
    let page = table::tables(&all);
    assert!(page.contains("| `memory` | – |"), "{page}");
    let minutes: String = page
        .split("minutes: ")
        .nth(1)
        .unwrap()
        .chars()
        .take_while(|c| c.is_ascii_digit() || *c == ',')
        .filter(char::is_ascii_digit)
        .collect();
    assert_eq!(minutes, operations.to_string(), "{page}");
}

#[test]
fn failed_run_is_recorded_and_the_campaign_continues() {
    let directory = tempfile::tempdir().unwrap();
    let mut state = State::open(&directory.path().join("runs.jsonl")).unwrap();
    let campaign = Campaign {
        program: "/bin/false".into(),
        stores: vec![Store::Memory],
        time: Duration::from_millis(4_050),
        piece: Duration::from_secs(1),
        keep: directory.path().join("kept"),
        is_told: false,
    };
    assert_eq!(campaign.go_on(&mut state), Ok(Ended::Time));
    let [first, ..] = state.runs() else { panic!("the state has no runs") };
    assert_eq!(first.outcome, Outcome::Failed);
    assert!(first.notes[0].contains("without a report"), "{first:?}");
    assert!(table::tables(state.runs()).contains("not run"));
}
