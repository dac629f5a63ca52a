//! A history is read back as it was written, and an invalid file is refused with one line.

use super::super::checker::{check, strict, tests::generated};
use super::super::history::{Fault, Trouble};
use super::super::judged::Judged;
use super::super::trial::Fence;
use super::*;

fn trial() -> Trial {
    Trial {
        store: "memory:".into(),
        command: vec!["leasehold".into(), "torture".into(), "--seed".into(), "7".into()],
        seed: Some(u64::MAX),
        seconds: Some(10),
        clients: Some(6),
        lease_ms: Some(500),
        fence: Fence::Store,
        leases: true,
        faults: [Fault::Pause, Fault::Kill, Fault::Cut].into(),
        terms: strict(std::time::Duration::from_secs(3)),
    }
}

fn written(trial: &Trial, history: &History) -> String {
    let mut out = Vec::new();
    write(trial, history, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn written_history_is_read_back_unchanged() {
    for seed in 0..20 {
        let mut history = generated(seed, 1_500);
        history.crashes.push("worker 3 ended by itself".into());
        history.residue.push("a: still in the store".into());
        let fault = Some(Fault::Cut);
        let (worker, from, to, excuses_until) = (Some(4), 1, 2, 3);
        history.troubles.push(Trouble { worker, fault, from, to, excuses_until });
        let op = OpId { worker: 0, n: 0 };
        let tells = [
            What::Held { until: u64::MAX },
            What::Failed { kind: "lost".into(), error: "gone".into() },
            What::Lost { expired: false, reason: "taken away".into() },
        ];
        history.events.extend(tells.map(|what| Event { op, at: history.ended, what }));
        let text = written(&trial(), &history);
        let (trial_again, again) = read(text.as_bytes()).unwrap();
        assert_eq!((&trial_again, &again), (&trial(), &history));
        let verdict = |history| format!("{:?}", check(history, &trial().terms));
        assert_eq!(verdict(&again), verdict(&history));
        assert_eq!(written(&trial_again, &again), text);
    }
}

const HEADER: &str = r#"{"format":"leasehold-history","version":1,"store":"mine","locks":[{"name":"a","kind":"mutex","capacity":1},{"name":"s","kind":"semaphore","capacity":3}],"promises":["exclusion","outcome"]}"#;

/// Two clients that hold at the same time, as another program would write it, with only the
/// required fields.
const BODY: &str = r#"{"event":"invoked","worker":0,"n":0,"at":10,"lock":0}
{"event":"acquired","worker":0,"n":0,"at":20}
{"event":"held","worker":0,"n":0,"at":30}
{"event":"invoked","worker":1,"n":0,"at":40,"lock":0,"somebody":"else's field"}
{"event":"acquired","worker":1,"n":0,"at":50}
{"event":"held","worker":1,"n":0,"at":60}
{"event":"write","worker":1,"n":0,"lock":0,"resource":"plain"}
{"event":"wrote","worker":1,"n":0,"at":70,"plain":true}
{"event":"releasing","worker":1,"n":0,"at":80}
{"event":"releasing","worker":0,"n":0,"at":90}
{"event":"final","lock":0,"resource":"plain","value":1,"set":[[1,0]]}
{"event":"end","at":100}
"#;

#[test]
fn history_from_another_program_is_judged() {
    let (trial, history) = read(format!("{HEADER}\n{BODY}").as_bytes()).unwrap();
    let judged = Judged::new(trial, history);
    let violations = &judged.findings.violations;
    assert_eq!(violations.len(), 1, "{violations:?}");
    assert_eq!(violations[0].property, Property::Exclusion);
    assert!(violations[0].what.contains("1.0"), "{violations:?}");
    assert!(judged.report.to_string().contains("FAIL: mine"), "{}", judged.report);
}

/// Returns the reason why `text` is refused.
fn refusal(text: &str) -> String {
    let why = read(text.as_bytes()).map(|_| ()).unwrap_err();
    assert!(!why.chars().any(char::is_control), "{why:?}");
    why
}

/// Returns invalid files, each with a part of the expected reason.
pub(in super::super) fn refused() -> Vec<(String, &'static str)> {
    let with = |line: &str| format!("{HEADER}\n{line}\n{{\"event\":\"end\",\"at\":1}}\n");
    let invoked = r#"{"event":"invoked","worker":0,"n":0,"at":1,"lock":0}"#;
    let ops = |lines: &[&str]| with(&lines.join("\n"));
    let promises = |promise: &str| HEADER.replace("\"outcome\"", &format!("\"{promise}\""));
    vec![
        (String::new(), "is empty"),
        ("\n".into(), "line 1: not the header"),
        ("carrier pigeons".into(), "line 1: not the header"),
        ("{\"format\":\"x\",\"version\":1}".into(), "line 1: unknown format \"x\""),
        (
            HEADER.replace("\"version\":1", "\"version\":2"),
            "unsupported format version 2: this program reads version 1",
        ),
        (
            "{\"format\":\"leasehold-history\",\"version\":1}".into(),
            "line 1: invalid header: missing field",
        ),
        (HEADER.replace("exclusion", "wisdom"), "unknown variant `wisdom`"),
        (HEADER.replace("\"capacity\":1", "\"capacity\":0"), "is 0"),
        (promises("recovery"), "recovery_ms"),
        (HEADER.into(), "incomplete"),
        (with("{\"event\":\"aquired\"}"), "line 2: unknown variant `aquired`"),
        (with("{\"event\":\"a\\u001b[2J\\nquired\"}"), "line 2: unknown variant"),
        (with("\u{1b}[2J"), "line 2: "),
        (with(&invoked.replace("\"lock\":0", "\"lock\":2")), "line 2: no lock 2"),
        (with(&invoked.replace("\"at\":1", "\"at\":-1")), "line 2: "),
        (
            with(&invoked.replace("\"lock\":0", "\"lock\":1,\"weight\":4")),
            "must be between 1 and 3",
        ),
        (
            with(&invoked.replace("\"lock\":0", "\"lock\":1,\"weight\":0")),
            "must be between 1 and 3",
        ),
        (ops(&[invoked, invoked]), "line 3: operation 0.0 was invoked twice"),
        (with(r#"{"event":"held","worker":0,"n":7,"at":1}"#), "operation 0.7 was never invoked"),
        (with(r#"{"event":"stall","from":2,"to":1}"#), "ends before it begins"),
        (
            with(r#"{"event":"fault","fault":"cut","from":1,"to":3,"excuses_until":2}"#),
            "ends before it begins",
        ),
        (with(r#"{"event":"fault","fault":"kill","from":1,"to":3}"#), "\"killed\""),
        (ops(&[r#"{"event":"killed","worker":1,"at":3}"#; 2]), "killed twice"),
        (
            ops(&[invoked, r#"{"event":"wrote","worker":0,"n":0,"at":1,"plain":true}"#]),
            "no final state",
        ),
        (
            with(r#"{"event":"write","worker":0,"n":0,"lock":0,"resource":"fenced"}"#),
            "no final state",
        ),
        (
            ops(&[r#"{"event":"final","lock":0,"resource":"plain","value":0,"set":[]}"#; 2]),
            "duplicate",
        ),
        (format!("{HEADER}\n{BODY}{BODY}"), "line 14: unexpected line after"),
        (format!("{}\n{BODY}", promises("token-order")), "some grants or writes have no token"),
    ]
}

#[test]
fn invalid_history_is_rejected_with_line_and_reason() {
    for (text, expected) in refused() {
        let why = refusal(&text);
        assert!(why.contains(expected), "{why}\n{text}");
    }
}

#[test]
fn file_truncated_anywhere_is_rejected() {
    let whole = format!("{HEADER}\n{BODY}");
    for end in 0..whole.trim_end().len() {
        refusal(&whole[..end]);
    }
}

/// Checks that a file is either refused, or can be checked, drawn and written again.
fn try_all(text: &str) {
    let Ok((trial, history)) = read(text.as_bytes()) else {
        refusal(text);
        return;
    };
    let text = written(&trial, &history);
    assert_eq!(read(text.as_bytes()).unwrap(), (trial.clone(), history.clone()));
    let judged = Judged::new(trial, history);
    let _ = judged.report.to_string();
    let _ = crate::page::page(&judged);
}

const LINES: &[&str] = &[
    r#"{"event":"invoked","worker":0,"n":0,"at":10,"lock":1,"weight":2,"ask":"try"}"#,
    r#"{"event":"waiting","worker":0,"n":0,"at":11,"ahead":3}"#,
    r#"{"event":"acquired","worker":0,"n":0,"at":20,"token":9}"#,
    r#"{"event":"held","worker":0,"n":0,"at":21,"until":50}"#,
    r#"{"event":"lost","worker":0,"n":0,"at":60,"expired":true,"reason":"late"}"#,
    r#"{"event":"wrote","worker":0,"n":0,"at":40,"plain":false,"fenced":false}"#,
    r#"{"event":"releasing","worker":0,"n":0,"at":61}"#,
    r#"{"event":"released","worker":0,"n":0,"at":62}"#,
    r#"{"event":"failed","worker":0,"n":0,"at":62,"kind":"lost","error":"gone"}"#,
    r#"{"event":"abandoned","worker":0,"n":0,"at":12}"#,
    r#"{"event":"killed","worker":0,"at":44}"#,
    r#"{"event":"fault","fault":"pause","worker":0,"from":22,"to":44,"excuses_until":99}"#,
    r#"{"event":"stall","from":30,"to":31}"#,
    r#"{"event":"crashed","what":"worker 9 ended"}"#,
    r#"{"event":"residue","what":"a: still there"}"#,
    r#"{"event":"final","lock":1,"resource":"fenced","value":0,"set":[]}"#,
];

proptest::proptest! {
    #![proptest_config(testbed::cases())]

    /// Inserts one arbitrary line between valid ones.
    #[test]
    fn arbitrary_line_is_read_or_rejected(text in testbed::texts(LINES)) {
        let invoked = LINES[0];
        try_all(&format!("{HEADER}\n{text}\n{invoked}\n{text}\n{{\"event\":\"end\",\"at\":100}}\n"));
        try_all(&format!("{HEADER}\n{invoked}\n{text}\n{{\"event\":\"end\",\"at\":100}}\n"));
    }

    /// Tries an arbitrary header, and an arbitrary file.
    #[test]
    fn arbitrary_file_is_read_or_rejected(
        header in testbed::texts(&[HEADER]),
        body in testbed::texts(&[BODY]),
    ) {
        try_all(&format!("{header}\n{BODY}"));
        try_all(&format!("{HEADER}\n{body}"));
    }
}
