//! The parent: keeps the resources and the history, starts the workers, and lets them be
//! tortured.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use leasehold::store::{Guarantees, Survival};
use leasehold::{ErrorKind, Kind, Leasehold, MAX_READERS};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::args::Plan;
use super::checker::{self, Property, Terms};
use super::faults::{Ambush, disturb, inject};
use super::history::{
    Fault, Final, History, LockSpec, OpId, Resource, Time, Trouble, WorkerId, Write, nanos, now,
};
use super::ledger::{self, Entry, Ledger};
use super::reach::Reach;
use super::report::Report;
use super::resource::Cell;
use super::wire::{FromWorker, Setup, ToWorker, line};

/// How many locks of each kind: while one is blocked by a fault, others go on.
const LOCKS: u32 = 2;
/// How many permits the semaphore has.
const PERMITS: u32 = 3;
/// What a busy machine may take besides what the store promises.
const SLACK: Duration = Duration::from_secs(1);

/// What everything in the parent shares.
pub(super) struct Parent {
    pub(super) lease: Duration,
    /// Whether holds run out.
    pub(super) leases: bool,
    /// After which a holder that is stopped has certainly lost: its lease, or the session that its
    /// lease lives in.
    pub(super) runs_out: Duration,
    /// How the workers reach the store.
    pub(super) reach: Reach,
    /// What is started as a worker.
    program: PathBuf,
    locks: Vec<LockSpec>,
    /// What this run's fenced resource is called in the store, if it is there.
    ledger: Option<String>,
    state: Mutex<State>,
    /// A worker has ended.
    ended: Notify,
}

pub(super) struct State {
    pub(super) history: History,
    pub(super) ambushes: Vec<Ambush>,
    cells: Vec<(Cell, Cell)>,
    workers: BTreeMap<WorkerId, Worker>,
    next_worker: WorkerId,
    injected: BTreeMap<Fault, usize>,
    rng: Rng,
    /// Why no worker can begin.
    unable: Option<String>,
}

/// A worker process that has not ended.
struct Worker {
    pid: Pid,
    outbox: mpsc::UnboundedSender<String>,
    /// A fault is being injected.
    in_trouble: bool,
    /// Killed by us. What it asks of the resources from then on comes from the grave: its
    /// connection to them ended with it.
    dead: bool,
    said_goodbye: bool,
}

impl State {
    /// A worker that nothing is being done to.
    pub(super) fn pick(&mut self, rng: &mut Rng) -> Option<WorkerId> {
        let free = self.workers.iter().filter(|(_, w)| !w.in_trouble && !w.dead);
        let worker = rng.choice(free.map(|(id, _)| *id).collect::<Vec<_>>())?;
        if let Some(w) = self.workers.get_mut(&worker) {
            w.in_trouble = true;
        }
        Some(worker)
    }

    /// Sends a signal to a worker; it cannot be another process's, since it has not been waited
    /// for.
    pub(super) fn signal(&self, worker: WorkerId, signal: Signal) {
        if let Some(w) = self.workers.get(&worker) {
            let _ = kill_process(w.pid, signal);
        }
    }

    /// Stops or kills a worker.
    pub(super) fn strike(&mut self, worker: WorkerId, signal: Signal, at: u64) {
        if let Some(w) = self.workers.get_mut(&worker) {
            w.in_trouble = true;
            if signal == Signal::KILL {
                w.dead = true;
                self.history.deaths.insert(worker, at);
            }
        }
        self.signal(worker, signal);
    }

    pub(super) fn count(&mut self, fault: Fault) {
        *self.injected.entry(fault).or_default() += 1;
    }

    /// A fault is over, and its worker may be given another.
    pub(super) fn over(&mut self, fault: Fault, trouble: Trouble) {
        self.count(fault);
        if let Some(w) = trouble.worker.and_then(|id| self.workers.get_mut(&id)) {
            w.in_trouble = false;
        }
        self.history.troubles.push(trouble);
    }

    fn ask_to_end(&self) {
        for id in self.workers.keys() {
            self.send(*id, &ToWorker::Stop);
        }
    }

    fn end_by_force(&mut self, patience: Duration) {
        for (id, worker) in &mut self.workers {
            // Not a fault that was injected, so no death that excuses what is missing.
            worker.dead = true;
            let what = format!("worker {id} did not end within {patience:?} of being asked to");
            self.history.crashes.push(what);
            let _ = kill_process(worker.pid, Signal::KILL);
        }
    }

    fn send(&self, worker: WorkerId, message: &ToWorker) {
        if let Some(w) = self.workers.get(&worker) {
            let _ = w.outbox.send(line(message));
        }
    }

    fn hear(&mut self, worker: WorkerId, message: FromWorker) {
        if self.workers.get(&worker).is_none_or(|w| w.dead)
            && !matches!(message, FromWorker::Event(_))
        {
            return;
        }
        match message {
            FromWorker::Event(event) => self.history.events.push(event),
            FromWorker::Read { op, lock, token } => self.read(worker, op, lock, token),
            FromWorker::Write { op, lock, token, plain, fenced } => {
                let Some((p, f)) = self.cells.get_mut(lock) else { return };
                let plain = p.write(token, plain, op);
                let fenced = fenced.is_some_and(|read| f.write(token, read, op));
                for (taken, resource) in [(plain, Resource::Plain), (fenced, Resource::Fenced)] {
                    if taken {
                        self.history.writes.push(Write { lock, resource, op, token });
                    }
                }
                self.send(worker, &ToWorker::Wrote { op, plain, fenced });
            }
            FromWorker::Stalled { from, to } => {
                self.history.troubles.push(Trouble { worker: Some(worker), from, to });
            }
            FromWorker::Unable(why) => self.unable = Some(why),
            FromWorker::Bye => {
                if let Some(w) = self.workers.get_mut(&worker) {
                    w.said_goodbye = true;
                }
            }
        }
    }

    fn read(&mut self, worker: WorkerId, op: OpId, lock: usize, token: u64) {
        let Some((plain, fenced)) = self.cells.get_mut(lock) else { return };
        let (plain, fenced) = (plain.read(token), fenced.read(token));
        let free = self.workers.get(&worker).is_some_and(|w| !w.in_trouble);
        while free && let Some(ambush) = self.ambushes.pop() {
            if ambush.spring(self, worker) {
                break;
            }
        }
        if let Some(plain) = plain {
            self.send(worker, &ToWorker::Read { op, plain, fenced });
        }
    }
}

impl Parent {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts another worker in the place of a killed one.
    pub(super) fn respawn(self: &Arc<Self>) {
        if let Err(why) = self.spawn() {
            self.state().history.crashes.push(format!("a worker could not be started: {why}"));
        }
    }

    fn spawn(self: &Arc<Self>) -> std::io::Result<()> {
        let mut child = Command::new(&self.program)
            .arg(super::WORKER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(std::io::Error::other("no pipes"));
        };
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| std::io::Error::other("it ended at once"))?;
        let (outbox, lines) = mpsc::unbounded_channel();
        let mut state = self.state();
        let id = state.next_worker;
        state.next_worker += 1;
        let store = self.reach.tell(id)?;
        let worker = Worker { pid, outbox, in_trouble: false, dead: false, said_goodbye: false };
        state.workers.insert(id, worker);
        let seed = state.rng.u64(..);
        let setup = Setup {
            worker: id,
            store,
            locks: self.locks.clone(),
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            ledger: self.ledger.clone(),
            seed,
        };
        state.send(id, &ToWorker::Setup(setup));
        drop(state);
        tokio::spawn(write_to(stdin, lines));
        tokio::spawn(self.clone().attend(id, child, stdout));
        Ok(())
    }

    /// Listens to a worker until it ends.
    async fn attend(self: Arc<Self>, id: WorkerId, mut child: Child, stdout: ChildStdout) {
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            // A killed worker's last line may be half a line.
            if let Ok(message) = serde_json::from_str(&line) {
                self.state().hear(id, message);
            }
        }
        let how = match child.wait().await {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        };
        let mut state = self.state();
        let ended = state.workers.remove(&id);
        if let Some(lines) = self.reach.lines() {
            lines.forget(id);
        }
        if ended.is_some_and(|w| !w.dead && !w.said_goodbye) {
            let why = state.unable.as_ref().map_or(String::new(), |why| format!(": {why}"));
            state.history.crashes.push(format!("worker {id} ended by itself: {how}{why}"));
        }
        drop(state);
        self.ended.notify_one();
    }

    /// Notes when this process did not get to run: then nobody got answers in time.
    async fn note_stalls(self: Arc<Self>) {
        let tick = self.lease / 20;
        loop {
            let from = now();
            sleep(tick).await;
            self.note_if_late(from, tick);
        }
    }

    /// Notes when the store took its time over a lock that nobody else wants: it stood still, or what it
    /// stands on did, and then nobody got answers in time.
    async fn note_slow_store(self: Arc<Self>, probe: leasehold::Mutex) {
        loop {
            sleep(self.lease / 20).await;
            let from = now();
            if let Ok(guard) = probe.try_lock().await {
                let _ = guard.release().await;
            }
            self.note_if_late(from, Duration::ZERO);
        }
    }

    /// Notes everybody's trouble since `from`, if that is much longer ago than it should be.
    fn note_if_late(&self, from: Time, usual: Duration) {
        let to = now();
        if to - from > nanos(usual + self.lease / 10) {
            self.state().history.troubles.push(Trouble { worker: None, from, to });
        }
    }

    /// Asks everybody to end, and kills who does not.
    async fn end_workers(&self, patience: Duration) {
        self.state().ask_to_end();
        if !self.all_ended(patience).await {
            self.state().end_by_force(patience);
            self.all_ended(Duration::from_secs(5)).await;
        }
    }

    async fn all_ended(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.state().workers.is_empty() {
            if timeout_at(deadline, self.ended.notified()).await.is_err() {
                return self.state().workers.is_empty();
            }
        }
        true
    }
}

/// Tells a worker what is sent to it, until it or we end.
async fn write_to(mut stdin: ChildStdin, mut lines: mpsc::UnboundedReceiver<String>) {
    while let Some(line) = lines.recv().await {
        if stdin.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// The locks of one run. Their names are the run's own: nobody else's locks are touched.
fn locks(run: u64, kinds: &[Kind]) -> Vec<LockSpec> {
    let spec = |(kind, n): (&Kind, u32)| {
        let (word, capacity) = match kind {
            Kind::Mutex => ("mutex", 1),
            Kind::RwLock => ("rwlock", MAX_READERS),
            Kind::Semaphore => ("semaphore", PERMITS),
        };
        LockSpec { name: format!("{}{word}-{n}", prefix(run)), kind: *kind, capacity }
    };
    kinds.iter().flat_map(|kind| (1..=LOCKS).map(move |n| (kind, n))).map(spec).collect()
}

fn run_name(run: u64) -> String {
    format!("{run:016x}")
}

fn prefix(run: u64) -> String {
    format!("leasehold-torture-{}/", run_name(run))
}

/// A dead holder's lock is free after this.
fn recovery(promises: &Guarantees, lease: Duration) -> Duration {
    promises.recovery + lease * promises.recovery_leases + SLACK
}

/// After which a hold that nobody renews is over at the store.
fn runs_out(store: &Leasehold, lease: Duration) -> Duration {
    match store.guarantees().recovery_leases {
        // A session's: what may be asked for is three quarters of it or more.
        0 => store.store().longest_lease().saturating_mul(4) / 3,
        _ => lease,
    }
}

/// The worse of two outcomes.
fn worse(one: Survival, other: Survival) -> Survival {
    match (one, other) {
        (Survival::Unsafe, _) | (_, Survival::Unsafe) => Survival::Unsafe,
        (Survival::Fenced, _) | (_, Survival::Fenced) => Survival::Fenced,
        _ => Survival::Exclusive,
    }
}

/// What the store promises under these faults.
fn terms(promises: &Guarantees, faults: &[Fault], lease: Duration) -> Terms {
    let survives = |fault: &Fault| match fault {
        Fault::Pause => promises.on_pause,
        Fault::Cut => promises.on_partition,
        // Nothing that is promised depends on how a client ends.
        Fault::Kill => Survival::Exclusive,
        Fault::Servers => worse(promises.on_store_crash, promises.on_failover),
    };
    let mut claimed: std::collections::BTreeSet<_> = Property::ALL.into_iter().collect();
    if !promises.fifo {
        claimed.remove(&Property::Fifo);
    }
    let exclusive =
        |f: &Fault| matches!(survives(f), Survival::Exclusive | Survival::NotApplicable);
    if promises.has_leases() || !faults.iter().all(exclusive) {
        claimed.remove(&Property::Unfenced);
    }
    // A server that forgot a grant tells nobody, unlike a pause or a cut, which the holder's own clock
    // finds out.
    if faults.contains(&Fault::Servers) && survives(&Fault::Servers) == Survival::Fenced {
        claimed.remove(&Property::Exclusion);
    }
    if faults.iter().any(|f| survives(f) == Survival::Unsafe) {
        use Property::{Effect, Exclusion, TokenOrder, TokenUnique, Updates};
        for property in [Exclusion, TokenOrder, TokenUnique, Effect, Updates] {
            claimed.remove(&property);
        }
    }
    // Without leases nobody's place runs out, whatever stands still.
    let shared_stalls = promises.has_leases() && promises.stall.longest() > lease / 3;
    Terms { claimed, recovery: recovery(promises, lease), shared_stalls }
}

/// One run, from the first worker to the report.
///
/// # Errors
/// If the store cannot be reached, or no worker can begin.
pub(super) async fn run(plan: Plan) -> leasehold::Result<Report> {
    // Refused before anything is made.
    plan.faults()?;
    plan.fence()?;
    let store = leasehold::connect(&plan.store).await?;
    run_on(store, plan).await
}

/// As [`run`], on a store that is open already.
pub(super) async fn run_on(store: Leasehold, plan: Plan) -> leasehold::Result<Report> {
    let promises = store.guarantees().clone();
    let kinds = plan.kinds(&promises)?;
    let mut faults = plan.faults()?;
    if !plan.command.is_empty() {
        faults.push(Fault::Servers);
    }
    let mut rng = Rng::with_seed(plan.seed);
    // Not from the seed: a second run of one seed must not meet what the first left behind.
    let run = Rng::new().u64(..);
    let reach = Reach::new(&store, &plan.store)?;
    let locks = locks(run, &kinds);
    let ledger = match plan.fence_in_store {
        true => {
            Some((ledger::open(&plan.store, &run_name(run), locks.len()).await?, run_name(run)))
        }
        false => None,
    };
    let cells = locks.iter().map(|_| (Cell::plain(), Cell::fenced())).collect();
    let state = State {
        history: History { locks: locks.clone(), ..History::default() },
        ambushes: Vec::new(),
        cells,
        workers: BTreeMap::new(),
        next_worker: 0,
        injected: faults.iter().map(|f| (*f, 0)).collect(),
        rng: rng.fork(),
        unable: None,
    };
    let parent = Arc::new(Parent {
        lease: plan.lease,
        leases: promises.has_leases(),
        runs_out: runs_out(&store, plan.lease),
        reach,
        program: plan.program.clone(),
        locks,
        ledger: ledger.as_ref().map(|(_, run)| run.clone()),
        state: Mutex::new(state),
        ended: Notify::new(),
    });
    let probe = store.mutex(format!("leasehold-torture-probe/{}", run_name(run)));
    let mut notes = JoinSet::new();
    notes.spawn(parent.clone().note_stalls());
    notes.spawn(parent.clone().note_slow_store(probe));
    let recovery = recovery(&promises, plan.lease);
    let time = plan.time(recovery.saturating_sub(SLACK));
    torture(&parent, &plan, time, &faults, recovery, &mut rng).await?;
    parent.end_workers(recovery + plan.lease * 4 + Duration::from_secs(10)).await;
    notes.shutdown().await;
    let residue = residue(&store, &prefix(run), recovery).await?;
    let stored = match &ledger {
        Some((ledger, _)) => Some(stored(ledger.as_ref(), parent.locks.len()).await?),
        None => None,
    };
    let mut state = parent.state();
    let mut history = std::mem::take(&mut state.history);
    history.ended = now();
    history.residue = residue;
    history.finals = state.cells.iter().map(|(p, f)| (p.end(), f.end())).collect();
    for (end, (fenced, writes)) in history.finals.iter_mut().zip(stored.into_iter().flatten()) {
        end.1 = fenced;
        history.writes.extend(writes);
    }
    let terms = terms(&promises, &faults, plan.lease);
    let findings = checker::check(&history, &terms);
    let tried = (&plan, time);
    Ok(Report::new(tried, store.url(), &promises, &terms, &state.injected, &history, findings))
}

/// What each fenced resource in the store has come to, and what it took. Removes them.
async fn stored(ledger: &dyn Ledger, locks: usize) -> leasehold::Result<Vec<(Final, Vec<Write>)>> {
    let mut all = Vec::new();
    for lock in 0..locks {
        let entries = ledger.entries(lock).await?;
        let write = |(_, entry): &(usize, Entry)| Write {
            lock,
            resource: Resource::Fenced,
            op: entry.op,
            token: entry.token,
        };
        all.push((ledger::replay(&entries)?.end(), entries.iter().map(write).collect()));
    }
    ledger.remove(locks).await?;
    Ok(all)
}

/// Starts the workers, and injects faults until the time is over.
async fn torture(
    parent: &Arc<Parent>,
    plan: &Plan,
    time: Duration,
    faults: &[Fault],
    recovery: Duration,
    rng: &mut Rng,
) -> leasehold::Result<()> {
    let failed = |why: String| {
        let what = format!("the workers cannot begin: {why}");
        leasehold::Error::new(ErrorKind::Config, what)
    };
    for _ in 0..plan.clients {
        parent.spawn().map_err(|e| failed(e.to_string()))?;
    }
    let end = Instant::now() + time;
    // At most half of the workers are in trouble at a time.
    let loops = if faults.is_empty() { 0 } else { (plan.clients / 2).min(16) };
    let of_workers: Vec<Fault> = faults.iter().copied().filter(|f| *f != Fault::Servers).collect();
    let injectors: Vec<_> = (0..if of_workers.is_empty() { 0 } else { loops })
        .map(|_| tokio::spawn(inject(parent.clone(), of_workers.clone(), end, rng.fork())))
        .collect();
    let disturbs = disturb(parent.clone(), plan.command.clone(), recovery, end);
    let mut disturbs = std::pin::pin!(disturbs);
    let mut disturbed = None;
    while Instant::now() < end {
        let tick = sleep(Duration::from_millis(50).min(end.duration_since(Instant::now())));
        tokio::select! {
            () = tick => {}
            done = &mut disturbs, if disturbed.is_none() => disturbed = Some(done),
        }
        if let Some(Err(why)) = &disturbed {
            return Err(leasehold::Error::new(ErrorKind::Config, format!("CMD failed: {why}")));
        }
        if let Some(why) = parent.state().unable.take() {
            return Err(failed(why));
        }
    }
    for injector in injectors {
        let _ = injector.await;
    }
    // The servers are left as the program leaves them.
    match disturbed {
        Some(_) => Ok(()),
        None => disturbs
            .await
            .map_err(|why| leasehold::Error::new(ErrorKind::Config, format!("CMD failed: {why}"))),
    }
}

/// What stands in the store after the promised time.
async fn residue(
    store: &Leasehold,
    prefix: &str,
    patience: Duration,
) -> leasehold::Result<Vec<String>> {
    let deadline = Instant::now() + patience;
    loop {
        let left = store.list(prefix).await?;
        if left.is_empty() || Instant::now() >= deadline {
            let shown = |info: &leasehold::store::LockInfo| {
                let claims: Vec<String> =
                    info.claims.iter().map(|c| format!("{:?}: {}", c.standing, c.holder)).collect();
                format!("{}: still in the store: {}", info.name, claims.join("; "))
            };
            return Ok(left.iter().map(shown).collect());
        }
        sleep(Duration::from_millis(20)).await;
    }
}
