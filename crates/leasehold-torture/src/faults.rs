//! Injects faults into the workers (pause, kill, cut, stale), and into the servers through the
//! user's program.
//!
//! Some pauses and kills come at any time. Most wait until a worker reads a resource under its
//! lock, and hit it before it receives the answer, which is between its check and its write.
//! Several loops inject concurrently. Each injects one fault at a time, and two loops never hit the
//! same worker.

use std::ffi::OsString;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::ambush::Ambush;
use super::history::{Fault, Time, Trouble, WorkerId, now};
use super::line::Line;
use super::parent::Parent;

/// Injects `faults` until `end`. Faults begin once per `every` on average, or when the effects of
/// the last one have had time to show.
pub(super) async fn inject(
    parent: Arc<Parent>,
    faults: Vec<Fault>,
    every: Option<Duration>,
    end: Instant,
    mut rng: Rng,
) {
    let lease = parent.lease;
    // The first fault comes late enough for the workers to have begun.
    sleep(lease.min(Duration::from_millis(300)).mul_f64(0.5 + rng.f64())).await;
    let mut first = faults.clone();
    rng.shuffle(&mut first);
    while Instant::now() < end {
        let began = Instant::now();
        // Each fault comes once. After that, half of them are pauses, which do the most harm.
        let pauses = faults.contains(&Fault::Pause) && rng.bool();
        let any = if pauses { Some(Fault::Pause) } else { rng.choice(faults.iter().copied()) };
        let fault = first.pop().or(any);
        match fault {
            Some(Fault::Pause) => pause(&parent, end, &mut rng).await,
            Some(Fault::Kill) => kill(&parent, end, &mut rng).await,
            Some(Fault::Cut) => cut(&parent, end, &mut rng).await,
            Some(Fault::Stale) => stale(&parent, end, &mut rng).await,
            Some(Fault::Servers) | None => return,
        }
        let quiet = match every {
            None => pace(&parent).mul_f64(0.1 + 0.6 * rng.f64()),
            // Without a minimum, the loop would retry immediately if there are only busy workers.
            Some(every) => {
                let next = every.mul_f64(0.5 + rng.f64());
                next.saturating_sub(began.elapsed()).max(Duration::from_millis(1))
            }
        };
        rest(quiet, end).await;
    }
}

/// Returns how long a fault has effects. In a store with leases, that is one lease.
fn pace(parent: &Parent) -> Duration {
    match parent.leases {
        true => parent.lease,
        false => parent.lease.min(Duration::from_millis(500)),
    }
}

/// Sleeps for `d`, but not beyond `end`.
async fn rest(d: Duration, end: Instant) {
    sleep_until((Instant::now() + d).min(end)).await;
}

/// Returns a random time between a fifth of a lease and three leases.
fn some_leases(lease: Duration, rng: &mut Rng) -> Duration {
    lease.mul_f64(0.2 + 2.8 * rng.f64())
}

/// Hits the next worker that enters its critical section. No worker enters while all of them wait
/// for one that is paused or dead.
async fn ambush(parent: &Parent, signal: Signal, end: Instant) -> Option<(WorkerId, Time)> {
    let (sender, hit) = oneshot::channel();
    parent.state().ambushes.push(Ambush { signal, hit: sender });
    timeout_at((Instant::now() + parent.lease * 2).min(end), hit).await.ok()?.ok()
}

/// Hits a worker whatever it is doing.
fn strike(parent: &Parent, signal: Signal, rng: &mut Rng) -> Option<(WorkerId, Time)> {
    let mut state = parent.state();
    let worker = state.pick(rng)?;
    let at = now();
    state.strike(worker, signal, at);
    Some((worker, at))
}

async fn pause(parent: &Parent, end: Instant, rng: &mut Rng) {
    let random = rng.u32(..3) == 0;
    let hit = match random {
        true => strike(parent, Signal::STOP, rng),
        false => ambush(parent, Signal::STOP, end).await,
    };
    let long = match parent.leases {
        // A worker in its critical section is paused for longer than its lease, so that another
        // client acquires the lock.
        true if !random => parent.runs_out.mul_f64(1.3 + 1.2 * rng.f64()),
        true => some_leases(parent.runs_out, rng),
        // No lease expires, so the others only wait. Frequent pauses test more than long ones.
        false => some_leases(pace(parent) / 6, rng),
    };
    let Some((worker, from)) = hit else { return };
    rest(long, end).await;
    let mut state = parent.state();
    state.signal(worker, Signal::CONT);
    state.over(trouble(parent, Fault::Pause, worker, from));
}

async fn kill(parent: &Arc<Parent>, end: Instant, rng: &mut Rng) {
    let hit = match rng.u32(..3) {
        0 => strike(parent, Signal::KILL, rng),
        _ => ambush(parent, Signal::KILL, end).await,
    };
    if hit.is_none() {
        return;
    }
    parent.respawn();
    // Its locks must become free first. If kills came faster than that, no worker would ever hold
    // one.
    rest(pace(parent), end).await;
}

async fn cut(parent: &Parent, end: Instant, rng: &mut Rng) {
    let Some(lines) = parent.reach.lines() else { return };
    let Some(worker) = parent.state().pick(rng) else { return };
    let line = rng.choice([Line::Closed, Line::Frozen, Line::Deaf]).unwrap_or(Line::Closed);
    let from = now();
    lines.set(worker, line);
    rest(some_leases(parent.runs_out, rng), end).await;
    lines.set(worker, Line::Up);
    parent.state().over(trouble(parent, Fault::Cut, worker, from));
}

/// Pauses a worker between two requests of a call: while the reply to the first one is on its way.
/// After its lease has expired, the worker acts on that old reply. The store must refuse what is
/// based on it.
async fn stale(parent: &Parent, end: Instant, rng: &mut Rng) {
    let Some(lines) = parent.reach.lines() else { return };
    let Some(worker) = parent.state().pick(rng) else { return };
    let from = now();
    lines.set(worker, Line::Withheld);
    // In this time, nearly every worker sends a request.
    rest(parent.lease.mul_f64(0.05 + 0.1 * rng.f64()), end).await;
    parent.state().strike(worker, Signal::STOP, from);
    lines.set(worker, Line::Up);
    rest(parent.runs_out.mul_f64(1.3 + 1.2 * rng.f64()), end).await;
    let mut state = parent.state();
    state.signal(worker, Signal::CONT);
    state.over(trouble(parent, Fault::Stale, worker, from));
}

/// Runs the user's program repeatedly until `end`. All workers count as in trouble while it runs,
/// and for as long as the store may take to recover.
///
/// # Errors
/// The reason why the program failed, because then it is unknown what it did.
pub(super) async fn disturb(
    parent: Arc<Parent>,
    command: Vec<OsString>,
    recovery: Duration,
    end: Instant,
) -> Result<(), String> {
    let Some((program, arguments)) = command.split_first() else { return Ok(()) };
    let shown = program.display();
    rest(recovery, end).await;
    while Instant::now() < end {
        let from = now();
        let run = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .status();
        let status = run.await.map_err(|e| format!("{shown}: {e}"))?;
        if !status.success() {
            return Err(format!("{shown}: {status}"));
        }
        let trouble = Trouble::ends_now(Fault::Servers, None, from, recovery);
        parent.state().over(trouble);
        // A pause of the same length without such faults shows that the promises are kept then.
        rest(recovery * 2, end).await;
    }
    Ok(())
}

/// Ends a trouble, with a grace period. Calls whose answers were lost are repeated only after a
/// third of the lease.
fn trouble(parent: &Parent, fault: Fault, worker: WorkerId, from: Time) -> Trouble {
    Trouble::ends_now(fault, Some(worker), from, parent.lease / 2)
}
