//! Whether the simulation finds what it is to find: versions of the client and of the store that are
//! broken on purpose, each of which it must catch within as many worlds as it plays each time.
//!
//! Each is one change of a line, made in a copy of the sources, built there and played. With `--long` all
//! of them are, which takes minutes; otherwise some, others each time. That each change still fits the
//! sources is looked at always.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// How many are tried without `--long`.
const SOME: usize = 2;

/// A broken version: what of which file becomes what.
struct Broken {
    what: &'static str,
    package: &'static str,
    /// Below its `src`.
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn broken(
    what: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Broken {
    Broken { what, package: "leasehold-core", file, from, to }
}

/// Of the store in cells, in whose worlds it is to be found.
const fn in_cells(
    what: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Broken {
    Broken { what, package: CELL, file, from, to }
}

const CELL: &str = "leasehold-cell";

const ALL: &[Broken] = &[
    // The client.
    broken(
        "the deadline counts from the receipt",
        "lock/acquire.rs",
        "Ok(Step::Holding(token, Granted { sent, remaining }))",
        "Ok(Step::Holding(token, Granted { sent: self.now().max(sent), remaining }))",
    ),
    broken(
        "a renewal counts from its receipt",
        "client/keeper.rs",
        "if lease.acknowledge(Granted { sent, remaining }) {",
        "if lease.acknowledge(Granted { sent: self.clock.now(), remaining }) {",
    ),
    broken(
        "clocks do not drift",
        "client/lease.rs",
        "Some(left) => self.sent.plus(left.saturating_sub(drift(left))),",
        "Some(left) => self.sent.plus(left.saturating_sub(drift(left) * 0)),",
    ),
    broken(
        "a push is believed from when it came",
        "lock/acquire.rs",
        "Granted { sent: last_answer, remaining: leased.then_some(self.claim.waiter_lease) }",
        "Granted { sent: self.now().max(last_answer), remaining: leased.then_some(self.claim.waiter_lease) }",
    ),
    broken(
        "a grant of which nothing is left is handed out",
        "lock/acquire.rs",
        "while granted.deadline().since(self.now()) < enough {",
        "while tries > 7 && granted.deadline().since(self.now()) < enough {",
    ),
    broken(
        "a forked child gives back what its parent holds",
        "lock/guard.rs",
        "if self.done || self.lease.state() == State::Lost(LostReason::Forked) {",
        "if self.done {",
    ),
    broken(
        "a forked child holds what its parent holds",
        "client/lease.rs",
        "self.pid == process_id()",
        "self.pid > 0 || process_id() > 0",
    ),
    broken(
        "a dropped guard is not given back",
        "lock/guard.rs",
        "        self.core.leave_in_background(&self.lease.claim_now(), self.lease.keep_until);\n",
        "",
    ),
    broken(
        "a dropped wait keeps its place",
        "lock/acquire.rs",
        "            self.core().leave_in_background(&self.claim, Moment::from_nanos(0));\n",
        "",
    ),
    broken(
        "a release is believed to hold until it is answered",
        "lock/guard.rs",
        "    lease.mark_released();\n    let mut pause",
        "    let mut pause",
    ),
    broken(
        "a place that is lost is waited in",
        "client/waiting.rs",
        "Renewal::Lost => state.outcome = Some(Outcome::Gone),",
        "Renewal::Lost => {}",
    ),
    broken(
        "nothing is renewed",
        "client/keeper.rs",
        "true if lease.is_full() => aligned(sent.plus(lease.claim.lease / 3), lease.claim.lease),",
        "true if lease.is_full() => Moment::NEVER,",
    ),
    broken(
        "who waits keeps no place alive",
        "client/waiting.rs",
        "let beat = aligned(state.last_answer.plus(lease / 3), lease);",
        "let beat = aligned(state.last_answer.plus(lease * 3), lease);",
    ),
    broken(
        "max_hold is forgotten",
        "lock/acquire.rs",
        "ends: options.max_hold.map_or(Moment::NEVER, |d| now.plus(d)),",
        "ends: options.max_hold.map_or(Moment::NEVER, |_| Moment::NEVER),",
    ),
    broken(
        "at_least is forgotten at a release",
        "lock/guard.rs",
        "let leave = core.store.leave(claim, core.keep(lease.keep_until));",
        "let leave = core.store.leave(claim, core.keep(lease.keep_until).filter(|_| false));",
    ),
    broken(
        "a limit is no limit",
        "lock/acquire.rs",
        "Wait::For(d) => started.plus(d),",
        "Wait::For(d) => started.plus(d * 5),",
    ),
    broken(
        "who only tries waits",
        "lock/acquire.rs",
        "let mode = if self.wait == Wait::Try { Mode::Try } else { Mode::Wait };",
        "let mode = if self.wait == Wait::Try { Mode::Wait } else { Mode::Wait };",
    ),
    broken(
        "an owner waits for himself",
        "lock/owner.rs",
        "let Some(hold) = self.hold().filter(|h| h.lease().is_held()) else { return Ok(None) };",
        "let Some(hold) = self.hold().filter(|h| !h.lease().is_held()) else { return Ok(None) };",
    ),
    broken(
        "the clock of a waiter's last answer runs on",
        "client/waiting.rs",
        "                state.last_answer = state.last_answer.max(sent);\n",
        "                state.last_answer = state.last_answer.max(sent).plus(state.place.head_remaining.unwrap_or_default());\n",
    ),
    broken(
        "what was downgraded is upgraded again",
        "client/weight.rs",
        "        weighing.asked_more |= !weighing.lightened;\n        !weighing.lightened\n",
        "        weighing.asked_more = true;\n        weighing.lightened = false;\n        true\n",
    ),
    broken(
        "the renewal of another grant is believed",
        "client/keeper.rs",
        "Renewal::Holding { token, remaining } if token == lease.token => {",
        "Renewal::Holding { token: _, remaining } => {",
    ),
    // The store.
    broken(
        "a lock-delay is forgotten",
        "queue.rs",
        "let reopens = expires.saturating_add(e.lock_delay);",
        "let reopens = expires;",
    ),
    broken(
        "a reader becomes a writer beside others",
        "queue.rs",
        "let alone = !self.entries.iter().enumerate().any(others);",
        "let alone = !self.entries.iter().enumerate().any(others) || true;",
    ),
    broken(
        "who comes while others wait may pass them",
        "queue.rs",
        "let fits = granted(all, self.capacity) > self.entries.len();",
        "let fits = granted(all, self.capacity) > 0 && self.entries.iter().filter(|e| e.standing != Standing::Waiting).map(|e| u64::from(e.weight)).sum::<u64>() + u64::from(claim.weight) <= u64::from(self.capacity);",
    ),
    broken(
        "a grant lasts half as long as is said",
        "queue.rs",
        "let expires = self.leases.then(|| at.now.saturating_add(micros(lease)));",
        "let expires = self.leases.then(|| at.now.saturating_add(micros(lease / 2)));",
    ),
    broken(
        "tokens are drawn twice",
        "queue.rs",
        "        self.last = token.get();\n        token\n",
        "        self.last = token.get() / 2;\n        Token::new(token.get() / 1_000_000 * 1_000_000).unwrap_or(token)\n",
    ),
    broken(
        "everybody weighs one",
        "queue.rs",
        "let fit = granted(self.entries.iter().map(|e| e.weight), self.capacity);",
        "let fit = granted(self.entries.iter().map(|_| 1), self.capacity);",
    ),
    broken(
        "nothing is kept closed",
        "queue.rs",
        "let keep = keep.filter(|k| !k.is_zero() && self.entries[i].standing == Standing::Holding);",
        "let keep = keep.filter(|k| k.is_zero() && self.entries[i].standing == Standing::Holding);",
    ),
    broken(
        "who is granted the lock is not told",
        "store/inbox.rs",
        "Signal::Granted(token) => told.granted = Some(token),",
        "Signal::Granted(_) => told.granted = None,",
    ),
    broken(
        "who leaves hands over to nobody",
        "queue.rs",
        "                self.entries.remove(i);\n                self.grant(now);\n",
        "                self.entries.remove(i);\n",
    ),
    // The store in cells.
    in_cells(
        "cells: whoever looks takes for gone what it saw a moment ago",
        "lasting/aging.rs",
        "match life.saturating_sub(seen.max(age.unwrap_or_default())) {",
        "match (life / 8).saturating_sub(seen.max(age.unwrap_or_default())) {",
    ),
    in_cells(
        "cells: a look that may be behind proves that a session is gone",
        "shared.rs",
        "if self.cells.system().looks_behind && proof == Proof::Sure && !absent.is_empty() {",
        "if self.cells.system().looks_behind && proof == Proof::Shown && !absent.is_empty() {",
    ),
    in_cells(
        "cells: a queue is forgotten as soon as nobody stands there",
        "shared.rs",
        "let lives = system.idle.map(|idle| idle * if seen.queue.is_empty() { 1 } else { STOOD_IN });",
        "let lives = seen.queue.is_empty().then_some(Duration::from_millis(1));",
    ),
    in_cells(
        "cells: a session is believed in for longer than its cell is there",
        "session.rs",
        "sent.plus(cell.saturating_sub(grain).saturating_sub(drift(cell)))",
        "sent.plus(cell.saturating_sub(grain).saturating_sub(drift(cell)) + cell)",
    ),
    in_cells(
        "cells: who is forgotten is waited for by nobody",
        "epoch.rs",
        "let left = self.delay.saturating_sub(self.age(&found));",
        "let left = (self.delay / 1_000).saturating_sub(self.age(&found));",
    ),
    in_cells(
        "cells: a claim that was given up is told of",
        "claims.rs",
        "            if kept.is_given_up {\n                return false;\n            }\n",
        "",
    ),
    in_cells(
        "cells: who does not find its claim by an old look has left",
        "leave.rs",
        "false if self.cells.system().looks_behind => Turn::Write(false),",
        "false if self.cells.system().looks_behind => Turn::Told(false),",
    ),
    in_cells(
        "cells: a write whose answer was lost may come after its claim has left",
        "leave.rs",
        "false if self.claims.is_doubtful(id) => Turn::Write(false),",
        "false if self.claims.is_doubtful(id) => Turn::Told(false),",
    ),
    in_cells(
        "cells: what ends is not given up",
        "claims.rs",
        "            if kept.ends <= now {\n                kept.is_given_up = true;",
        "            if kept.ends <= now {\n                kept.is_given_up = false;",
    ),
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn source(root: &Path, broken: &Broken) -> PathBuf {
    root.join("crates").join(broken.package).join("src").join(broken.file)
}

fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        std::fs::copy(from, to).unwrap();
        return;
    }
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "target" {
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    }
}

#[test]
fn every_broken_version_fits_the_sources() {
    for broken in ALL {
        let text = std::fs::read_to_string(source(&workspace(), broken)).unwrap();
        let found = text.matches(broken.from).count();
        assert_eq!(found, 1, "{}: what is to be changed is there {found} times", broken.what);
    }
}

/// Builds the copy with this change, and plays: what the simulation says.
fn played(copy: &Path, broken: &Broken) -> Result<(), String> {
    let path = source(copy, broken);
    let right = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, right.replacen(broken.from, broken.to, 1)).unwrap();
    let mut cargo = testbed::cargo();
    cargo.current_dir(copy).args(["test", "--offline", "--locked", "-p", "leasehold-conformance"]);
    let worlds = if broken.package == CELL { "cells_keep" } else { "worlds_keep" };
    cargo.args(["--test", "simulation", "--", worlds]);
    // Not where all has been built: a package has the same file names in both, and would be the broken one
    // for whoever runs it next.
    cargo.env("CARGO_TARGET_DIR", copy.join("target")).env_remove("LEASEHOLD_SEED");
    let played = cargo.env("LEASEHOLD_WORLDS", "10000").output();
    std::fs::write(&path, right).unwrap();
    let played = played.unwrap();
    let said = String::from_utf8_lossy(&played.stdout);
    let found = said.lines().find(|line| line.contains("BROKEN: "));
    match found {
        Some(line) => {
            println!("{}: {line}", broken.what);
            Ok(())
        }
        None if played.status.success() => Err(format!("{}: not found", broken.what)),
        None => {
            let errors = String::from_utf8_lossy(&played.stderr);
            Err(format!("{}: does not build\n{errors}", broken.what))
        }
    }
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn broken_versions_are_found() {
    let long = std::env::var("LEASEHOLD_TESTS").is_ok_and(|which| which == "long");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as usize;
    let (first, many) = if long { (0, ALL.len()) } else { (now % ALL.len(), SOME) };
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("controls");
    for part in ["Cargo.toml", "Cargo.lock", "crates", "examples"] {
        std::fs::create_dir_all(&place).unwrap();
        copy(&workspace().join(part), &place.join(part));
    }
    let wanted = std::env::var("LEASEHOLD_CONTROL").ok();
    let chosen = (0..if wanted.is_some() { ALL.len() } else { many })
        .map(|n| &ALL[(first + n) % ALL.len()])
        .filter(|broken| wanted.as_deref().is_none_or(|wanted| broken.what.contains(wanted)));
    let missed: Vec<String> = chosen.filter_map(|broken| played(&place, broken).err()).collect();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
