//! Ten thousand simulated worlds: clients of one store on a network that delays, loses, doubles and
//! reorders, with clocks that drift apart, on machines that stand still, fork and die.
//!
//! A world is drawn from a seed ([`plan`]) and played on one thread, whose time is the runtime's and
//! paused: it jumps to the next thing that happens ([`play`]). Each process is a whole client of
//! `leasehold-core`, as programs have it, with a clock and a chance of its own; between it and what keeps the
//! queues ([`ground`]) is a network ([`net`]). A judge looks on ([`judge`]): it believes nobody, and knows what
//! time it really is.
//!
//! What keeps the queues is the store in memory; or it is cells, and each process has a whole store of
//! `leasehold-cell`: cells that end by the server's clock ([`cells`]), and objects of which none ends by
//! itself ([`objects`]).
//!
//! A world that breaks a promise is printed with its seed; `LEASEHOLD_SEED=… cargo test -p
//! leasehold-conformance --test simulation one_world -- --nocapture` plays it again, to the byte, and
//! tells what happened in it; `one_world_of_cells` does so for cells.

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
use play::{Told, play};

/// How many worlds are played by `cargo test`, by `./test.sh --all`, and by `./test.sh --long`.
const WORLDS: [u64; 3] = [1_000, 10_000, 100_000];
/// The same of cells, where a world takes longer.
const WORLDS_OF_CELLS: [u64; 3] = [200, 2_000, 40_000];

fn from_the_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// The first seed: another one each time, unless the environment says which.
fn first_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    from_the_environment("LEASEHOLD_SEED").unwrap_or(now as u64 * 1_000_000)
}

fn worlds([quick, whole, long]: [u64; 3]) -> u64 {
    from_the_environment("LEASEHOLD_WORLDS")
        .unwrap_or_else(|| testbed::by_extent(quick, whole, long))
}

/// The world of this seed, in memory.
fn in_memory(seed: u64, told: bool) -> Told {
    play(System::Memory, seed, told)
}

/// The world of this seed, in cells of one kind or the other.
fn in_cells(seed: u64, told: bool) -> Told {
    let all = System::IN_CELLS;
    play(all[usize::try_from(seed % all.len() as u64).expect("few")], seed, told)
}

/// Plays as many worlds, on all processors; the first that breaks a promise, if one does.
fn first_broken(play: fn(u64, bool) -> Told, first: u64, worlds: u64) -> Option<(u64, Told)> {
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
                    let told = play(first + n, false);
                    if !told.broken.is_empty() {
                        broken.lock().unwrap().get_or_insert((first + n, told));
                    }
                }
            });
        }
    });
    broken.into_inner().unwrap()
}

fn keep_their_promises(play: fn(u64, bool) -> Told, worlds: u64) {
    let first = first_seed();
    println!("{worlds} worlds, LEASEHOLD_SEED={first} and on");
    if let Some((seed, told)) = first_broken(play, first, worlds) {
        panic!("LEASEHOLD_SEED={seed}: {}", told.broken.join("\n"));
    }
}

#[test]
fn worlds_keep_their_promises() {
    keep_their_promises(in_memory, worlds(WORLDS));
}

#[test]
fn cells_keep_their_promises() {
    keep_their_promises(in_cells, worlds(WORLDS_OF_CELLS));
}

fn told_to_a_person(play: fn(u64, bool) -> Told) {
    let seed = first_seed();
    let told = play(seed, true);
    println!("LEASEHOLD_SEED={seed}\n{}", told.story.join("\n"));
    assert!(told.broken.is_empty(), "LEASEHOLD_SEED={seed}: {}", told.broken.join("\n"));
}

/// For a person who looks at one world: what happened in it.
#[test]
fn one_world() {
    told_to_a_person(in_memory);
}

/// The same in cells.
#[test]
fn one_world_of_cells() {
    told_to_a_person(in_cells);
}

fn are_the_same_to_the_byte(play: fn(u64, bool) -> Told) {
    let first = first_seed();
    for seed in first..first + 50 {
        let (one, two) = (play(seed, true), play(seed, true));
        assert!(one.story.len() > 10, "LEASEHOLD_SEED={seed}: nothing happens in it");
        let differs = one.story.iter().zip(&two.story).position(|(one, two)| one != two);
        let at = differs.unwrap_or(one.story.len().min(two.story.len()));
        assert_eq!(
            (one.story.len(), one.story.get(at)),
            (two.story.len(), two.story.get(at)),
            "LEASEHOLD_SEED={seed}: line {at}"
        );
    }
}

#[test]
fn a_seed_is_a_world_to_the_byte() {
    are_the_same_to_the_byte(in_memory);
}

#[test]
fn a_seed_is_a_world_of_cells_to_the_byte() {
    are_the_same_to_the_byte(in_cells);
}

/// What happens in all.
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

/// What is played must be worth it: the worlds have in them what they are to judge.
fn have_in_them(play: fn(u64, bool) -> Told, more: &[&str]) {
    let first = first_seed();
    let mut seen = std::collections::BTreeMap::<&str, u64>::new();
    for seed in first..first + 200 {
        for (what, n) in play(seed, false).seen {
            *seen.entry(what).or_default() += n;
        }
    }
    let all = TROUBLES.iter().chain(more);
    let missing: Vec<_> = all.filter(|what| !seen.contains_key(*what)).collect();
    assert!(missing.is_empty(), "LEASEHOLD_SEED={first}: never {missing:?}; {seen:?}");
}

#[test]
fn worlds_are_full_of_trouble() {
    have_in_them(in_memory, &["upgraded", "push doubled"]);
}

#[test]
fn worlds_of_cells_are_full_of_trouble() {
    have_in_them(in_cells, &["upgraded", "forgotten", "behind", "halved", "bell lost", "repeated"]);
}
