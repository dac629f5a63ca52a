//! What a seed says of its world.

use std::time::Duration;

use leasehold_core::Kind;

/// What keeps the queues of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum System {
    /// The store in memory, which all processes ask.
    Memory,
    /// Cells that end by the server's clock, and may all be forgotten: as in memcached.
    Cache,
    /// Cells that end by the server's clock, a bell, and looks that may be behind: as in a stream of NATS.
    Stream,
    /// Values of which nothing ends by itself, so that whoever looks judges: as in an object store.
    Objects,
}

impl System {
    pub(crate) const IN_CELLS: [Self; 3] = [Self::Cache, Self::Stream, Self::Objects];

    /// Whether a look may show what is no more.
    pub(crate) fn looks_behind(self) -> bool {
        matches!(self, Self::Stream | Self::Objects)
    }
}

/// A world.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) system: System,
    /// Nothing fails, and answers are quick: then more is promised.
    pub(crate) calm: bool,
    /// Clocks go further apart than leases allow for: tokens alone are promised.
    pub(crate) wild: bool,
    pub(crate) locks: Vec<LockPlan>,
    pub(crate) processes: Vec<ProcessPlan>,
    pub(crate) weather: Weather,
    /// How often somebody throws out whoever holds something.
    pub(crate) evictions: u32,
    /// The longest lease anybody asks for.
    pub(crate) longest: Duration,
    /// When the system forgets all that it knows.
    pub(crate) forgets: Vec<Duration>,
    /// Parts in a million that the server's clock is too fast.
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
    /// For its own chance.
    pub(crate) seed: u64,
    /// Parts in a million that its clock is too fast.
    pub(crate) fast: i32,
    /// What its wall clock is ahead of the server's, in microseconds.
    pub(crate) wall: i64,
    pub(crate) tasks: u32,
    pub(crate) lease: Duration,
    /// When it is stopped, and for how long; the last time perhaps for ever.
    pub(crate) stops: Vec<(Duration, Option<Duration>)>,
    /// When the network forgets it, and for how long.
    pub(crate) cuts: Vec<(Duration, Duration)>,
}

/// What becomes of messages: chances in a thousand, and how long they take.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    pub(crate) quick: Duration,
    pub(crate) slow: Duration,
    pub(crate) late: u32,
    pub(crate) lost: u32,
    pub(crate) broken: u32,
    pub(crate) doubled: u32,
    /// Of several requests that are sent together some are done.
    pub(crate) halved: u32,
    /// A look shows what was.
    pub(crate) stale: u32,
}

/// How old what a look shows may be.
pub(crate) const STALE: Duration = Duration::from_secs(3);
/// Wall clocks are apart by up to a day.
const APART: i64 = 86_400_000_000;

/// For as long things happen to a world; after that it may come to rest.
pub(crate) const TROUBLE: Duration = Duration::from_secs(12);

pub(crate) fn millis(dice: &mut fastrand::Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(dice.u64(range))
}

impl Plan {
    pub(crate) fn of(system: System, dice: &mut fastrand::Rng) -> Self {
        let calm = dice.u32(0..4) == 0;
        let wild = !calm && dice.u32(0..10) == 0;
        let leases = [300, 1_000, 3_000, 12_000].map(Duration::from_millis);
        let lease = leases[dice.usize(0..leases.len())];
        // Of two clocks, that one may be a hundredth ahead of the other is allowed for.
        let drift = if wild { 60_000 } else { 4_900 };
        // Whoever forgets tokens draws the next ones above the clock, which must not fall back then.
        let forgets = match system {
            System::Cache if !calm && !wild => forgets(dice),
            _ => Vec::new(),
        };
        let apart = if forgets.is_empty() && system != System::Memory { APART } else { 0 };
        let process = |dice: &mut fastrand::Rng| ProcessPlan {
            seed: dice.u64(..),
            fast: dice.i32(-drift..=drift),
            wall: dice.i64(-apart..=apart),
            tasks: dice.u32(1..=3),
            lease: if dice.bool() { lease } else { leases[dice.usize(0..3)] },
            stops: if calm { Vec::new() } else { stops(dice, lease) },
            cuts: match !calm && dice.u32(0..3) == 0 {
                true => vec![(millis(dice, 0..10_000), lease * dice.u32(1..30) / 10)],
                false => Vec::new(),
            },
        };
        let processes: Vec<_> = (0..dice.u32(2..=4)).map(|_| process(dice)).collect();
        let longest = processes.iter().map(|p| p.lease).max().unwrap_or(lease);
        let lock = |n, dice: &mut fastrand::Rng| {
            let kind = [Kind::Mutex, Kind::Mutex, Kind::RwLock, Kind::Semaphore][dice.usize(0..4)];
            LockPlan { name: format!("lock {n}"), kind, permits: dice.u32(2..=4) }
        };
        let locks = (0..dice.u32(1..=2)).map(|n| lock(n, dice)).collect();
        let server_fast = if system == System::Memory { 0 } else { dice.i32(-drift..=drift) };
        let mut weather = if calm { Weather::calm() } else { Weather::of(dice, lease) };
        if system.looks_behind() && !calm && dice.bool() {
            weather.stale = dice.u32(0..300);
        }
        let evictions = if calm { 0 } else { dice.u32(0..3) };
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

fn forgets(dice: &mut fastrand::Rng) -> Vec<Duration> {
    let mut all: Vec<_> = (0..dice.u32(0..4)).map(|_| millis(dice, 0..10_000)).collect();
    all.sort();
    all
}

fn stops(dice: &mut fastrand::Rng, lease: Duration) -> Vec<(Duration, Option<Duration>)> {
    let mut all = Vec::new();
    if dice.u32(0..3) == 0 {
        for _ in 0..dice.u32(1..4) {
            all.push((millis(dice, 0..10_000), Some(lease * dice.u32(1..40) / 10)));
        }
    }
    if dice.u32(0..6) == 0 {
        all.push((millis(dice, 0..10_000), None));
    }
    all.sort();
    all
}

impl Weather {
    fn calm() -> Self {
        let (quick, slow) = (Duration::from_millis(1), Duration::from_millis(5));
        Self { quick, slow, late: 0, lost: 0, broken: 0, doubled: 0, halved: 0, stale: 0 }
    }

    fn of(dice: &mut fastrand::Rng, lease: Duration) -> Self {
        let mut chance = |most: u32| if dice.bool() { dice.u32(0..most) } else { 0 };
        let (late, lost, broken, doubled) = (chance(200), chance(150), chance(150), chance(200));
        let halved = chance(150);
        let slow = lease * dice.u32(1..25) / 10;
        let quick = Duration::from_millis(dice.u64(1..30));
        Self { quick, slow, late, lost, broken, doubled, halved, stale: 0 }
    }

    /// What comes when a world may come to rest.
    pub(crate) fn clears(&mut self) {
        let quick = self.quick.min(Duration::from_millis(5));
        *self = Self { quick, ..Self::calm() };
    }
}
