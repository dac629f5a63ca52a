//! Plays ten thousand simulated worlds. Clients share one store on a network that delays, loses,
//! duplicates and reorders messages. Their clocks drift apart, and their machines pause, fork and
//! crash.
//!
//! A world is derived from a seed ([`plan`]) and played on one thread ([`play`]). The runtime's
//! time is paused and jumps to the next event. Each process is a complete client of
//! `leasehold-core`, as in programs, with its own clock and random numbers. A network ([`net`]) is
//! between it and the system that keeps the queues ([`ground`]). A judge observes the world
//! ([`judge`]). It trusts no process, and knows the real time.
//!
//! Queues are kept by the store in memory, or by cells. With cells, each process has a complete
//! store of `leasehold-cell`. Cells either expire by the server's clock ([`cells`]), or are objects
//! that never expire ([`objects`]).
//!
//! A world that breaks a promise is printed with its seed. To replay it byte for byte and print its
//! events: `LEASEHOLD_SEED=… cargo test -p leasehold-simulation --test simulation print_one_world --
//! --nocapture`. For cells, replace `print_one_world` by `print_one_cell_world`.

mod cells;
mod ground;
mod judge;
mod net;
mod objects;
mod plan;
mod play;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use plan::System;
use play::{Outcome, play};

/// Number of worlds that are played by `cargo test`, by `./test.sh --all`, and by `./test.sh
/// --long`.
const WORLDS: [u64; 3] = [1_000, 10_000, 100_000];
/// Number of worlds of cells, each of which takes longer.
const WORLDS_OF_CELLS: [u64; 3] = [200, 2_000, 40_000];

fn from_the_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Returns the first seed. It differs each time, unless the environment sets it.
fn first_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    from_the_environment("LEASEHOLD_SEED").unwrap_or(now as u64 * 1_000_000)
}

fn worlds([quick, whole, long]: [u64; 3]) -> u64 {
    from_the_environment("LEASEHOLD_WORLDS")
        .unwrap_or_else(|| testbed::by_extent(quick, whole, long))
}

/// Plays the world of this seed, in memory.
fn in_memory(seed: u64, verbose: bool) -> Outcome {
    play(System::Memory, seed, verbose)
}

/// Plays the world of this seed, in one of the kinds of cells.
fn in_cells(seed: u64, verbose: bool) -> Outcome {
    let all = System::IN_CELLS;
    play(all[usize::try_from(seed % all.len() as u64).expect("few")], seed, verbose)
}

/// Plays this many worlds on all processors. Returns the first one that breaks a promise, if any.
fn first_broken(play: fn(u64, bool) -> Outcome, first: u64, worlds: u64) -> Option<(u64, Outcome)> {
    let next = AtomicU64::new(0);
    let broken = std::sync::Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while broken.lock().unwrap().is_none() {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= worlds {
                        return;
                    }
                    let outcome = play(first + n, false);
                    if !outcome.broken.is_empty() {
                        broken.lock().unwrap().get_or_insert((first + n, outcome));
                    }
                }
            });
        }
    });
    broken.into_inner().unwrap()
}

fn keep_their_promises(play: fn(u64, bool) -> Outcome, worlds: u64) {
    let first = first_seed();
    println!("{worlds} worlds, from LEASEHOLD_SEED={first}");
    if let Some((seed, outcome)) = first_broken(play, first, worlds) {
        panic!("LEASEHOLD_SEED={seed}: {}", outcome.broken.join("\n"));
    }
}

#[test]
fn guarantees_hold_in_every_world() {
    keep_their_promises(in_memory, worlds(WORLDS));
}

#[test]
fn guarantees_hold_in_every_cell_world() {
    keep_their_promises(in_cells, worlds(WORLDS_OF_CELLS));
}

fn printed_for_reading(play: fn(u64, bool) -> Outcome) {
    let seed = first_seed();
    let outcome = play(seed, true);
    println!("LEASEHOLD_SEED={seed}\n{}", outcome.story.join("\n"));
    assert!(outcome.broken.is_empty(), "LEASEHOLD_SEED={seed}: {}", outcome.broken.join("\n"));
}

/// Prints the events of one world, for manual examination.
#[test]
fn print_one_world() {
    printed_for_reading(in_memory);
}

/// Like [`print_one_world`], in cells.
#[test]
fn print_one_cell_world() {
    printed_for_reading(in_cells);
}

fn are_the_same_to_the_byte(play: fn(u64, bool) -> Outcome) {
    let first = first_seed();
    for seed in first..first + 50 {
        let (one, two) = (play(seed, true), play(seed, true));
        assert!(one.story.len() > 10, "LEASEHOLD_SEED={seed}: the story is too short");
        let differs = one.story.iter().zip(&two.story).position(|(one, two)| one != two);
        let at = differs.unwrap_or(one.story.len().min(two.story.len()));
        assert_eq!(
            (one.story.len(), one.story.get(at)),
            (two.story.len(), two.story.get(at)),
            "LEASEHOLD_SEED={seed}: the stories differ at line {at}"
        );
    }
}

#[test]
fn seed_reproduces_a_world_byte_for_byte() {
    are_the_same_to_the_byte(in_memory);
}

#[test]
fn seed_reproduces_a_cell_world_byte_for_byte() {
    are_the_same_to_the_byte(in_cells);
}

/// Events that must occur in all systems.
const TROUBLES: [&str; 18] = [
    "granted",
    "contended",
    "timed out",
    "dropped",
    "lost",
    "released late",
    "stopped",
    "killed",
    "cut",
    "evicted",
    "request lost",
    "reply lost",
    "doubled",
    "late",
    "forked",
    "re-entered",
    "downgraded",
    "calm",
];

/// Checks that the worlds contain the events that they are to judge.
fn have_in_them(play: fn(u64, bool) -> Outcome, more: &[&str]) {
    let first = first_seed();
    let mut seen = std::collections::BTreeMap::<&str, u64>::new();
    for seed in first..first + 200 {
        for (what, n) in play(seed, false).seen {
            *seen.entry(what).or_default() += n;
        }
    }
    let all = TROUBLES.iter().chain(more);
    let missing: Vec<_> = all.filter(|what| !seen.contains_key(*what)).collect();
    assert!(missing.is_empty(), "LEASEHOLD_SEED={first}: {missing:?} never occurred; {seen:?}");
}

#[test]
fn worlds_contain_every_kind_of_fault() {
    have_in_them(in_memory, &["upgraded", "push doubled"]);
}

#[test]
fn cell_worlds_contain_every_kind_of_fault() {
    have_in_them(
        in_cells,
        &["upgraded", "forgotten", "behind", "halved", "notification lost", "repeated"],
    );
}
