//! What is done to the workers: stopped, killed, cut off.
//!
//! Half of the pauses and kills come at any time; the other half wait for a worker to read a
//! resource under its lock, and hit it before it learns the answer: between its check and its
//! write. Several loops inject at once, each one fault at a time and never two into one worker.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use super::history::{Fault, Time, Trouble, WorkerId, now};
use super::parent::Parent;
use super::served::{Line, is_served};

/// The faults that make sense for the store of this URL.
pub(super) fn applicable(url: &str) -> Vec<Fault> {
    let mut faults = vec![Fault::Pause, Fault::Kill];
    if is_served(url) {
        faults.push(Fault::Cut);
    }
    faults
}

/// A fault that waits for a worker to come into its critical section.
pub(super) struct Ambush {
    signal: Signal,
    /// Who was hit, and when.
    hit: oneshot::Sender<(WorkerId, Time)>,
}

impl Ambush {
    /// Hits this worker. Returns false if nobody waits for that any more.
    pub(super) fn spring(self, parent: &mut super::parent::State, worker: WorkerId) -> bool {
        if self.hit.is_closed() {
            return false;
        }
        let at = now();
        parent.strike(worker, self.signal, at);
        let _ = self.hit.send((worker, at));
        true
    }
}

/// Injects `faults` until `end`.
pub(super) async fn inject(parent: Arc<Parent>, faults: Vec<Fault>, end: Instant, mut rng: Rng) {
    let lease = parent.lease;
    // The first comes late enough for the workers to have begun.
    sleep(lease.min(Duration::from_millis(300)).mul_f64(0.5 + rng.f64())).await;
    while Instant::now() < end {
        let Some(fault) = rng.choice(faults.iter().copied()) else { return };
        let long = lease.mul_f64(match rng.u32(..4) {
            0 => 0.2 + rng.f64(),
            _ => 1.2 + 1.8 * rng.f64(),
        });
        match fault {
            Fault::Pause => pause(&parent, long, &mut rng).await,
            Fault::Kill => kill(&parent, &mut rng).await,
            Fault::Cut => cut(&parent, long, &mut rng).await,
        }
        sleep(lease.mul_f64(0.6 * rng.f64())).await;
    }
}

/// Strikes a worker with a signal, perhaps in its critical section.
async fn strike(parent: &Arc<Parent>, signal: Signal, rng: &mut Rng) -> Option<(WorkerId, Time)> {
    if rng.bool() {
        let (sender, hit) = oneshot::channel();
        parent.state().ambushes.push(Ambush { signal, hit: sender });
        // Nobody comes if everybody waits for one that is stopped or dead.
        return timeout(parent.lease * 2, hit).await.ok()?.ok();
    }
    let mut state = parent.state();
    let worker = state.pick(rng)?;
    let at = now();
    state.strike(worker, signal, at);
    Some((worker, at))
}

async fn pause(parent: &Arc<Parent>, long: Duration, rng: &mut Rng) {
    let Some((worker, from)) = strike(parent, Signal::STOP, rng).await else { return };
    sleep(long).await;
    parent.state().signal(worker, Signal::CONT);
    parent.state().count(Fault::Pause);
    end_of_trouble(parent, worker, from).await;
}

async fn kill(parent: &Arc<Parent>, rng: &mut Rng) {
    if strike(parent, Signal::KILL, rng).await.is_none() {
        return;
    }
    parent.state().count(Fault::Kill);
    parent.respawn();
}

async fn cut(parent: &Arc<Parent>, long: Duration, rng: &mut Rng) {
    let Some(server) = &parent.server else { return };
    let Some(worker) = parent.state().pick(rng) else { return };
    let line = rng.choice([Line::Closed, Line::Frozen, Line::Deaf]).unwrap_or(Line::Closed);
    let from = now();
    server.set_line(worker, line);
    sleep(long).await;
    server.set_line(worker, Line::Up);
    parent.state().count(Fault::Cut);
    end_of_trouble(parent, worker, from).await;
}

/// What a trouble has kept waiting takes a moment to be made up for: calls that are repeated only
/// after a third of the lease, answers that were lost.
async fn end_of_trouble(parent: &Arc<Parent>, worker: WorkerId, from: Time) {
    sleep(parent.lease / 2).await;
    let mut state = parent.state();
    state.history.troubles.push(Trouble { worker: Some(worker), from, to: now() });
    state.free(worker);
}
