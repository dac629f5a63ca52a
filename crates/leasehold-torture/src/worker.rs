//! A worker: acquires the locks in every way that the library offers, works under them, and reports
//! each step to the parent.
//!
//! Each worker is a process of its own with four lanes, so that claims of one client compete as
//! well as claims of several. Under an exclusive lock it reads both resources, thinks, and writes
//! them. Before it begins, it checks that its guard is held. Before it writes it mostly does not,
//! like most programs. The faults hit this gap.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::io::Write;
use std::pin::pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use leasehold::{
    Client, Error, ErrorKind, Hold, Kind, LostReason, Mutex, Released, RwLock, Semaphore, State,
};
use tokio::sync::{oneshot, watch};

use super::clocks::WallClock;
use super::history::{Ask, Event, LockSpec, OpId, Time, What, nanos, now};
use super::ledger::{self, Entry, Ledger, Proof};
use super::resource::Read;
use super::served::Served;
use super::wire::{FromWorker, Setup, ToWorker, Where, line};

/// Number of concurrent operations of one worker.
const LANES: u64 = 4;
/// Time limit for an unreachable store when a worker begins. The servers may just be failing over.
const AWAY_AT_FIRST: Duration = Duration::from_secs(60);
/// Time limit for an unreachable store when a worker ends. It is shorter than the parent's wait for
/// its workers.
const AWAY_AT_LAST: Duration = Duration::from_secs(8);

/// Runs a worker process.
pub(super) fn main() -> ExitCode {
    // A worker that outlives the parent would stay in the queues, or stay paused forever.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(|e| e.to_string()).and_then(|r| {
        let local = tokio::task::LocalSet::new();
        local.block_on(&r, work())
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            send(&FromWorker::Unable(why));
            ExitCode::FAILURE
        }
    }
}

/// Sends a message to the parent. Ends the process if the parent is gone.
fn send(message: &FromWorker) {
    if std::io::stdout().lock().write_all(line(message).as_bytes()).is_err() {
        std::process::exit(1);
    }
}

async fn work() -> Result<(), String> {
    let (setup, worker) = Worker::start().await?;
    worker.connect_lanes().await;
    let mut rng = Rng::with_seed(setup.seed);
    let lanes: Vec<_> =
        (0..LANES).map(|_| tokio::task::spawn_local(worker.clone().lane(rng.fork()))).collect();
    let ticker = tokio::task::spawn_local(report_stalls(worker.lease));
    for lane in lanes {
        lane.await.map_err(|e| e.to_string())?;
    }
    // Pending releases may wait for a slow or cut-off store, which is not a failure of the worker.
    let closed = patiently(AWAY_AT_LAST, || worker.locks.clone().close());
    closed.await.map_err(|e| e.to_string())?;
    ticker.abort();
    send(&FromWorker::Bye);
    Ok(())
}

/// Retries while the store cannot be reached. Faults come at any time, also when a worker begins or
/// ends, and the machine may be busy.
async fn patiently<T, F: Future<Output = leasehold::Result<T>>>(
    patience: Duration,
    work: impl Fn() -> F,
) -> leasehold::Result<T> {
    let end = Instant::now() + patience;
    loop {
        match work().await {
            Err(e) if e.kind() == ErrorKind::Unreachable && Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            done => return done,
        }
    }
}

/// Reports when this process was not scheduled, because then it is not entitled to its turn.
async fn report_stalls(lease: Duration) {
    let (tick, late) = (lease / 20, lease / 10);
    loop {
        let from = now();
        tokio::time::sleep(tick).await;
        let to = now();
        if to - from > nanos(tick + late) {
            send(&FromWorker::Stalled { from, to });
        }
    }
}

struct Worker {
    id: u32,
    locks: Client,
    specs: Vec<LockSpec>,
    lease: Duration,
    next: Cell<u32>,
    stopping: watch::Sender<bool>,
    /// The fenced resource, if it is in the store itself and not in the parent.
    ledger: Option<Box<dyn Ledger>>,
    /// Operations that wait for the resources' answers.
    answers: RefCell<HashMap<OpId, oneshot::Sender<ToWorker>>>,
}

impl Worker {
    async fn start() -> Result<(Setup, Rc<Self>), String> {
        let (sender, mut inbox) = tokio::sync::mpsc::unbounded_channel();
        std::thread::Builder::new()
            .name("parent".into())
            .spawn(move || {
                for line in std::io::stdin().lines() {
                    let Some(message) = line.ok().and_then(|l| serde_json::from_str(&l).ok())
                    else {
                        break;
                    };
                    if sender.send(message).is_err() {
                        return;
                    }
                }
                // The parent is gone.
                std::process::exit(1);
            })
            .map_err(|e| e.to_string())?;
        let Some(ToWorker::Setup(setup)) = inbox.recv().await else {
            return Err("internal command: `leasehold stress` starts its workers itself".into());
        };
        setup.clock.as_ref().map_or(Ok(()), WallClock::check)?;
        let locks = match &setup.store {
            Where::Url(url) => patiently(AWAY_AT_FIRST, || leasehold::connect(url)).await,
            Where::Served(socket) => {
                leasehold::builder().store(Arc::new(Served::new(socket.clone(), setup.worker)))
            }
        };
        let ledger = match (&setup.store, &setup.ledger) {
            (Where::Url(url), Some(run)) => {
                let opened = patiently(AWAY_AT_FIRST, || ledger::open(url, run, 0)).await;
                Some(opened.map_err(|e| e.to_string())?)
            }
            _ => None,
        };
        let worker = Rc::new(Self {
            id: setup.worker,
            locks: locks.map_err(|e| e.to_string())?,
            specs: setup.locks.clone(),
            lease: Duration::from_millis(setup.lease_ms),
            next: Cell::new(0),
            stopping: watch::Sender::default(),
            ledger,
            answers: RefCell::default(),
        });
        let receiver = worker.clone();
        tokio::task::spawn_local(async move {
            while let Some(message) = inbox.recv().await {
                receiver.receive(message);
            }
        });
        Ok((setup, worker))
    }

    /// Opens connections for all lanes before timing matters. Six workers that begin at once can
    /// keep a database busy for longer than their leases last.
    async fn connect_lanes(self: &Rc<Self>) {
        let connect = |n: u64| {
            let worker = self.clone();
            tokio::task::spawn_local(async move {
                let run = worker.specs.first().and_then(|spec| spec.name.rsplit_once('/'));
                let name = format!("{}/begin-{}-{n}", run.map_or("", |(run, _)| run), worker.id);
                let lock = worker.locks.mutex(name).lease(worker.lease);
                // Problems of the store are reported by the lanes.
                let _ = patiently(AWAY_AT_FIRST, async || lock.lock().await?.release().await).await;
            })
        };
        for lane in (0..LANES).map(connect).collect::<Vec<_>>() {
            let _ = lane.await;
        }
    }

    fn receive(&self, message: ToWorker) {
        match message {
            ToWorker::Setup(_) => {}
            ToWorker::Stop => drop(self.stopping.send_replace(true)),
            ToWorker::Read { op, .. } | ToWorker::Wrote { op, .. } => {
                if let Some(waiting) = self.answers.borrow_mut().remove(&op) {
                    let _ = waiting.send(message);
                }
            }
        }
    }

    async fn ask(&self, op: OpId, message: FromWorker) -> Option<ToWorker> {
        let (sender, answer) = oneshot::channel();
        self.answers.borrow_mut().insert(op, sender);
        send(&message);
        answer.await.ok()
    }

    async fn lane(self: Rc<Self>, mut rng: Rng) {
        while !*self.stopping.borrow() {
            self.operation(&mut rng).await;
            let idle = rng.u64(..2_000);
            tokio::time::sleep(Duration::from_micros(idle)).await;
        }
    }

    fn event(&self, op: OpId, at: Time, what: What) {
        send(&FromWorker::Event(Event { op, at, what }));
    }

    async fn operation(&self, rng: &mut Rng) {
        let op = OpId { worker: self.id, n: self.next.replace(self.next.get() + 1) };
        let lock = rng.usize(..self.specs.len());
        let spec = &self.specs[lock];
        let weight = match spec.kind {
            Kind::RwLock if rng.u32(..3) > 0 => 1,
            Kind::RwLock => spec.capacity,
            Kind::Semaphore => rng.u32(1..=spec.capacity),
            Kind::Mutex => 1,
        };
        let ask = match rng.u32(..20) {
            0..=11 => Ask::Lock,
            12..=14 => Ask::Try,
            15..=17 => Ask::Timeout,
            _ => Ask::Cancel,
        };
        let patience = self.short(rng) / 2;
        let Some(guard) = self.take(op, lock, weight, ask, patience).await else { return };
        let exclusive = weight == spec.capacity && spec.kind != Kind::Semaphore;
        self.hold(op, lock, &guard, exclusive, rng).await;
        self.let_go(op, guard, rng).await;
    }

    /// Returns a random time between zero and about a lease, mostly short.
    fn short(&self, rng: &mut Rng) -> Duration {
        let scale = match rng.u32(..250) {
            0..=219 => 0.004,
            220..=248 => 0.03,
            _ if *self.stopping.borrow() => 0.03,
            _ => 2.0,
        };
        self.lease.mul_f64(rng.f64() * scale)
    }

    async fn take(
        &self,
        op: OpId,
        lock: usize,
        weight: u32,
        ask: Ask,
        patience: Duration,
    ) -> Option<Hold> {
        let handle = self.handle(op, lock);
        let mut taking = pin!(handle.take(weight, ask, patience));
        self.event(op, now(), What::Invoked { lock, weight, ask });
        let taken = if ask == Ask::Cancel {
            tokio::select! {
                taken = &mut taking => taken,
                () = tokio::time::sleep(patience) => {
                    // The time is read before `taking` is dropped, at the end of this function.
                    self.event(op, now(), What::Abandoned);
                    return None;
                }
            }
        } else {
            taking.await
        };
        match taken {
            Ok(guard) => {
                self.event(op, now(), What::Acquired { token: guard.grant().get() });
                Some(guard)
            }
            Err(error) => {
                self.failed(op, &error);
                None
            }
        }
    }

    fn failed(&self, op: OpId, error: &leasehold::Error) {
        let (kind, error) = (error.kind().as_str().to_owned(), error.to_string());
        self.event(op, now(), What::Failed { kind, error });
    }

    fn handle(&self, op: OpId, lock: usize) -> Handle {
        let LockSpec { name, kind, capacity } = &self.specs[lock];
        let notified = AtomicBool::new(false);
        let waits = move |place: leasehold::store::Place| {
            if !notified.swap(true, Ordering::SeqCst) {
                let what = What::Waiting { ahead: place.ahead };
                send(&FromWorker::Event(Event { op, at: now(), what }));
            }
        };
        let lease = self.lease;
        match kind {
            Kind::Mutex => Handle::Mutex(self.locks.mutex(name).lease(lease).on_waiting(waits)),
            Kind::RwLock => Handle::RwLock(self.locks.rwlock(name).lease(lease).on_waiting(waits)),
            Kind::Semaphore => {
                let semaphore = self.locks.semaphore(name, *capacity);
                Handle::Semaphore(semaphore.lease(lease).on_waiting(waits))
            }
        }
    }

    /// Checks the guard. The report contains the time *before* the check.
    fn is_held(&self, op: OpId, guard: &Hold) -> bool {
        let at = now();
        let left = guard.remaining();
        if guard.is_held() && !left.is_zero() {
            self.event(op, at, What::Held { until: at.saturating_add(nanos(left)) });
            return true;
        }
        let reason = match guard.state() {
            State::Lost(reason) => Some(reason),
            _ => None,
        };
        let expired = reason == Some(LostReason::Expired);
        let reason = reason.map_or("neither lost nor held".into(), |r| r.to_string());
        self.event(op, now(), What::Lost { expired, reason });
        false
    }

    async fn hold(&self, op: OpId, lock: usize, guard: &Hold, exclusive: bool, rng: &mut Rng) {
        if !self.is_held(op, guard) {
            return;
        }
        let think = self.short(rng);
        if !exclusive {
            self.stay(guard, think).await;
            self.is_held(op, guard);
            return;
        }
        let token = guard.grant().get();
        let stored = self.read_stored(lock, guard).await;
        let read = self.ask(op, FromWorker::Read { op, lock, token }).await;
        let Some(ToWorker::Read { plain, fenced, .. }) = read else { return };
        self.stay(guard, think).await;
        let careful = rng.u32(..8) == 0;
        if careful && !self.is_held(op, guard) {
            return;
        }
        let fenced = fenced.filter(|_| self.ledger.is_none());
        let write = FromWorker::Write { op, lock, token, plain, fenced };
        let wrote = self.ask(op, write).await;
        let stored = self.write_stored(op, lock, token, stored).await;
        if let Some(ToWorker::Wrote { plain, fenced, .. }) = wrote {
            let fenced = if self.ledger.is_some() { stored } else { Some(fenced) };
            self.event(op, now(), What::Wrote { plain, fenced });
        }
        self.is_held(op, guard);
    }

    /// Returns the contents of the resource in the store and the proof for the write. `None`: the
    /// resource is not in the store, it refused the read, or it did not answer.
    async fn read_stored(&self, lock: usize, guard: &Hold) -> Option<(Read, Proof)> {
        let ledger = self.ledger.as_ref()?;
        let proof = ledger.prove(guard).ok()?;
        let read = self.soon(ledger.read(lock, &proof)).await?;
        Some((read?, proof))
    }

    /// Returns whether the resource in the store accepted the write. `None`: unknown.
    async fn write_stored(
        &self,
        op: OpId,
        lock: usize,
        token: u64,
        stored: Option<(Read, Proof)>,
    ) -> Option<bool> {
        let (read, proof) = stored?;
        let ledger = self.ledger.as_ref()?;
        self.soon(ledger.write(lock, &proof, Entry::new(read, token, op))).await
    }

    /// Returns an answer if it arrives in time. The connection to the store may be cut.
    async fn soon<T>(&self, answer: impl Future<Output = leasehold::Result<T>>) -> Option<T> {
        let patience = (self.lease * 2).max(Duration::from_secs(1));
        tokio::time::timeout(patience, answer).await.ok()?.ok()
    }

    /// Holds for a while, or until the lock is lost or the run is over.
    async fn stay(&self, guard: &Hold, think: Duration) {
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            _ = stopping.wait_for(|stop| *stop) => {}
            () = tokio::time::sleep(think) => {}
            _ = guard.lost() => {}
        }
    }

    async fn let_go(&self, op: OpId, guard: Hold, rng: &mut Rng) {
        let lost = matches!(guard.state(), State::Lost(_));
        self.event(op, now(), What::Releasing);
        if rng.u32(..5) == 0 {
            return drop(guard);
        }
        match guard.release().await {
            Ok(Released::Pending) => {
                let error = Error::new(ErrorKind::Unreachable, "the release is pending");
                self.failed(op, &error);
            }
            Ok(_) => self.event(op, now(), What::Released),
            // The loss was reported before, or is reported by this error.
            Err(error) if lost => drop(error),
            Err(error) => self.failed(op, &error),
        }
    }
}

/// A lock of any kind.
enum Handle {
    Mutex(Mutex),
    RwLock(RwLock),
    Semaphore(Semaphore),
}

impl Handle {
    async fn take(&self, weight: u32, ask: Ask, patience: Duration) -> leasehold::Result<Hold> {
        match self {
            Self::Mutex(m) => by(ask, || m.lock(), || m.try_lock(), || m.lock_timeout(patience))
                .await
                .map(Hold::from),
            Self::RwLock(l) if weight == 1 => {
                by(ask, || l.read(), || l.try_read(), || l.read_timeout(patience))
                    .await
                    .map(Hold::from)
            }
            Self::RwLock(l) => {
                by(ask, || l.write(), || l.try_write(), || l.write_timeout(patience))
                    .await
                    .map(Hold::from)
            }
            Self::Semaphore(s) => {
                let limited = || s.acquire_many_timeout(weight, patience);
                by(ask, || s.acquire_many(weight), || s.try_acquire_many(weight), limited)
                    .await
                    .map(Hold::from)
            }
        }
    }
}

async fn by<T, A, B, C>(
    ask: Ask,
    wait: impl FnOnce() -> A,
    once: impl FnOnce() -> B,
    limited: impl FnOnce() -> C,
) -> T
where
    A: Future<Output = T>,
    B: Future<Output = T>,
    C: Future<Output = T>,
{
    match ask {
        Ask::Lock | Ask::Cancel => wait().await,
        Ask::Try => once().await,
        Ask::Timeout => limited().await,
    }
}
