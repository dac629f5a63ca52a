//! `leasehold stress --history` and `--check`: a run that is checked again, and histories that
//! other programs wrote.

use std::path::Path;

use crate::common::torture;
use serde_json::Value;

/// A history with two concurrent holders.
const TWO_HOLDERS: &str = r#"{"format":"leasehold-history","version":1,"store":"somebody else's","locks":[{"name":"a","kind":"mutex","capacity":1}],"promises":["exclusion"]}
{"event":"invoked","worker":0,"n":0,"at":1000000,"lock":0}
{"event":"acquired","worker":0,"n":0,"at":2000000}
{"event":"held","worker":0,"n":0,"at":3000000}
{"event":"invoked","worker":1,"n":0,"at":4000000,"lock":0}
{"event":"acquired","worker":1,"n":0,"at":5000000}
{"event":"held","worker":1,"n":0,"at":6000000}
{"event":"releasing","worker":1,"n":0,"at":7000000}
{"event":"releasing","worker":0,"n":0,"at":8000000}
{"event":"end","at":9000000}
"#;

/// Returns the exit code, standard output and standard error.
fn outcome(arguments: &[&str]) -> (Option<i32>, String, String) {
    let out = torture(arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

fn path(directory: &Path, name: &str) -> String {
    directory.join(name).display().to_string()
}

#[test]
fn recorded_run_gets_the_same_verdict_again() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(directory.path(), "run.jsonl");
    for run in
        ["--store memory: --seconds 3", "--store memory: --seconds 1 --lease 60s --fault none"]
    {
        let words: Vec<&str> = run.split(' ').collect();
        let (code, report, errors) =
            outcome(&[&words[..], &["--json", "--history", &file]].concat());
        assert!(matches!(code, Some(0 | 3)), "{report}{errors}");
        let report: Value = serde_json::from_str(&report).unwrap();
        assert!(report["grants"].as_u64() > Some(10), "{report}");
        let (again, judged, errors) = outcome(&["--json", "--check", &file]);
        assert_eq!(again, code, "{errors}");
        assert_eq!(serde_json::from_str::<Value>(&judged).unwrap(), report);
    }
}

#[test]
fn password_is_not_written_to_files() {
    let directory = tempfile::tempdir().unwrap();
    let (file, page) = (path(directory.path(), "h"), path(directory.path(), "p.html"));
    let server =
        testbed::Redis::with(testbed::Setup::new().fast().arg("--requirepass").arg("open-sesame"));
    let words = ["--store", &server.url(), "--seconds", "1", "--history", &file, "--html", &page];
    assert!(server.url().contains("open-sesame"));
    let (code, report, errors) = outcome(&words);
    assert!(matches!(code, Some(0 | 3)), "{report}{errors}");
    for file in [file, page] {
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.contains("--store") && !text.contains("open-sesame"));
    }
}

#[test]
fn history_from_another_program_is_judged_like_a_run() {
    let directory = tempfile::tempdir().unwrap();
    let (file, page) = (path(directory.path(), "h.jsonl"), path(directory.path(), "page.html"));
    std::fs::write(&file, TWO_HOLDERS).unwrap();
    let (code, report, errors) = outcome(&["--check", &file, "--html", &page]);
    assert_eq!(code, Some(1), "{report}{errors}");
    assert!(report.contains("a: 1.0 (held 4.000 to 6.000 ms) while 0.0"), "{report}");
    assert!(report.ends_with("did not keep its promises: mutual exclusion\n"), "{report}");
    assert!(std::fs::read_to_string(page).unwrap().contains("somebody else's"));
    let alone = TWO_HOLDERS.lines().filter(|line| !line.contains("\"worker\":1"));
    std::fs::write(&file, alone.collect::<Vec<_>>().join("\n")).unwrap();
    let (code, report, _) = outcome(&["--check", &file]);
    assert_eq!(code, Some(3), "{report}");
}

#[test]
fn invalid_history_is_rejected_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = path(directory.path(), "h.jsonl");
    let newer = TWO_HOLDERS.replacen("\"version\":1", "\"version\":99", 1);
    let cases = [
        ("", "is empty"),
        ("{}\n", "line 1: not the header of a history"),
        (&newer, "line 1: unsupported format version 99: this program reads version 1"),
        (&TWO_HOLDERS[..TWO_HOLDERS.len() - 10], "line 10: "),
        (&TWO_HOLDERS.replace("acquired", "gained"), "line 3: unknown variant `gained`"),
    ];
    for (text, expected) in cases {
        std::fs::write(&file, text).unwrap();
        let (code, report, errors) = outcome(&["--check", &file]);
        assert_eq!((code, report.as_str()), (Some(2), ""), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.contains(&file) && errors.contains(expected), "{errors}");
    }
    let missing = path(directory.path(), "missing");
    for not_a_file in [missing.as_str(), directory.path().to_str().unwrap()] {
        let (code, _, errors) = outcome(&["--check", not_a_file]);
        assert_eq!((code, errors.lines().count()), (Some(2), 1), "{errors}");
        assert!(errors.contains(not_a_file), "{errors}");
    }
    let (code, _, errors) = outcome(&["--check", &file, "--seconds", "3"]);
    assert_eq!(code, Some(2), "{errors}");
}

#[test]
fn unwritable_file_is_reported_before_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let nowhere = path(directory.path(), "no/such/page.html");
    for option in ["--html", "--history"] {
        let began = std::time::Instant::now();
        let (code, _, errors) =
            outcome(&["--store", "memory:", "--seconds", "60", option, &nowhere]);
        assert_eq!((code, errors.lines().count()), (Some(2), 1), "{errors}");
        assert!(errors.contains(&nowhere), "{errors}");
        assert!(began.elapsed().as_secs() < 30, "the run began before the error");
    }
    // The old file stays until there is something to replace it.
    let page = path(directory.path(), "page.html");
    std::fs::write(&page, "of yesterday").unwrap();
    let (code, ..) = outcome(&["--store", "carrier-pigeon:", "--html", &page]);
    assert_eq!(code, Some(2));
    assert_eq!(std::fs::read_to_string(&page).unwrap(), "of yesterday");
    // A device reports an error only at the end.
    let (code, report, errors) =
        outcome(&["--store", "memory:", "--seconds", "1", "--html", "/dev/full"]);
    assert_eq!((code, errors.lines().count()), (Some(2), 1), "{errors}");
    assert!(report.contains("memory:"), "the report is missing: {report}");
}
