//! Plays a world to its end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::store::{ClaimState, Evict, Store};
use leasehold_core::testing::{downgrade, try_upgrade};
use leasehold_core::{
    Builder, Client, Clock, Error, ErrorKind, Hold, Kind, LostReason, MAX_READERS, Name, Owner,
    Registry, State, World,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::ground::Ground;
use crate::judge::{Asked, Judge, Pace};
use crate::net::{Air, Wire};
use crate::plan::{Plan, ProcessPlan, System, TROUBLE, millis};

/// The results of a world.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) story: Vec<String>,
    pub(crate) broken: Vec<String>,
    pub(crate) seen: BTreeMap<&'static str, u64>,
}

/// Time limit for all calls to end, after all faults have ended.
const PATIENCE: Duration = Duration::from_secs(300);
/// Maximum time for which data without a client stays in the store, in addition to the leases.
const RESIDUE: Duration = Duration::from_secs(10);

/// Plays the world of this seed on `system`. Records its story if `verbose`.
pub(crate) fn play(system: System, seed: u64, verbose: bool) -> Outcome {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(world(system, seed, verbose))
}

async fn world(system: System, seed: u64, verbose: bool) -> Outcome {
    let mut rng = fastrand::Rng::with_seed(seed);
    let plan = Arc::new(Plan::of(system, &mut rng));
    let judge = Arc::new(Judge::new(&plan, verbose));
    if plan.calm {
        judge.saw("calm");
    }
    let air = Arc::new(Air {
        weather: Mutex::new(plan.weather.clone()),
        rng: Mutex::new(rng.fork()),
        judge: judge.clone(),
    });
    let ground = Ground::new(&plan, &mut rng);
    let onlooker = World::new(rng.u64(..));
    if system == System::Cache {
        onlooker.process(ground.clone().open()).await;
    }
    let store = onlooker.process(ground.clone().at_hand()).await;
    let began = Instant::now();
    let numbers = Arc::new(AtomicU64::new(0));
    let mut living: Vec<JoinHandle<()>> = Vec::new();
    for (n, process) in plan.processes.iter().enumerate() {
        let world = World::new(process.seed);
        let wire = Arc::new(Wire { air: air.clone(), process: n, cut: Mutex::new(false) });
        let clock = Clock::simulated(process.fast, process.wall);
        let reached = ground.clone().reached(wire.clone(), clock.clone());
        let store = world.process(reached).await;
        let builder = Builder::new(Registry::default()).clock(clock);
        let locks = builder.simulated(store, &world).expect("the store promises what is required");
        let dies = process.stops.iter().any(|(_, pause)| pause.is_none());
        for task in 0..process.tasks {
            let task = Task {
                actor: format!("{n}.{task}"),
                rng: rng.fork(),
                locks: locks.clone(),
                world: world.clone(),
                judge: judge.clone(),
                plan: plan.clone(),
                process: process.clone(),
                numbers: numbers.clone(),
                granted_at: None,
            };
            let running = tokio::spawn(world.process(task.live(began)));
            // The tasks of a killed process never end, because it stays paused forever.
            if !dies {
                living.push(running);
            }
        }
        tokio::spawn(stops(n, process.clone(), world, judge.clone(), began));
        tokio::spawn(cuts(n, process.clone(), wire, judge.clone(), began));
    }
    let evicts = evictions(plan.clone(), store.clone(), judge.clone(), rng.fork());
    tokio::spawn(onlooker.process(evicts));
    tokio::spawn(forgets(plan.clone(), ground, judge.clone(), began));
    sleep_until(began + TROUBLE).await;
    air.weather.lock().unwrap().clears();
    judge.log(|| "all faults end".into());
    for running in living {
        match timeout(PATIENCE, running).await {
            Ok(Ok(())) => {}
            Ok(Err(why)) => judge.breaks(&format!("a task panicked: {why}")),
            Err(_) => judge.breaks("a call never ended"),
        }
    }
    // Requests in flight may still arrive, and their claims last for a lease then.
    sleep(plan.weather.slow * 2 + plan.longest * 3 + RESIDUE).await;
    let left = onlooker.process(async move { store.list("").await }).await;
    let left = left.expect("the store is in this process");
    if !left.is_empty() {
        judge.breaks(&format!("claims remain in the store: {left:?}"));
    }
    let (story, broken, seen) = judge.ends();
    Outcome { story, broken, seen }
}

async fn stops(n: usize, plan: ProcessPlan, world: World, judge: Arc<Judge>, began: Instant) {
    for (at, pause) in plan.stops {
        sleep_until(began + at).await;
        world.stop();
        let Some(pause) = pause else {
            judge.saw("killed");
            return judge.log(|| format!("{n} is killed"));
        };
        judge.saw("stopped");
        judge.log(|| format!("{n} is paused for {pause:?}"));
        sleep(pause).await;
        world.go_on();
        judge.log(|| format!("{n} continues"));
    }
}

async fn cuts(n: usize, plan: ProcessPlan, wire: Arc<Wire>, judge: Arc<Judge>, began: Instant) {
    for (at, length) in plan.cuts {
        sleep_until(began + at).await;
        judge.saw("cut");
        judge.log(|| format!("{n} is partitioned"));
        *wire.cut.lock().unwrap() = true;
        sleep_until((Instant::now() + length).min(began + TROUBLE)).await;
        *wire.cut.lock().unwrap() = false;
        judge.log(|| format!("{n} is connected again"));
    }
}

async fn forgets(plan: Arc<Plan>, ground: Arc<Ground>, judge: Arc<Judge>, began: Instant) {
    for at in &plan.forgets {
        sleep_until(began + *at).await;
        judge.saw("forgotten");
        judge.log(|| "the store loses all data".into());
        ground.forget();
    }
}

async fn evictions(
    plan: Arc<Plan>,
    store: Arc<dyn Store>,
    judge: Arc<Judge>,
    mut rng: fastrand::Rng,
) {
    for _ in 0..plan.evictions {
        sleep(millis(&mut rng, 500..5_000)).await;
        let lock = rng.usize(0..plan.locks.len());
        let name = Name::new(&plan.locks[lock].name).expect("a name");
        let Ok(Some(seen)) = store.read(&name).await else { continue };
        // Evicts one claim of the queue, or all holders.
        let one = rng.choice(&seen.claims).and_then(|claim| claim.token);
        let which = match one.filter(|_| rng.bool()) {
            Some(one) => Evict::Token(one),
            None => Evict::Holders,
        };
        // With cells, claims may change between a read and a write, so only one claim is evicted.
        let which = match (plan.system, which, one) {
            (System::Memory, which, _) => which,
            (_, _, Some(one)) => Evict::Token(one),
            (_, _, None) => continue,
        };
        let in_cells = plan.system != System::Memory;
        let held = seen.claims.iter();
        let held = held.filter(|claim| in_cells || claim.state != ClaimState::Waiting);
        let tokens = held.filter_map(|claim| claim.token);
        let tokens: Vec<_> =
            tokens.filter(|token| which == Evict::Holders || one == Some(*token)).collect();
        judge.saw("evicted");
        judge.log(|| format!("{which:?} of {name} are evicted: {tokens:?}"));
        judge.evicted(lock, tokens);
        let _ = store.evict(&name, which).await;
    }
}

/// A task of a program.
struct Task {
    actor: String,
    rng: fastrand::Rng,
    locks: Client,
    world: World,
    judge: Arc<Judge>,
    plan: Arc<Plan>,
    process: ProcessPlan,
    numbers: Arc<AtomicU64>,
    /// When it was notified of its present hold.
    granted_at: Option<Instant>,
}

/// How a lock is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Try,
    For(Duration),
    /// Without a limit, but the future is dropped after this time.
    Dropped(Duration),
    Patient,
}

/// The options of a request.
#[derive(Clone)]
struct With {
    how: How,
    weight: u32,
    max_hold: Option<Duration>,
    min_hold: Duration,
    lock_delay: Duration,
    renewed: bool,
    owner: Option<Owner>,
}

impl std::fmt::Display for With {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { how, weight, max_hold, min_hold, lock_delay, renewed, owner } = self;
        let owned = owner.is_some();
        write!(f, "{how:?}, weight {weight}, max_hold {max_hold:?}, min_hold {min_hold:?}, ")?;
        write!(f, "lock_delay {lock_delay:?}, renewed {renewed}, owned {owned}")
    }
}

impl Task {
    async fn live(mut self, began: Instant) {
        while began.elapsed() < TROUBLE {
            let pause = millis(&mut self.rng, 0..400);
            sleep(pause).await;
            self.turn().await;
        }
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.rng.u32(0..n) == 0
    }

    /// Returns whether the system supports cooldowns. Cells do not.
    fn can_delay(&self) -> bool {
        self.plan.system == System::Memory
    }

    fn wish(&mut self, lock: usize) -> With {
        let (lease, plan) = (self.process.lease, self.plan.locks[lock].clone());
        let how = match self.rng.u32(0..8) {
            0 => How::Try,
            1 | 2 => How::For(lease * self.rng.u32(0..20) / 10),
            3 => How::Dropped(lease * self.rng.u32(0..15) / 10),
            _ => How::Patient,
        };
        let weight = match plan.kind {
            Kind::Mutex => 1,
            Kind::RwLock if self.one_in(3) => MAX_READERS,
            Kind::RwLock => 1,
            Kind::Semaphore => self.rng.u32(1..=plan.permits),
        };
        let tenths = self.rng.u32(2..20);
        let renewed = !self.one_in(10);
        With {
            how,
            weight,
            max_hold: self.one_in(8).then_some(lease * tenths / 10),
            // A hold that expires is not released, so its `min_hold` has no effect.
            min_hold: if self.can_delay() && renewed && self.one_in(10) {
                millis(&mut self.rng, 50..600)
            } else {
                Duration::ZERO
            },
            lock_delay: if self.can_delay() && !self.plan.calm && self.one_in(10) {
                millis(&mut self.rng, 50..600)
            } else {
                Duration::ZERO
            },
            renewed,
            owner: (plan.kind == Kind::Mutex && self.one_in(5)).then(Owner::new),
        }
    }

    /// Acquires a lock, holds it for a while, and releases it.
    async fn turn(&mut self) {
        let lock = self.rng.usize(0..self.plan.locks.len());
        let with = self.wish(lock);
        let asked = self.asks(lock, &with, None);
        let Some(guard) = self.ask(&asked, &with).await else { return };
        self.granted_at = Some(Instant::now());
        self.hold(lock, &with, &guard).await;
        if with.owner.is_some() && guard.is_held() {
            let again = self.asks(lock, &with, Some(guard.grant()));
            let inner = self.ask(&again, &With { how: How::Patient, ..with.clone() }).await;
            if inner.is_some() {
                self.judge.saw("re-entered");
            }
            self.hold(lock, &with, &guard).await;
        }
        if self.plan.locks[lock].kind == Kind::RwLock {
            self.convert(&asked, &with, &guard).await;
        }
        // In this simulation the parent gives the guard away to the child, and cannot release it.
        // So the hold must end on its own.
        let ends_by_itself = with.max_hold.is_some() && with.min_hold.is_zero();
        if ends_by_itself && with.owner.is_none() && self.one_in(3) {
            return self.fork(guard).await;
        }
        self.let_go(&asked, &with, guard).await;
    }

    fn asks(&self, lock: usize, with: &With, again: Option<leasehold_core::Token>) -> Asked {
        Asked {
            number: self.numbers.fetch_add(1, Ordering::Relaxed),
            actor: self.actor.clone(),
            lock,
            weight: with.weight,
            at: Instant::now(),
            patient: with.how == How::Patient,
            min_hold: with.min_hold,
            lock_delay: with.lock_delay,
            max_hold: with.max_hold,
            again,
        }
    }

    async fn ask(&self, asked: &Asked, with: &With) -> Option<Hold> {
        let name = &self.plan.locks[asked.lock].name;
        let again = if asked.again.is_some() { " again" } else { "" };
        self.judge.log(|| format!("{} requests {name}{again}: {with}", self.actor));
        self.judge.asks(asked);
        let patience = match with.how {
            How::Dropped(after) => after,
            _ => Duration::MAX,
        };
        let answer = timeout(patience, self.acquire(asked, with)).await;
        self.in_time(asked, with);
        match answer {
            Ok(Ok(guard)) => {
                let mut asked = asked.clone();
                // The owner's earlier hold may have been lost by the time of the answer.
                asked.again = asked.again.filter(|held| *held == guard.grant());
                self.judge.granted(&asked, &guard);
                return Some(guard);
            }
            Ok(Err(error)) => self.refused(asked, with, &error),
            Err(_) => {
                self.judge.saw("dropped");
                self.judge.log(|| format!("{} drops its request for {name}", self.actor));
            }
        }
        self.judge.asks_no_more(asked);
        None
    }

    async fn acquire(&self, asked: &Asked, with: &With) -> leasehold_core::Result<Hold> {
        let plan = &self.plan.locks[asked.lock];
        /// Sets the options on any kind of lock.
        macro_rules! optioned {
            ($lock:expr) => {{
                let lock = $lock.lease(self.process.lease).lock_delay(with.lock_delay);
                let lock = lock.min_hold(with.min_hold);
                let lock = if with.renewed { lock } else { lock.no_renewal() };
                with.max_hold.iter().fold(lock, |lock, d| lock.max_hold(*d))
            }};
        }
        let is_reader = asked.weight == 1;
        match plan.kind {
            Kind::Mutex => {
                let mutex = optioned!(self.locks.mutex(&plan.name));
                let mutex = with.owner.iter().fold(mutex, |mutex, owner| mutex.owner(owner));
                match with.how {
                    How::Try => mutex.try_lock().await.map(Hold::from),
                    How::For(limit) => mutex.lock_timeout(limit).await.map(Hold::from),
                    How::Dropped(_) | How::Patient => mutex.lock().await.map(Hold::from),
                }
            }
            Kind::RwLock => {
                let lock = optioned!(self.locks.rwlock(&plan.name));
                match (with.how, is_reader) {
                    (How::Try, true) => lock.try_read().await.map(Hold::from),
                    (How::Try, false) => lock.try_write().await.map(Hold::from),
                    (How::For(limit), true) => lock.read_timeout(limit).await.map(Hold::from),
                    (How::For(limit), false) => lock.write_timeout(limit).await.map(Hold::from),
                    (_, true) => lock.read().await.map(Hold::from),
                    (_, false) => lock.write().await.map(Hold::from),
                }
            }
            Kind::Semaphore => {
                let semaphore = optioned!(self.locks.semaphore(&plan.name, plan.permits));
                match with.how {
                    How::Try => semaphore.try_acquire_many(asked.weight).await.map(Hold::from),
                    How::For(limit) => {
                        semaphore.acquire_many_timeout(asked.weight, limit).await.map(Hold::from)
                    }
                    How::Dropped(_) | How::Patient => {
                        semaphore.acquire_many(asked.weight).await.map(Hold::from)
                    }
                }
            }
        }
    }

    /// Checks that the answer arrived in time, in calm weather.
    fn in_time(&self, asked: &Asked, with: &With) {
        let limit = match with.how {
            How::Try => Duration::ZERO,
            How::For(limit) | How::Dropped(limit) => limit * 102 / 100,
            How::Patient => return,
        };
        let late = asked.at.elapsed().saturating_sub(limit);
        if self.plan.calm && late > Pace::of(self.plan.system).hand_over {
            self.judge.breaks(&format!("{} received its answer {late:?} too late", self.actor));
        }
    }

    /// Checks that there is a cause for this error.
    fn refused(&self, asked: &Asked, with: &With, error: &Error) {
        self.judge.log(|| format!("{} gets an error: {error}", self.actor));
        let fair = match (error.kind(), with.how) {
            (ErrorKind::Contended, How::Try) => {
                self.judge.saw("contended");
                true
            }
            (ErrorKind::Timeout, How::For(limit)) => {
                self.judge.saw("timed out");
                asked.at.elapsed() >= limit * 94 / 100
            }
            // The store did not answer by the time limit.
            (ErrorKind::Unreachable, How::For(limit)) if asked.at.elapsed() >= limit * 94 / 100 => {
                true
            }
            (ErrorKind::Unreachable | ErrorKind::AtRisk | ErrorKind::Lost, _) => !self.plan.calm,
            _ => false,
        };
        if !fair {
            self.judge.breaks(&format!("{} got an error without a cause: {error}", self.actor));
        }
    }

    /// Works, and checks the guard several times.
    async fn hold(&mut self, lock: usize, with: &With, guard: &Hold) {
        let lease = self.process.lease;
        let tenths = [0, 1, 3, 15][self.rng.usize(0..4)];
        let slice = lease * tenths / 10 / 4;
        for _ in 0..4 {
            sleep(slice).await;
            self.look(lock, with, guard);
        }
    }

    fn look(&self, lock: usize, with: &With, guard: &Hold) {
        let lost = match guard.state() {
            State::Lost(reason) => Some(reason),
            _ => None,
        };
        if let Some(reason) = lost {
            self.judge.saw("lost");
            self.judge
                .log(|| format!("{} finds out that its lock is lost: {reason:?}", self.actor));
            if self.plan.calm && with.renewed && with.max_hold.is_none() {
                self.judge
                    .breaks(&format!("{} lost its lock in a world without faults", self.actor));
            }
        }
        let since = self.granted_at.map_or(Duration::ZERO, |at| at.elapsed());
        let longest = with.max_hold.map(|d| d * if self.plan.wild { 2 } else { 1 } * 102 / 100);
        if lost.is_none() && longest.is_some_and(|longest| since > longest) {
            self.judge
                .breaks(&format!("{} has held it for {since:?}, longer than max_hold", self.actor));
        }
        if lost.is_none() {
            self.judge.log(|| format!("{} still holds with {}", self.actor, guard.grant()));
            self.judge.believes(lock, guard.grant(), self.process.lease);
        }
    }

    /// Converts a writer to a reader or a reader to a writer, possibly several times. Some
    /// conversions are dropped early.
    async fn convert(&mut self, asked: &Asked, with: &With, guard: &Hold) {
        for _ in 0..self.rng.u32(0..4) {
            let patience = match self.one_in(3) {
                true => self.process.lease * self.rng.u32(0..10) / 10,
                false => Duration::MAX,
            };
            let (token, heavier) = (guard.grant(), self.rng.bool());
            let done = if heavier {
                let done = timeout(patience, try_upgrade(guard)).await;
                if let Ok(Ok(())) = done {
                    self.judge.weighs(asked.lock, token, MAX_READERS);
                    self.judge.saw("upgraded");
                }
                done
            } else {
                // It is a reader from here on, whatever the result.
                self.judge.weighs(asked.lock, token, 1);
                let done = timeout(patience, downgrade(guard)).await;
                if let Ok(Ok(())) = done {
                    self.judge.saw("downgraded");
                }
                done
            };
            self.judge.log(|| {
                format!(
                    "{} changes the weight of {token}, heavier: {heavier}: {done:?}",
                    self.actor
                )
            });
            let ends_by_itself = !with.renewed || with.max_hold.is_some();
            let fair = match done.map(|done| done.map_err(|error| error.kind())) {
                Err(_) | Ok(Ok(())) => true,
                Ok(Err(ErrorKind::Contended | ErrorKind::Unsupported)) => heavier,
                Ok(Err(ErrorKind::Lost)) => !self.plan.calm || ends_by_itself,
                Ok(Err(_)) => !self.plan.calm,
            };
            if !fair {
                self.judge
                    .breaks(&format!("{} could not change the weight of {token}", self.actor));
            }
            self.hold(asked.lock, with, guard).await;
        }
    }

    /// Forks the process. The child may use the guard in any way, but the guard reports that it is
    /// lost, and the child's calls have no effect. The parent's hold continues until it expires.
    async fn fork(&mut self, guard: Hold) {
        self.judge.saw("forked");
        let (watch, token) = (guard.watch(), guard.grant());
        let (locks, drops) = (self.locks.clone(), self.rng.bool());
        let child = async move {
            let state = guard.state();
            let tried = locks.mutex("of a child").try_lock().await.map(drop);
            if drops {
                drop(guard);
                return (state, tried, None);
            }
            (state, tried, Some(guard.release().await.map(drop)))
        };
        let before = watch.remaining();
        let (state, tried, released) = self.world.fork().process(child).await;
        self.judge.log(|| {
            format!(
                "{} forks, and the child has {token}: {state:?}, {tried:?}, {released:?}",
                self.actor
            )
        });
        if state != State::Lost(LostReason::Forked) || released.is_some_and(|done| done.is_ok()) {
            self.judge.breaks(&format!("a child of {} believes that it holds {token}", self.actor));
        }
        if tried.is_ok() {
            self.judge.breaks(&format!("a child of {} acquired a lock", self.actor));
        }
        if watch.remaining() != before {
            self.judge.breaks(&format!("a child of {} ended its parent's hold", self.actor));
        }
        while !watch.remaining().is_zero() {
            sleep(self.process.lease / 4).await;
        }
    }

    async fn let_go(&mut self, asked: &Asked, with: &With, guard: Hold) {
        let (was_held, token) = (guard.is_held(), guard.grant());
        self.judge.lets_go(asked, token);
        if self.one_in(3) {
            self.judge.log(|| format!("{} drops {}", self.actor, token));
            drop(guard);
            return self.judge.ended(asked, token);
        }
        self.judge.log(|| format!("{} releases {}", self.actor, guard.grant()));
        let released = guard.release().await;
        self.judge.ended(asked, token);
        self.judge.log(|| format!("{} released: {released:?}", self.actor));
        let ends_by_itself = !with.renewed || with.max_hold.is_some();
        if let Err(error) = released {
            self.judge.saw("released late");
            let fair = match error.kind() {
                ErrorKind::Lost => !was_held || !self.plan.calm || ends_by_itself,
                _ => !self.plan.calm,
            };
            if !fair {
                self.judge.breaks(&format!("{} could not release: {error}", self.actor));
            }
        }
    }
}
