//! A world, played to its end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::store::{Evict, Standing, Store};
use leasehold_core::{
    Builder, Clock, Error, ErrorKind, Guard, Kind, Leasehold, LostReason, MAX_READERS, Name, Owner,
    Registry, State, World,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::ground::Ground;
use crate::judge::{Asked, Judge, Pace};
use crate::net::{Air, Wire};
use crate::plan::{Plan, ProcessPlan, System, TROUBLE, millis};

/// What there is to tell of a world.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) story: Vec<String>,
    pub(crate) broken: Vec<String>,
    pub(crate) seen: BTreeMap<&'static str, u64>,
}

/// How long after all trouble every call must have come to an end.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long anything stays in the store that nobody keeps alive, beside the leases.
const RESIDUE: Duration = Duration::from_secs(10);

/// Plays the world of this seed, on that; `told`, with a story of it.
pub(crate) fn play(system: System, seed: u64, told: bool) -> Told {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(world(system, seed, told))
}

async fn world(system: System, seed: u64, told: bool) -> Told {
    let mut dice = fastrand::Rng::with_seed(seed);
    let plan = Arc::new(Plan::of(system, &mut dice));
    let judge = Arc::new(Judge::new(&plan, told));
    if plan.calm {
        judge.saw("calm");
    }
    let air = Arc::new(Air {
        weather: Mutex::new(plan.weather.clone()),
        dice: Mutex::new(dice.fork()),
        judge: judge.clone(),
    });
    let ground = Ground::new(&plan, &mut dice);
    let onlooker = World::new(dice.u64(..));
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
        let locks = builder.simulated(store, &world).expect("it promises what is asked for");
        let dies = process.stops.iter().any(|(_, pause)| pause.is_none());
        for task in 0..process.tasks {
            let task = Task {
                who: format!("{n}.{task}"),
                dice: dice.fork(),
                locks: locks.clone(),
                world: world.clone(),
                judge: judge.clone(),
                plan: plan.clone(),
                process: process.clone(),
                numbers: numbers.clone(),
                granted_at: None,
            };
            let running = tokio::spawn(world.process(task.live(began)));
            // Of one that is killed nothing ends: it stands still for ever.
            if !dies {
                living.push(running);
            }
        }
        tokio::spawn(stops(n, process.clone(), world, judge.clone(), began));
        tokio::spawn(cuts(n, process.clone(), wire, judge.clone(), began));
    }
    let evicts = evictions(plan.clone(), store.clone(), judge.clone(), dice.fork());
    tokio::spawn(onlooker.process(evicts));
    tokio::spawn(forgets(plan.clone(), ground, judge.clone(), began));
    sleep_until(began + TROUBLE).await;
    air.weather.lock().unwrap().clears();
    judge.tell(|| "the weather clears".into());
    for running in living {
        match timeout(PATIENCE, running).await {
            Ok(Ok(())) => {}
            Ok(Err(why)) => judge.breaks(&format!("a task panicked: {why}")),
            Err(_) => judge.breaks("a call never came to an end"),
        }
    }
    // What is still on its way may yet arrive, and lasts for a lease then.
    sleep(plan.weather.slow * 2 + plan.longest * 3 + RESIDUE).await;
    let left = onlooker.process(async move { store.list("").await }).await;
    let left = left.expect("it is in this process");
    if !left.is_empty() {
        judge.breaks(&format!("left behind: {left:?}"));
    }
    let (story, broken, seen) = judge.ends();
    Told { story, broken, seen }
}

async fn stops(n: usize, plan: ProcessPlan, world: World, judge: Arc<Judge>, began: Instant) {
    for (at, pause) in plan.stops {
        sleep_until(began + at).await;
        world.stop();
        let Some(pause) = pause else {
            judge.saw("killed");
            return judge.tell(|| format!("{n} is killed"));
        };
        judge.saw("stopped");
        judge.tell(|| format!("{n} is stopped for {pause:?}"));
        sleep(pause).await;
        world.go_on();
        judge.tell(|| format!("{n} goes on"));
    }
}

async fn cuts(n: usize, plan: ProcessPlan, wire: Arc<Wire>, judge: Arc<Judge>, began: Instant) {
    for (at, length) in plan.cuts {
        sleep_until(began + at).await;
        judge.saw("cut");
        judge.tell(|| format!("{n} is cut off"));
        *wire.cut.lock().unwrap() = true;
        sleep_until((Instant::now() + length).min(began + TROUBLE)).await;
        *wire.cut.lock().unwrap() = false;
        judge.tell(|| format!("{n} is joined again"));
    }
}

async fn forgets(plan: Arc<Plan>, ground: Arc<Ground>, judge: Arc<Judge>, began: Instant) {
    for at in &plan.forgets {
        sleep_until(began + *at).await;
        judge.saw("forgotten");
        judge.tell(|| "all is forgotten".into());
        ground.forget();
    }
}

async fn evictions(
    plan: Arc<Plan>,
    store: Arc<dyn Store>,
    judge: Arc<Judge>,
    mut dice: fastrand::Rng,
) {
    for _ in 0..plan.evictions {
        sleep(millis(&mut dice, 500..5_000)).await;
        let lock = dice.usize(0..plan.locks.len());
        let name = Name::new(&plan.locks[lock].name).expect("a name");
        let Ok(Some(seen)) = store.read(&name).await else { continue };
        // One of all who stand there, or all that hold.
        let one = dice.choice(&seen.claims).and_then(|claim| claim.token);
        let which = match one.filter(|_| dice.bool()) {
            Some(one) => Evict::Token(one),
            None => Evict::Holders,
        };
        // In cells others may come and go between a look and a write.
        let which = match (plan.system, which, one) {
            (System::Memory, which, _) => which,
            (_, _, Some(one)) => Evict::Token(one),
            (_, _, None) => continue,
        };
        let in_cells = plan.system != System::Memory;
        let held = seen.claims.iter();
        let held = held.filter(|claim| in_cells || claim.standing != Standing::Waiting);
        let tokens = held.filter_map(|claim| claim.token);
        let tokens: Vec<_> =
            tokens.filter(|token| which == Evict::Holders || one == Some(*token)).collect();
        judge.saw("evicted");
        judge.tell(|| format!("{which:?} is thrown out of {name}, so {tokens:?}"));
        judge.evicted(lock, tokens);
        let _ = store.evict(&name, which).await;
    }
}

/// A task of a program.
struct Task {
    who: String,
    dice: fastrand::Rng,
    locks: Leasehold,
    world: World,
    judge: Arc<Judge>,
    plan: Arc<Plan>,
    process: ProcessPlan,
    numbers: Arc<AtomicU64>,
    /// When it was told of what it holds.
    granted_at: Option<Instant>,
}

/// How it asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Try,
    For(Duration),
    /// And loses patience after a while.
    Dropped(Duration),
    Patient,
}

/// With which options.
#[derive(Clone)]
struct With {
    how: How,
    weight: u32,
    max_hold: Option<Duration>,
    at_least: Duration,
    lock_delay: Duration,
    renewed: bool,
    owner: Option<Owner>,
}

impl std::fmt::Display for With {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { how, weight, max_hold, at_least, lock_delay, renewed, owner } = self;
        let owned = owner.is_some();
        write!(f, "{how:?}, weight {weight}, max_hold {max_hold:?}, at_least {at_least:?}, ")?;
        write!(f, "lock_delay {lock_delay:?}, renewed {renewed}, owned {owned}")
    }
}

impl Task {
    async fn live(mut self, began: Instant) {
        while began.elapsed() < TROUBLE {
            let pause = millis(&mut self.dice, 0..400);
            sleep(pause).await;
            self.turn().await;
        }
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.dice.u32(0..n) == 0
    }

    /// Nothing in cells keeps a lock that nobody has.
    fn can_delay(&self) -> bool {
        self.plan.system == System::Memory
    }

    fn wish(&mut self, lock: usize) -> With {
        let (lease, plan) = (self.process.lease, self.plan.locks[lock].clone());
        let how = match self.dice.u32(0..8) {
            0 => How::Try,
            1 | 2 => How::For(lease * self.dice.u32(0..20) / 10),
            3 => How::Dropped(lease * self.dice.u32(0..15) / 10),
            _ => How::Patient,
        };
        let weight = match plan.kind {
            Kind::Mutex => 1,
            Kind::RwLock if self.one_in(3) => MAX_READERS,
            Kind::RwLock => 1,
            Kind::Semaphore => self.dice.u32(1..=plan.permits),
        };
        let tenths = self.dice.u32(2..20);
        let renewed = !self.one_in(10);
        With {
            how,
            weight,
            max_hold: self.one_in(8).then_some(lease * tenths / 10),
            // Nobody gives back what ran out by itself, so nobody keeps it closed.
            at_least: if self.can_delay() && renewed && self.one_in(10) {
                millis(&mut self.dice, 50..600)
            } else {
                Duration::ZERO
            },
            lock_delay: if self.can_delay() && !self.plan.calm && self.one_in(10) {
                millis(&mut self.dice, 50..600)
            } else {
                Duration::ZERO
            },
            renewed,
            owner: (plan.kind == Kind::Mutex && self.one_in(5)).then(Owner::new),
        }
    }

    /// Takes a lock, holds it for a while, and lets go.
    async fn turn(&mut self) {
        let lock = self.dice.usize(0..self.plan.locks.len());
        let with = self.wish(lock);
        let asked = self.asks(lock, &with, None);
        let Some(guard) = self.ask(&asked, &with).await else { return };
        self.granted_at = Some(Instant::now());
        self.hold(lock, &with, &guard).await;
        if with.owner.is_some() && guard.is_held() {
            let again = self.asks(lock, &with, Some(guard.token()));
            let inner = self.ask(&again, &With { how: How::Patient, ..with.clone() }).await;
            if inner.is_some() {
                self.judge.saw("re-entered");
            }
            self.hold(lock, &with, &guard).await;
        }
        if self.plan.locks[lock].kind == Kind::RwLock {
            self.reweigh(&asked, &with, &guard).await;
        }
        // What the child has cannot be the parent's as well here, which forgets it: so it must end by itself.
        let ends_by_itself = with.max_hold.is_some() && with.at_least.is_zero();
        if ends_by_itself && with.owner.is_none() && self.one_in(3) {
            return self.fork(guard).await;
        }
        self.let_go(&asked, &with, guard).await;
    }

    fn asks(&self, lock: usize, with: &With, again: Option<leasehold_core::Token>) -> Asked {
        Asked {
            number: self.numbers.fetch_add(1, Ordering::Relaxed),
            who: self.who.clone(),
            lock,
            weight: with.weight,
            at: Instant::now(),
            patient: with.how == How::Patient,
            at_least: with.at_least,
            lock_delay: with.lock_delay,
            max_hold: with.max_hold,
            again,
        }
    }

    async fn ask(&self, asked: &Asked, with: &With) -> Option<Guard> {
        let name = &self.plan.locks[asked.lock].name;
        let again = if asked.again.is_some() { " again" } else { "" };
        self.judge.tell(|| format!("{} asks for {name}{again}: {with}", self.who));
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
                // By the time of the answer, what the owner held may have been lost.
                asked.again = asked.again.filter(|held| *held == guard.token());
                self.judge.granted(&asked, &guard);
                return Some(guard);
            }
            Ok(Err(error)) => self.refused(asked, with, &error),
            Err(_) => {
                self.judge.saw("dropped");
                self.judge.tell(|| format!("{} wants {name} no more", self.who));
            }
        }
        self.judge.asks_no_more(asked);
        None
    }

    async fn acquire(&self, asked: &Asked, with: &With) -> leasehold_core::Result<Guard> {
        let plan = &self.plan.locks[asked.lock];
        /// The options, on each kind of lock.
        macro_rules! optioned {
            ($lock:expr) => {{
                let lock = $lock.lease(self.process.lease).lock_delay(with.lock_delay);
                let lock = lock.at_least(with.at_least);
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
                    How::Try => mutex.try_lock().await,
                    How::For(limit) => mutex.lock_timeout(limit).await,
                    How::Dropped(_) | How::Patient => mutex.lock().await,
                }
            }
            Kind::RwLock => {
                let lock = optioned!(self.locks.rwlock(&plan.name));
                match (with.how, is_reader) {
                    (How::Try, true) => lock.try_read().await,
                    (How::Try, false) => lock.try_write().await,
                    (How::For(limit), true) => lock.read_timeout(limit).await,
                    (How::For(limit), false) => lock.write_timeout(limit).await,
                    (_, true) => lock.read().await,
                    (_, false) => lock.write().await,
                }
            }
            Kind::Semaphore => {
                let semaphore = optioned!(self.locks.semaphore(&plan.name, plan.permits));
                match with.how {
                    How::Try => semaphore.try_acquire_many(asked.weight).await,
                    How::For(limit) => semaphore.acquire_many_timeout(asked.weight, limit).await,
                    How::Dropped(_) | How::Patient => semaphore.acquire_many(asked.weight).await,
                }
            }
        }
    }

    /// Whether the answer came when it had to, in calm weather.
    fn in_time(&self, asked: &Asked, with: &With) {
        let limit = match with.how {
            How::Try => Duration::ZERO,
            How::For(limit) | How::Dropped(limit) => limit * 102 / 100,
            How::Patient => return,
        };
        let late = asked.at.elapsed().saturating_sub(limit);
        if self.plan.calm && late > Pace::of(self.plan.system).hand_over {
            self.judge.breaks(&format!("{} had its answer {late:?} too late", self.who));
        }
    }

    /// Whether there is a cause for this answer.
    fn refused(&self, asked: &Asked, with: &With, error: &Error) {
        self.judge.tell(|| format!("{} is refused: {error}", self.who));
        let fair = match (error.kind(), with.how) {
            (ErrorKind::Contended, How::Try) => {
                self.judge.saw("contended");
                true
            }
            (ErrorKind::Timeout, How::For(limit)) => {
                self.judge.saw("timed out");
                asked.at.elapsed() >= limit * 94 / 100
            }
            (ErrorKind::Unreachable | ErrorKind::AtRisk | ErrorKind::Lost, _) => !self.plan.calm,
            _ => false,
        };
        if !fair {
            self.judge.breaks(&format!("{} was refused without a cause: {error}", self.who));
        }
    }

    /// Works, and looks at the guard from time to time.
    async fn hold(&mut self, lock: usize, with: &With, guard: &Guard) {
        let lease = self.process.lease;
        let tenths = [0, 1, 3, 15][self.dice.usize(0..4)];
        let slice = lease * tenths / 10 / 4;
        for _ in 0..4 {
            sleep(slice).await;
            self.look(lock, with, guard);
        }
    }

    fn look(&self, lock: usize, with: &With, guard: &Guard) {
        let lost = match guard.state() {
            State::Lost(reason) => Some(reason),
            _ => None,
        };
        if let Some(reason) = lost {
            self.judge.saw("lost");
            self.judge.tell(|| format!("{} sees that it was lost: {reason:?}", self.who));
            if self.plan.calm && with.renewed && with.max_hold.is_none() {
                self.judge.breaks(&format!("{} lost it in calm weather", self.who));
            }
        }
        let since = self.granted_at.map_or(Duration::ZERO, |at| at.elapsed());
        let longest = with.max_hold.map(|d| d * if self.plan.wild { 2 } else { 1 } * 102 / 100);
        if lost.is_none() && longest.is_some_and(|longest| since > longest) {
            self.judge.breaks(&format!("{} holds it for {since:?}, max_hold is over", self.who));
        }
        if lost.is_none() {
            self.judge.tell(|| format!("{} still holds by {}", self.who, guard.token()));
            self.judge.believes(lock, guard.token(), self.process.lease);
        }
    }

    /// A writer becomes a reader, or a reader a writer, perhaps both; now and then somebody loses patience.
    async fn reweigh(&mut self, asked: &Asked, with: &With, guard: &Guard) {
        for _ in 0..self.dice.u32(0..4) {
            let patience = match self.one_in(3) {
                true => self.process.lease * self.dice.u32(0..10) / 10,
                false => Duration::MAX,
            };
            let (token, heavier) = (guard.token(), self.dice.bool());
            let done = if heavier {
                let done = timeout(patience, guard.try_upgrade()).await;
                if let Ok(Ok(())) = done {
                    self.judge.weighs(asked.lock, token, MAX_READERS);
                    self.judge.saw("upgraded");
                }
                done
            } else {
                // It is a reader from here on, whatever comes of it.
                self.judge.weighs(asked.lock, token, 1);
                let done = timeout(patience, guard.downgrade()).await;
                if let Ok(Ok(())) = done {
                    self.judge.saw("downgraded");
                }
                done
            };
            self.judge.tell(|| format!("{} makes {token} heavier, {heavier}: {done:?}", self.who));
            let ends_by_itself = !with.renewed || with.max_hold.is_some();
            let fair = match done.map(|done| done.map_err(|error| error.kind())) {
                Err(_) | Ok(Ok(())) => true,
                Ok(Err(ErrorKind::Contended | ErrorKind::Unsupported)) => heavier,
                Ok(Err(ErrorKind::Lost)) => !self.plan.calm || ends_by_itself,
                Ok(Err(_)) => !self.plan.calm,
            };
            if !fair {
                self.judge.breaks(&format!("{} could not change what {token} weighs", self.who));
            }
            self.hold(asked.lock, with, guard).await;
        }
    }

    /// The process forks, and the child does with the guard what it likes: it knows that it holds nothing, and
    /// nothing becomes of it. What the parent holds goes on, until its time is over.
    async fn fork(&mut self, guard: Guard) {
        self.judge.saw("forked");
        let (watch, token) = (guard.watch(), guard.token());
        let (locks, drops) = (self.locks.clone(), self.dice.bool());
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
        self.judge.tell(|| {
            format!(
                "{} forks, and the child has {token}: {state:?}, {tried:?}, {released:?}",
                self.who
            )
        });
        if state != State::Lost(LostReason::Forked) || released.is_some_and(|done| done.is_ok()) {
            self.judge.breaks(&format!("a child of {} believed to hold {token}", self.who));
        }
        if tried.is_ok() {
            self.judge.breaks(&format!("a child of {} took a lock", self.who));
        }
        if watch.remaining() != before {
            self.judge.breaks(&format!("a child of {} ended what its parent holds", self.who));
        }
        while !watch.remaining().is_zero() {
            sleep(self.process.lease / 4).await;
        }
    }

    async fn let_go(&mut self, asked: &Asked, with: &With, guard: Guard) {
        let (was_held, token) = (guard.is_held(), guard.token());
        self.judge.lets_go(asked, token);
        if self.one_in(3) {
            self.judge.tell(|| format!("{} drops {}", self.who, token));
            drop(guard);
            return self.judge.ended(asked, token);
        }
        self.judge.tell(|| format!("{} releases {}", self.who, guard.token()));
        let released = guard.release().await;
        self.judge.ended(asked, token);
        self.judge.tell(|| format!("{} released: {released:?}", self.who));
        let ends_by_itself = !with.renewed || with.max_hold.is_some();
        if let Err(error) = released {
            self.judge.saw("released late");
            let fair = match error.kind() {
                ErrorKind::Lost => !was_held || !self.plan.calm || ends_by_itself,
                _ => !self.plan.calm,
            };
            if !fair {
                self.judge.breaks(&format!("{} could not release: {error}", self.who));
            }
        }
    }
}
