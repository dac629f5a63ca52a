//! Derives a world from a seed.

use std::time::Duration;

use leasehold_core::Kind;

/// The system that keeps the queues of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum System {
    /// The store in memory, which all processes call.
    Memory,
    /// Cells that expire by the server's clock and can all be lost, as in memcached.
    Cache,
    /// Cells that expire by the server's clock, with notifications and stale reads, as in a stream
    /// of NATS.
    Stream,
    /// Values that never expire, so that observers decide, as in an object store.
    Objects,
}

impl System {
    pub(crate) const IN_CELLS: [Self; 3] = [Self::Cache, Self::Stream, Self::Objects];

    /// Returns whether reads may be stale.
    pub(crate) fn looks_behind(self) -> bool {
        matches!(self, Self::Stream | Self::Objects)
    }
}

/// A world.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) system: System,
    /// Whether nothing fails and answers are quick, so that more is promised.
    pub(crate) calm: bool,
    /// Whether clocks differ by more than leases allow for. Then only tokens are promised.
    pub(crate) wild: bool,
    pub(crate) locks: Vec<LockPlan>,
    pub(crate) processes: Vec<ProcessPlan>,
    pub(crate) weather: Weather,
    /// Number of evictions of holders.
    pub(crate) evictions: u32,
    /// The longest lease that is requested.
    pub(crate) longest: Duration,
    /// When the system loses all its data.
    pub(crate) forgets: Vec<Duration>,
    /// Parts per million by which the server's clock is too fast.
    pub(crate) server_fast: i32,
}

#[derive(Clone, Debug)]
pub(crate) struct LockPlan {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) permits: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct ProcessPlan {
    /// Seed of its own random numbers.
    pub(crate) seed: u64,
    /// Parts per million by which its clock is too fast.
    pub(crate) fast: i32,
    /// Microseconds by which its wall clock is ahead of the server's.
    pub(crate) wall: i64,
    pub(crate) tasks: u32,
    pub(crate) lease: Duration,
    /// When it is paused, and for how long. `None` means that it never resumes.
    pub(crate) stops: Vec<(Duration, Option<Duration>)>,
    /// When it is cut off from the network, and for how long.
    pub(crate) cuts: Vec<(Duration, Duration)>,
}

/// The behavior of messages: probabilities in parts per thousand, and durations.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    pub(crate) quick: Duration,
    pub(crate) slow: Duration,
    pub(crate) late: u32,
    pub(crate) lost: u32,
    pub(crate) broken: u32,
    pub(crate) doubled: u32,
    /// Only some of several requests that are sent together are executed.
    pub(crate) halved: u32,
    /// A read is stale.
    pub(crate) stale: u32,
}

/// Maximum age of a stale read.
pub(crate) const STALE: Duration = Duration::from_secs(3);
/// Wall clocks differ by up to a day.
const APART: i64 = 86_400_000_000;

/// Duration of the faults in a world. After that it may recover.
pub(crate) const TROUBLE: Duration = Duration::from_secs(12);

pub(crate) fn millis(rng: &mut fastrand::Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}

impl Plan {
    pub(crate) fn of(system: System, rng: &mut fastrand::Rng) -> Self {
        let calm = rng.u32(0..4) == 0;
        let wild = !calm && rng.u32(0..10) == 0;
        let leases = [300, 1_000, 3_000, 12_000].map(Duration::from_millis);
        let lease = leases[rng.usize(0..leases.len())];
        // Between two clocks, a difference of one percent is allowed for.
        let drift = if wild { 60_000 } else { 4_900 };
        // A system that forgets tokens derives the next ones from the clock, which must not go back
        // then.
        let forgets = match system {
            System::Cache if !calm && !wild => forgets(rng),
            _ => Vec::new(),
        };
        let apart = if forgets.is_empty() && system != System::Memory { APART } else { 0 };
        let process = |rng: &mut fastrand::Rng| ProcessPlan {
            seed: rng.u64(..),
            fast: rng.i32(-drift..=drift),
            wall: rng.i64(-apart..=apart),
            tasks: rng.u32(1..=3),
            lease: if rng.bool() { lease } else { leases[rng.usize(0..3)] },
            stops: if calm { Vec::new() } else { stops(rng, lease) },
            cuts: match !calm && rng.u32(0..3) == 0 {
                true => vec![(millis(rng, 0..10_000), lease * rng.u32(1..30) / 10)],
                false => Vec::new(),
            },
        };
        let processes: Vec<_> = (0..rng.u32(2..=4)).map(|_| process(rng)).collect();
        let longest = processes.iter().map(|p| p.lease).max().unwrap_or(lease);
        let lock = |n, rng: &mut fastrand::Rng| {
            let kind = [Kind::Mutex, Kind::Mutex, Kind::RwLock, Kind::Semaphore][rng.usize(0..4)];
            LockPlan { name: format!("lock {n}"), kind, permits: rng.u32(2..=4) }
        };
        let locks = (0..rng.u32(1..=2)).map(|n| lock(n, rng)).collect();
        let server_fast = if system == System::Memory { 0 } else { rng.i32(-drift..=drift) };
        let mut weather = if calm { Weather::calm() } else { Weather::of(rng, lease) };
        if system.looks_behind() && !calm && rng.bool() {
            weather.stale = rng.u32(0..300);
        }
        let evictions = if calm { 0 } else { rng.u32(0..3) };
        Self {
            system,
            calm,
            wild,
            locks,
            processes,
            weather,
            evictions,
            longest,
            forgets,
            server_fast,
        }
    }
}

fn forgets(rng: &mut fastrand::Rng) -> Vec<Duration> {
    let mut all: Vec<_> = (0..rng.u32(0..4)).map(|_| millis(rng, 0..10_000)).collect();
    all.sort();
    all
}

fn stops(rng: &mut fastrand::Rng, lease: Duration) -> Vec<(Duration, Option<Duration>)> {
    let mut all = Vec::new();
    if rng.u32(0..3) == 0 {
        for _ in 0..rng.u32(1..4) {
            all.push((millis(rng, 0..10_000), Some(lease * rng.u32(1..40) / 10)));
        }
    }
    if rng.u32(0..6) == 0 {
        all.push((millis(rng, 0..10_000), None));
    }
    all.sort();
    all
}

impl Weather {
    fn calm() -> Self {
        let (quick, slow) = (Duration::from_millis(1), Duration::from_millis(5));
        Self { quick, slow, late: 0, lost: 0, broken: 0, doubled: 0, halved: 0, stale: 0 }
    }

    fn of(rng: &mut fastrand::Rng, lease: Duration) -> Self {
        let mut chance = |most: u32| if rng.bool() { rng.u32(0..most) } else { 0 };
        let (late, lost, broken, doubled) = (chance(200), chance(150), chance(150), chance(200));
        let halved = chance(150);
        let slow = lease * rng.u32(1..25) / 10;
        let quick = Duration::from_millis(rng.u64(1..30));
        Self { quick, slow, late, lost, broken, doubled, halved, stale: 0 }
    }

    /// Ends all faults, so that a world can recover.
    pub(crate) fn clears(&mut self) {
        let quick = self.quick.min(Duration::from_millis(5));
        *self = Self { quick, ..Self::calm() };
    }
}
