//! The checker and `contrib/check_history.py`, which shares no code with it, reach the same verdicts.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fastrand::Rng;
use leasehold::Kind;

use super::super::archive::{self, tests::refused};
use super::super::history::{
    Ask, Event, Fault, History, LockSpec, OpId, Resource, Time, Trouble, What, Write,
};
use super::super::trial::Trial;
use super::tests::{MUTATIONS, SHAPES, generate, terms};
use super::{Property, Terms, check};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

type Verdict = BTreeSet<Property>;

/// Runs the second checker on files of `directory`.
fn second(directory: &Path, files: &[String]) -> Output {
    let program = Path::new(REPOSITORY).join("contrib/check_history.py");
    let mut command = Command::new("python3");
    command.env("PYTHONDONTWRITEBYTECODE", "1").current_dir(directory).arg(program).args(files);
    command.output().unwrap()
}

/// The promises that the second checker reports as broken in each file.
fn verdicts_of_second(directory: &Path, files: &[String]) -> Vec<Verdict> {
    let output = second(directory, files);
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut verdicts = vec![Verdict::new(); files.len()];
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let parts: Vec<&str> = line.splitn(4, ": ").collect();
        let [file, lines, promise, _] = parts[..] else { panic!("{line}") };
        assert!(lines.starts_with("line"), "{line}");
        let file = files.iter().position(|other| other == file).unwrap();
        verdicts[file].insert(serde_json::from_value(promise.into()).unwrap());
    }
    let found = verdicts.iter().any(|verdict| !verdict.is_empty());
    assert_eq!(output.status.code(), Some(i32::from(found)));
    verdicts
}

/// The promises that the first checker reports as broken in a file.
fn verdict_of_first(file: &Path) -> Verdict {
    let file = BufReader::new(std::fs::File::open(file).unwrap());
    let (trial, history) = archive::read(file).unwrap();
    check(&history, &trial.terms).violations.into_iter().map(|v| v.property).collect()
}

/// The verdict on each of these histories, which both checkers reach from its file.
fn verdicts(histories: &[(Terms, History)]) -> Vec<Verdict> {
    let directory = tempfile::tempdir().unwrap();
    let files: Vec<String> = (0..histories.len()).map(|i| format!("{i}.jsonl")).collect();
    for (file, (terms, history)) in files.iter().zip(histories) {
        std::fs::write(directory.path().join(file), written(terms, history)).unwrap();
    }
    let verdicts = verdicts_of_second(directory.path(), &files);
    for (file, second) in files.iter().zip(&verdicts) {
        let file = directory.path().join(file);
        let first = verdict_of_first(&file);
        assert_eq!(&first, second, "{}", std::fs::read_to_string(file).unwrap());
    }
    verdicts
}

/// The text of a history's file.
fn written(terms: &Terms, history: &History) -> Vec<u8> {
    let trial = Trial {
        store: "memory:".into(),
        command: Vec::new(),
        seed: None,
        seconds: None,
        clients: None,
        lease_ms: None,
        fence: Default::default(),
        leases: true,
        faults: Default::default(),
        terms: terms.clone(),
    };
    let mut text = Vec::new();
    archive::write(&trial, history, &mut text).unwrap();
    text
}

#[test]
fn both_checkers_find_every_planted_violation() {
    let mut planted = Vec::new();
    let mut histories = Vec::new();
    for (name, mutation) in MUTATIONS {
        let begin = planted.len();
        for (seed, (pauses, kills)) in (0..4).flat_map(|s| SHAPES.map(|shape| (s, shape))) {
            let mut history = generate(seed, 500, pauses, kills);
            if let Some(property) = mutation(&mut history, &mut Rng::with_seed(seed)) {
                planted.push((name, property));
                histories.push((terms(pauses), history));
            }
        }
        assert!(begin < planted.len(), "{name} could not be applied");
    }
    for ((name, property), verdict) in planted.into_iter().zip(verdicts(&histories)) {
        assert!(verdict.contains(&property), "{name}: {verdict:?}");
    }
}

#[test]
fn both_checkers_accept_clean_histories() {
    let clean = (100..110).flat_map(|seed| {
        SHAPES.map(|(pauses, kills)| (terms(pauses), generate(seed, 500, pauses, kills)))
    });
    let verdicts = verdicts(&clean.collect::<Vec<_>>());
    assert!(verdicts.iter().all(BTreeSet::is_empty), "{verdicts:?}");
}

/// The histories in the repository.
fn published(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let skipped = path.is_symlink() || path.ends_with("target") || path.ends_with(".git");
        if path.is_dir() && !skipped {
            published(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "jsonl")
            && std::fs::read_to_string(&path).unwrap().contains("leasehold-history")
        {
            found.push(path);
        }
    }
}

#[test]
fn both_checkers_agree_on_published_histories() {
    let mut histories = Vec::new();
    published(Path::new(REPOSITORY), &mut histories);
    assert!(!histories.is_empty());
    let files: Vec<String> = histories.iter().map(|path| path.display().to_string()).collect();
    for (file, second) in histories.iter().zip(verdicts_of_second(Path::new("/"), &files)) {
        assert_eq!(verdict_of_first(file), second, "{}", file.display());
    }
}

#[test]
fn second_checker_names_each_file_that_is_not_a_history() {
    let directory = tempfile::tempdir().unwrap();
    let refused = refused();
    let files: Vec<String> = (0..refused.len()).map(|i| format!("{i}.jsonl")).collect();
    for (file, (text, _)) in files.iter().zip(&refused) {
        std::fs::write(directory.path().join(file), text).unwrap();
    }
    let output = second(directory.path(), &files);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    let errors = String::from_utf8(output.stderr).unwrap();
    let named = errors.lines().map(|line| line.split_once(": ").unwrap().0);
    assert_eq!(named.collect::<Vec<_>>(), files, "{errors}");
}

#[test]
fn both_checkers_refuse_the_same_damaged_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut expected = BTreeSet::new();
    let mut files = Vec::new();
    for seed in 0..3_000 {
        let mut rng = Rng::with_seed(seed);
        let (terms, history) = random(&mut rng);
        let mut text = written(&terms, &history);
        let at = rng.usize(..text.len());
        let other = rng.choice(*b"{}[]\",:0123456789.-eE tfn\\u\n\xff\x01").unwrap();
        match rng.u32(..4) {
            0 => text.insert(at, other),
            1 => drop(text.remove(at)),
            2 => text[at] = other,
            _ => text.truncate(at),
        }
        let file = format!("{seed}.jsonl");
        std::fs::write(directory.path().join(&file), &text).unwrap();
        if archive::read(&text[..]).is_err() {
            expected.insert(file.clone());
        }
        files.push(file);
    }
    let errors = String::from_utf8(second(directory.path(), &files).stderr).unwrap();
    let refused: BTreeSet<String> =
        errors.lines().map(|line| line.split_once(": ").unwrap().0.to_owned()).collect();
    assert_eq!(refused, expected);
    assert!(refused.len() > 100 && refused.len() + 100 < files.len());
}

/// The unit of random times: half of what `recovery_ms` counts.
const UNIT: Time = 500_000;

#[test]
fn both_checkers_agree_on_random_histories() {
    let histories: Vec<_> = (0..4_000).map(|seed| random(&mut Rng::with_seed(seed))).collect();
    let verdicts = verdicts(&histories);
    for property in Property::ALL {
        let broken = verdicts.iter().filter(|verdict| verdict.contains(&property)).count();
        assert!(broken >= 10, "{property} was broken in only {broken} histories");
    }
    let clean = verdicts.iter().filter(|verdict| verdict.is_empty()).count();
    assert!(clean >= 20, "only {clean} histories were clean");
}

/// Returns a history of a few operations. The events of each operation are in order, at random
/// times that often coincide.
fn random(rng: &mut Rng) -> (Terms, History) {
    let kinds = [(Kind::Mutex, 1), (Kind::RwLock, 4), (Kind::Semaphore, 3)];
    let lock = |(kind, capacity)| LockSpec { name: format!("{kind}"), kind, capacity };
    let locks: Vec<LockSpec> = kinds.map(lock).into();
    let finals = vec![Default::default(); locks.len()];
    let mut history = History { locks, finals, ..History::default() };
    history.ended = rng.u64(20..80) * UNIT;
    let in_order = rng.bool();
    for n in 0..rng.u32(1..9) {
        operation(&mut history, OpId { worker: rng.u32(..4), n }, in_order, rng);
    }
    if rng.bool() {
        history.events.sort_by_key(|event| event.at);
    }
    let holds = history.events.iter().filter(|event| matches!(event.what, What::Held { .. }));
    if let Some(hold) = rng.choice(holds.collect::<Vec<_>>()).filter(|_| rng.bool()) {
        history.deaths.insert(hold.op.worker, hold.at + rng.u64(..3) * UNIT);
    }
    for _ in 0..rng.usize(..5).saturating_sub(2) {
        let from = rng.u64(..40) * UNIT;
        let to = from + rng.u64(..6) * UNIT;
        let fault = rng.choice([None, Some(Fault::Pause), Some(Fault::Servers)]).unwrap();
        let excuses_until = to + fault.map_or(0, |_| rng.u64(..6) * UNIT);
        let worker = rng.bool().then(|| rng.u32(..4));
        history.troubles.push(Trouble { worker, fault, from, to, excuses_until });
    }
    for texts in [&mut history.crashes, &mut history.residue] {
        texts.extend((rng.u32(..20) == 0).then(|| "something".to_owned()));
    }
    let claimed = Property::ALL.into_iter().filter(|_| rng.u32(..4) > 0).collect();
    let recovery_ms = Some(rng.u64(..4));
    (Terms { claimed, recovery_ms, shared_stalls: rng.u32(..4) == 0 }, history)
}

/// Adds an operation. If `in_order`, its token grows with the time.
fn operation(history: &mut History, op: OpId, in_order: bool, rng: &mut Rng) {
    let lock = rng.choice([0, 0, 1, 2]).unwrap();
    let weight = rng.u32(1..=history.locks[lock].capacity);
    let ask = rng.choice([Ask::Lock, Ask::Lock, Ask::Try, Ask::Timeout, Ask::Cancel]).unwrap();
    let mut at = rng.u64(..30);
    let mut tell = |what, rng: &mut Rng| {
        history.events.push(Event { op, at: at * UNIT, what });
        at += rng.choice([0, 1, 2, 3, 12]).unwrap();
        at
    };
    let kinds = ["contended", "timeout", "lost", "at_risk", "unreachable", "corrupt"];
    let failed = |rng: &mut Rng| {
        let kind = rng.choice(kinds).unwrap().to_owned();
        What::Failed { kind, error: String::new() }
    };
    let mut now = tell(What::Invoked { lock, weight, ask }, rng);
    if rng.u32(..4) > 0 {
        now = tell(What::Waiting { ahead: 0 }, rng);
    }
    match rng.u32(..16) {
        0 => return,
        1 => {
            tell(failed(rng), rng);
            return;
        }
        2 => {
            tell(What::Abandoned, rng);
            return;
        }
        _ => {}
    }
    let token = if in_order { 1 + 4 * now + rng.u64(..4) } else { rng.u64(1..20) };
    now = tell(What::Acquired { token }, rng);
    for _ in 0..rng.u32(..4) {
        let until = if rng.bool() { Time::MAX } else { (now + rng.u64(..12)) * UNIT };
        now = match rng.u32(..8) {
            0 => tell(What::Lost { expired: rng.bool(), reason: String::new() }, rng),
            1..=2 => {
                let fenced = rng.choice([None, Some(false), Some(true)]).unwrap();
                tell(What::Wrote { plain: rng.bool(), fenced }, rng)
            }
            _ => tell(What::Held { until }, rng),
        };
    }
    if rng.u32(..16) > 0 {
        tell(What::Releasing, rng);
        tell(if rng.u32(..16) == 0 { failed(rng) } else { What::Released }, rng);
    }
    let (plain, fenced) = &mut history.finals[lock];
    for (resource, end) in [(Resource::Plain, plain), (Resource::Fenced, fenced)] {
        let wrote = history.events.iter().any(|event| {
            event.op == op
                && match (&event.what, resource) {
                    (What::Wrote { plain, .. }, Resource::Plain) => *plain,
                    (What::Wrote { fenced, .. }, Resource::Fenced) => *fenced == Some(true),
                    _ => false,
                }
        });
        if wrote {
            let at = rng.bool().then_some(now * UNIT);
            let write = Write { lock, resource, op, token, at };
            history.writes.extend((rng.u32(..32) > 0).then_some(write));
            end.value += u64::from(rng.u32(..32) > 0);
            end.set.extend((rng.u32(..32) > 0).then_some(op));
        }
    }
}
