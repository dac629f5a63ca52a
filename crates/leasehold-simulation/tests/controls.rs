//! Checks that the simulation detects errors. It plays versions of the client and of the store that
//! are broken on purpose. The simulation must detect each of them within the number of worlds that
//! it always plays.
//!
//! Each version changes one line in a copy of the sources, which is built and played there. With
//! `--long` all versions are played, which takes minutes. Otherwise a few are chosen each time. A
//! test always checks that each change still fits the sources.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Number of versions that are played without `--long`.
const SOME: usize = 2;

/// A broken version. It replaces the text `from` in a file by `to`.
struct Broken {
    what: &'static str,
    package: &'static str,
    /// Path below the package's `src`.
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

/// A broken version of the store in cells, which is played in worlds of cells.
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
    // Versions of the client.
    broken(
        "the deadline is counted from the receipt of the reply",
        "lock/acquire.rs",
        "Ok(Step::Holding(token, Granted { sent, remaining }))",
        "Ok(Step::Holding(token, Granted { sent: self.now().max(sent), remaining }))",
    ),
    broken(
        "a renewal is counted from the receipt of its reply",
        "client/renewer.rs",
        "if lease.acknowledge(Granted { sent, remaining }) {",
        "if lease.acknowledge(Granted { sent: self.clock.now(), remaining }) {",
    ),
    broken(
        "the drift of clocks is ignored",
        "client/lease.rs",
        "Some(left) => self.sent.plus(left.saturating_sub(drift(left))),",
        "Some(left) => self.sent.plus(left.saturating_sub(drift(left) * 0)),",
    ),
    broken(
        "a lease is counted from the receipt of a push",
        "lock/acquire.rs",
        "Granted { sent: last_answer, remaining: leased.then_some(self.claim.waiter_lease) }",
        "Granted { sent: self.now().max(last_answer), remaining: leased.then_some(self.claim.waiter_lease) }",
    ),
    broken(
        "an expired grant is returned",
        "lock/acquire.rs",
        "while granted.deadline().since(self.now()) < enough {",
        "while tries > 7 && granted.deadline().since(self.now()) < enough {",
    ),
    broken(
        "a forked child releases its parent's hold",
        "lock/hold.rs",
        "if self.done || self.lease.state() == State::Lost(LostReason::Forked) {",
        "if self.done {",
    ),
    broken(
        "a forked child believes in its parent's hold",
        "client/lease.rs",
        "self.pid == process_id()",
        "self.pid > 0 || process_id() > 0",
    ),
    broken(
        "a dropped guard is not released",
        "lock/hold.rs",
        "        self.core.release_in_background(&self.lease.claim_now(), self.lease.keep_until);\n",
        "",
    ),
    broken(
        "a dropped wait stays in the queue",
        "lock/acquire.rs",
        "            self.core().leave_given_up(&self.claim, self.may_join_late);\n",
        "",
    ),
    broken(
        "is_held() is true until a release is answered",
        "lock/hold.rs",
        "    lease.mark_released();\n    let mut pause",
        "    let mut pause",
    ),
    broken(
        "a waiter does not notice that its claim is lost",
        "client/waiting.rs",
        "Renewal::Lost => state.outcome = Some(Outcome::Gone),",
        "Renewal::Lost => {}",
    ),
    broken(
        "leases are not renewed",
        "client/renewer.rs",
        "true if lease.is_full() => aligned(sent.plus(lease.claim.lease / 3), lease.claim.lease),",
        "true if lease.is_full() => Moment::NEVER,",
    ),
    broken(
        "a waiter's claim is not renewed",
        "client/waiting.rs",
        "let beat = aligned(state.last_answer.plus(lease / 3), lease);",
        "let beat = aligned(state.last_answer.plus(lease * 3), lease);",
    ),
    broken(
        "max_hold is ignored",
        "lock/acquire.rs",
        "ends: options.max_hold.map_or(Moment::NEVER, |d| now.plus(d)),",
        "ends: options.max_hold.map_or(Moment::NEVER, |_| Moment::NEVER),",
    ),
    broken(
        "min_hold is ignored at a release",
        "lock/hold.rs",
        "let leave = core.store.leave(claim, core.keep(lease.keep_until));",
        "let leave = core.store.leave(claim, core.keep(lease.keep_until).filter(|_| false));",
    ),
    broken(
        "a time limit is exceeded",
        "lock/acquire.rs",
        "Wait::For(d) => started.plus(d),",
        "Wait::For(d) => started.plus(d * 5),",
    ),
    broken(
        "try_lock waits",
        "lock/acquire.rs",
        "let mode = if self.wait == Wait::Try { Mode::Try } else { Mode::Wait };",
        "let mode = if self.wait == Wait::Try { Mode::Wait } else { Mode::Wait };",
    ),
    broken(
        "an owner waits for its own hold",
        "lock/owner.rs",
        "let Some(hold) = self.hold().filter(|h| h.lease().is_held()) else { return Ok(None) };",
        "let Some(hold) = self.hold().filter(|h| !h.lease().is_held()) else { return Ok(None) };",
    ),
    broken(
        "a waiter's last answer is dated too late",
        "client/waiting.rs",
        "                state.last_answer = state.last_answer.max(sent);\n",
        "                state.last_answer = state.last_answer.max(sent).plus(state.place.head_remaining.unwrap_or_default());\n",
    ),
    broken(
        "a downgraded hold is upgraded again",
        "client/weight.rs",
        "        weighing.asked_more |= !weighing.lightened;\n        !weighing.lightened\n",
        "        weighing.asked_more = true;\n        weighing.lightened = false;\n        true\n",
    ),
    broken(
        "the renewal of another grant is accepted",
        "client/renewer.rs",
        "Renewal::Holding { token, remaining } if token == lease.token => {",
        "Renewal::Holding { token: _, remaining } => {",
    ),
    // Versions of the store.
    broken(
        "lock_delay is ignored",
        "queue.rs",
        "let reopens = expires.saturating_add(e.lock_delay);",
        "let reopens = expires;",
    ),
    broken(
        "a reader becomes a writer while others hold the lock",
        "queue.rs",
        "let alone = !self.entries.iter().enumerate().any(others);",
        "let alone = !self.entries.iter().enumerate().any(others) || true;",
    ),
    broken(
        "a new claim overtakes waiters",
        "queue.rs",
        "let fits = granted(all, self.capacity) > self.entries.len();",
        "let fits = granted(all, self.capacity) > 0 && self.entries.iter().filter(|e| e.state != ClaimState::Waiting).map(|e| u64::from(e.weight)).sum::<u64>() + u64::from(claim.weight) <= u64::from(self.capacity);",
    ),
    broken(
        "a grant lasts half as long as the store reports",
        "queue.rs",
        "let expires = self.leases.then(|| at.now.saturating_add(micros(lease)));",
        "let expires = self.leases.then(|| at.now.saturating_add(micros(lease / 2)));",
    ),
    broken(
        "tokens are assigned twice",
        "queue.rs",
        "        self.last = token.get();\n        token\n",
        "        self.last = token.get() / 2;\n        Token::new(token.get() / 1_000_000 * 1_000_000).unwrap_or(token)\n",
    ),
    broken(
        "each claim has the weight 1",
        "queue.rs",
        "let fit = granted(self.entries.iter().map(|e| e.weight), self.capacity);",
        "let fit = granted(self.entries.iter().map(|_| 1), self.capacity);",
    ),
    broken(
        "cooldowns are ignored",
        "queue.rs",
        "let keep = keep.filter(|k| !k.is_zero() && self.entries[i].state == ClaimState::Holding);",
        "let keep = keep.filter(|k| k.is_zero() && self.entries[i].state == ClaimState::Holding);",
    ),
    broken(
        "grants are not notified",
        "store/inbox.rs",
        "Signal::Granted(token) => pending.granted = Some(token),",
        "Signal::Granted(_) => pending.granted = None,",
    ),
    broken(
        "a release does not hand over the lock",
        "queue.rs",
        "                self.entries.remove(i);\n                self.grant(now);\n",
        "                self.entries.remove(i);\n",
    ),
    // Versions of the store in cells.
    in_cells(
        "cells: a session is considered dead too early",
        "lasting/aging.rs",
        "match life.saturating_sub(seen.max(age.unwrap_or_default())) {",
        "match (life / 8).saturating_sub(seen.max(age.unwrap_or_default())) {",
    ),
    in_cells(
        "cells: a stale read proves that a session is gone",
        "shared.rs",
        "if self.cells.system().looks_behind && proof == Proof::Sure && !absent.is_empty() {",
        "if self.cells.system().looks_behind && proof == Proof::Shown && !absent.is_empty() {",
    ),
    in_cells(
        "cells: an empty queue is forgotten immediately",
        "shared.rs",
        "let lives = system.idle.map(|idle| idle * if seen.queue.is_empty() { 1 } else { STRETCH });",
        "let lives = seen.queue.is_empty().then_some(Duration::from_millis(1));",
    ),
    in_cells(
        "cells: a session outlives its cell",
        "session.rs",
        "sent.plus(cell.saturating_sub(grain).saturating_sub(drift(cell)))",
        "sent.plus(cell.saturating_sub(grain).saturating_sub(drift(cell)) + cell)",
    ),
    in_cells(
        "cells: a new epoch does not wait for forgotten holders",
        "epoch.rs",
        "let left = self.delay.saturating_sub(self.age(&found));",
        "let left = (self.delay / 1_000).saturating_sub(self.age(&found));",
    ),
    in_cells(
        "cells: an abandoned claim is notified",
        "claims.rs",
        "            if kept.is_given_up {\n                return false;\n            }\n",
        "",
    ),
    in_cells(
        "cells: a stale read without the claim confirms a release",
        "leave.rs",
        "false if self.cells.system().looks_behind => QueueEdit::Write(false),",
        "false if self.cells.system().looks_behind => QueueEdit::Unchanged(false),",
    ),
    in_cells(
        "cells: a write in doubt may follow the claim's release",
        "leave.rs",
        "false if self.claims.is_doubtful(id) => QueueEdit::Write(false),",
        "false if self.claims.is_doubtful(id) => QueueEdit::Unchanged(false),",
    ),
    in_cells(
        "cells: a claim that ends is not abandoned",
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
fn every_broken_version_applies_to_the_sources() {
    for broken in ALL {
        let text = std::fs::read_to_string(source(&workspace(), broken)).unwrap();
        let found = text.matches(broken.from).count();
        assert_eq!(found, 1, "{}: the text to change occurs {found} times", broken.what);
    }
}

/// Builds the copy with this change and plays it. Returns the result of the simulation.
fn played(copy: &Path, broken: &Broken) -> Result<(), String> {
    let path = source(copy, broken);
    let right = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, right.replacen(broken.from, broken.to, 1)).unwrap();
    let mut cargo = testbed::cargo();
    cargo.current_dir(copy).args(["test", "--offline", "--locked", "-p", "leasehold-simulation"]);
    let cells = broken.package == CELL;
    let test = if cells {
        "guarantees_hold_in_every_cell_world"
    } else {
        "guarantees_hold_in_every_world"
    };
    cargo.args(["--test", "simulation", "--", "--exact", test]);
    // The target directory is not shared. A package has the same file names in both, so the next
    // run of another test could use the broken one.
    cargo.env("CARGO_TARGET_DIR", copy.join("target")).env_remove("LEASEHOLD_SEED");
    let played = cargo.env("LEASEHOLD_WORLDS", "10000").output();
    std::fs::write(&path, right).unwrap();
    let played = played.unwrap();
    let stdout = String::from_utf8_lossy(&played.stdout);
    let found = stdout.lines().find(|line| line.contains("BROKEN: "));
    match found {
        Some(line) => {
            println!("{}: {line}", broken.what);
            Ok(())
        }
        // Otherwise a renamed test would look like a simulation that found nothing.
        None if played.status.success() && !stdout.contains("1 passed") => {
            Err(format!("{}: there is no test {test}", broken.what))
        }
        None if played.status.success() => {
            Err(format!("{}: the simulation did not find it", broken.what))
        }
        None => {
            let errors = String::from_utf8_lossy(&played.stderr);
            Err(format!("{}: does not build\n{errors}", broken.what))
        }
    }
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn simulation_detects_broken_versions() {
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
