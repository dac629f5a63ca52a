//! The parent: keeps the resources and the history, starts the workers, and lets faults be injected
//! into them.

use leasehold::store::kit::locked;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout_at};

use super::ambush::Ambush;
use super::clocks::Clocks;
use super::history::{
    History, LockSpec, OpId, Resource, Time, Trouble, WorkerId, Write, nanos, now,
};
use super::reach::Reach;
use super::resource::Cell;
use super::wire::{FromWorker, Setup, ToWorker, WORKER, line};

/// Maximum factor by which the time limit for workers to end is extended while nothing runs. It
/// bounds the wait for a store that never recovers.
const MOST_STANDSTILL: u32 = 10;

/// The state that all tasks of the parent share.
pub(super) struct Parent {
    pub(super) lease: Duration,
    /// Whether holds expire.
    pub(super) leases: bool,
    /// Time after which a paused holder has certainly lost its hold. That is its lease, or the
    /// session that its lease belongs to.
    pub(super) runs_out: Duration,
    /// How the workers reach the store.
    pub(super) reach: Reach,
    /// Program that is started as a worker.
    pub(super) program: PathBuf,
    pub(super) clocks: Option<Clocks>,
    pub(super) locks: Vec<LockSpec>,
    /// The name of this run's fenced resource in the store, if it is there.
    pub(super) ledger: Option<String>,
    pub(super) state: Mutex<State>,
    /// Notified when a worker has ended.
    pub(super) ended: Notify,
}

pub(super) struct State {
    pub(super) history: History,
    pub(super) ambushes: Vec<Ambush>,
    pub(super) cells: Vec<(Cell, Cell)>,
    pub(super) workers: BTreeMap<WorkerId, Worker>,
    pub(super) next_worker: WorkerId,
    pub(super) rng: Rng,
    /// Why no worker can begin.
    pub(super) unable: Option<String>,
}

/// A worker process that has not ended.
pub(super) struct Worker {
    pid: Pid,
    outbox: mpsc::UnboundedSender<String>,
    /// Whether a fault is being injected.
    in_trouble: bool,
    /// Whether the parent has killed the worker. Requests to the resources that arrive afterwards
    /// are ignored, as if the worker's connection to the resources had ended with it.
    dead: bool,
    said_goodbye: bool,
}

impl State {
    /// Picks a worker that has no active fault.
    pub(super) fn pick(&mut self, rng: &mut Rng) -> Option<WorkerId> {
        let free = self.workers.iter().filter(|(_, w)| !w.in_trouble && !w.dead);
        let worker = rng.choice(free.map(|(id, _)| *id).collect::<Vec<_>>())?;
        if let Some(w) = self.workers.get_mut(&worker) {
            w.in_trouble = true;
        }
        Some(worker)
    }

    /// Sends a signal to a worker. Its process ID cannot have been reused, because it has not been
    /// waited for.
    pub(super) fn signal(&self, worker: WorkerId, signal: Signal) {
        if let Some(w) = self.workers.get(&worker) {
            let _ = kill_process(w.pid, signal);
        }
    }

    /// Pauses or kills a worker.
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

    /// Hits this worker. Returns false if the fault is no longer wanted.
    fn spring(&mut self, ambush: Ambush, worker: WorkerId) -> bool {
        if ambush.hit.is_closed() {
            return false;
        }
        let at = now();
        self.strike(worker, ambush.signal, at);
        let _ = ambush.hit.send((worker, at));
        true
    }

    /// Records that a fault is over, so that its worker can be given another.
    pub(super) fn over(&mut self, trouble: Trouble) {
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
            // This is not an injected fault, so the death does not excuse missing results.
            worker.dead = true;
            let at = self.history.under_way(*id);
            let what = format!(
                "worker {id} did not exit within {patience:?} after the stop request; last activity: {at}"
            );
            self.history.crashes.push(what);
            let _ = kill_process(worker.pid, Signal::KILL);
        }
    }

    fn send(&self, worker: WorkerId, message: &ToWorker) {
        if let Some(w) = self.workers.get(&worker) {
            let _ = w.outbox.send(line(message));
        }
    }

    fn receive(&mut self, worker: WorkerId, message: FromWorker) {
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
                let at = Some(now());
                let plain = p.write(token, plain, op);
                let fenced = fenced.is_some_and(|read| f.write(token, read, op));
                for (taken, resource) in [(plain, Resource::Plain), (fenced, Resource::Fenced)] {
                    if taken {
                        self.history.writes.push(Write { lock, resource, op, token, at });
                    }
                }
                self.send(worker, &ToWorker::Wrote { op, plain, fenced });
            }
            FromWorker::Stalled { from, to } => {
                self.history.troubles.push(Trouble::stall(Some(worker), from, to));
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
            if self.spring(ambush, worker) {
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
        locked(&self.state)
    }

    /// Starts another worker in place of a killed one.
    pub(super) fn respawn(self: &Arc<Self>) {
        if let Err(why) = self.spawn() {
            self.state().history.crashes.push(format!("cannot start a worker: {why}"));
        }
    }

    pub(super) fn spawn(self: &Arc<Self>) -> std::io::Result<()> {
        let mut command = Command::new(&self.program);
        command.arg(WORKER).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let clock =
            self.clocks.as_ref().map(|clocks| clocks.set(&mut command, &mut self.state().rng));
        let mut child = command.spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(std::io::Error::other("no pipes"));
        };
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| std::io::Error::other("the worker exited immediately"))?;
        let (outbox, lines) = mpsc::unbounded_channel();
        let mut state = self.state();
        let id = state.next_worker;
        state.next_worker += 1;
        let store = self.reach.address(id)?;
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
            clock,
        };
        state.send(id, &ToWorker::Setup(setup));
        drop(state);
        tokio::spawn(write_to(stdin, lines));
        tokio::spawn(self.clone().attend(id, child, stdout));
        Ok(())
    }

    /// Reads a worker's messages until it ends.
    async fn attend(self: Arc<Self>, id: WorkerId, mut child: Child, stdout: ChildStdout) {
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            // A killed worker's last line may be incomplete.
            if let Ok(message) = serde_json::from_str(&line) {
                self.state().receive(id, message);
            }
        }
        let pid = child.id();
        let how = match child.wait().await {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        };
        if let (Some(pid), true) = (pid, self.clocks.is_some()) {
            Clocks::remove_files(pid);
        }
        let mut state = self.state();
        let ended = state.workers.remove(&id);
        if let Some(lines) = self.reach.lines() {
            lines.forget(id);
        }
        if ended.is_some_and(|w| !w.dead && !w.said_goodbye) {
            let why = state.unable.as_ref().map_or(String::new(), |why| format!(": {why}"));
            state.history.crashes.push(format!("worker {id} exited unexpectedly: {how}{why}"));
        }
        drop(state);
        self.ended.notify_one();
    }

    /// Records when this process was not scheduled, because then no worker got answers in time.
    pub(super) async fn note_stalls(self: Arc<Self>) {
        let tick = self.lease / 20;
        loop {
            let from = now();
            sleep(tick).await;
            self.note_if_late(from, tick);
        }
    }

    /// Records when the store was slow on a lock that no other client uses. Then the store or its
    /// machine was paused, and no worker got answers in time.
    pub(super) async fn note_slow_store(self: Arc<Self>, probe: leasehold::Mutex) {
        loop {
            sleep(self.lease / 20).await;
            let from = now();
            if let Ok(guard) = probe.try_lock().await {
                let _ = guard.release().await;
            }
            self.note_if_late(from, Duration::ZERO);
        }
    }

    /// Records a stall of all workers since `from`, if much more time than `usual` has passed since
    /// then.
    fn note_if_late(&self, from: Time, usual: Duration) {
        let to = now();
        if to - from > nanos(usual + self.lease / 10) {
            self.state().history.troubles.push(Trouble::stall(None, from, to));
        }
    }

    /// Requests all workers to end, and kills the others after `patience`. Time in which nothing
    /// ran does not count.
    pub(super) async fn end_workers(&self, patience: Duration) {
        self.state().ask_to_end();
        if !self.all_ended(patience).await {
            self.state().end_by_force(patience);
            self.all_ended(Duration::from_secs(5)).await;
        }
    }

    async fn all_ended(&self, patience: Duration) -> bool {
        let (asked, start) = (now(), Instant::now());
        let mut granted = patience;
        while !self.state().workers.is_empty() {
            if timeout_at(start + granted, self.ended.notified()).await.is_ok() {
                continue;
            }
            let stood_still = self.state().history.stood_still(asked, now());
            let now_granted = patience + stood_still.min(patience * MOST_STANDSTILL);
            if now_granted <= granted {
                return self.state().workers.is_empty();
            }
            granted = now_granted;
        }
        true
    }
}

/// Sends lines to a worker, until it or the parent ends.
async fn write_to(mut stdin: ChildStdin, mut lines: mpsc::UnboundedReceiver<String>) {
    while let Some(line) = lines.recv().await {
        if stdin.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
}
