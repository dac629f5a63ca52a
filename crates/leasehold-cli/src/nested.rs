//! Nested `leasehold run`: what an outer run passes to the command it runs.
//!
//! - *Which locks are held.* A wait for a lock of an enclosing `leasehold run` is a deadlock. So a
//!   run passes its sequencers down, and such a wait fails.
//! - *How much time is left.* If an outer lock is about to be lost, its CMD is killed, which may be
//!   this process. Then the watchdog of this process has to stop the CMD of this process, which has
//!   a process group of its own, before another client can acquire the *outer* lock. The outer run
//!   kills its CMD at least a tenth of its lease before the end, and releases the lock no sooner
//!   than a tenth of its lease after that. All runs below it share this tenth. Each keeps half of
//!   what it was given and passes the other half down.

use std::env;
use std::time::Duration;

use leasehold::{Client, Kind, Sequencer, Token};

use crate::args::TakeArgs;
use crate::exit::{self, Failure};
use crate::mark::is_below_another_namespace;
use crate::proc::{Stat, lineage};

/// The variable with the sequencers, outermost first, separated by spaces. Sequencers contain no
/// spaces.
const HELD: &str = "LEASEHOLD_HELD";
/// The variable with the time that all nested runs share, in milliseconds.
const GRACE: &str = "LEASEHOLD_GRACE";

/// Returns the time that everything below the outer run gets to end, if there is an outer run.
fn given() -> Option<Duration> {
    env::var(GRACE).ok()?.parse().ok().map(Duration::from_millis)
}

/// Returns how much time CMD gets to end if this process is killed: `ours`, or less below an outer
/// run.
pub(crate) fn grace(ours: Duration) -> Duration {
    given().map_or(ours, |given| ours.min(given / 2))
}

/// Returns the variables for CMD's environment. They contain the sequencers of the enclosing runs
/// and `holds`, and the time that everything below CMD gets to end once CMD is killed. It is at
/// most `limit`, which is `None` if the lock is not lost before everything has ended.
pub(crate) fn handed_down(holds: &str, limit: Option<Duration>) -> Vec<(&'static str, String)> {
    let mut held = env::var(HELD).unwrap_or_default();
    if !held.is_empty() {
        held.push(' ');
    }
    held.push_str(holds);
    let mut down = vec![(HELD, held)];
    let left = [limit, given().map(|given| given / 2)].into_iter().flatten().min();
    down.extend(left.map(|left| (GRACE, left.as_millis().to_string())));
    down
}

/// A hold of an enclosing `leasehold run`.
pub(crate) struct Above {
    pub(crate) sequencer: Sequencer,
    pub(crate) token: Token,
    /// The pid of the enclosing leasehold.
    pub(crate) holder: u32,
}

/// Returns the enclosing hold that excludes an acquisition with these options, if any.
pub(crate) async fn held_above(locks: &Client, args: &TakeArgs, name: &str) -> Option<Above> {
    let held = env::var(HELD).unwrap_or_default();
    let held = held.split(' ').filter_map(|text| text.parse::<Sequencer>().ok());
    let ours = held.filter(|s| s.name().as_str() == name && s.store() == locks.identity());
    let ourselves = i32::try_from(std::process::id()).unwrap_or(0);
    let mut permits = args.permits.unwrap_or(1);
    for sequencer in ours {
        // Errors are ignored, because the acquisition itself finds out about a hold that ended or
        // an unreachable store.
        let Ok(claim) = locks.check(&sequencer).await else { continue };
        let holder = claim.holder.pid;
        // In another PID namespace the holder has another pid, if any.
        if !waits_for_us(holder, ourselves) && !is_below_another_namespace() {
            continue;
        }
        permits = permits.saturating_add(claim.weight);
        let excludes = match sequencer.kind() {
            Kind::Mutex => !args.shared && !args.exclusive && args.max.is_none(),
            Kind::RwLock => args.exclusive || (args.shared && sequencer.is_exclusive()),
            Kind::Semaphore => args.max.is_some_and(|of| permits > of),
        };
        if excludes {
            let token = sequencer.token();
            return Some(Above { sequencer, token, holder });
        }
    }
    None
}

/// Returns whether this holder is an ancestor that waits for this process to end. This process must
/// descend from the holder's command, and not from an orphan that became the holder's child. A
/// command leads a process group in the session of its leasehold.
fn waits_for_us(holder: u32, ourselves: i32) -> bool {
    let is_holder = |pid: i32| u32::try_from(pid) == Ok(holder);
    let above: Vec<i32> = lineage(ourselves).collect();
    let Some(place) = above.iter().skip(1).position(|&pid| is_holder(pid)) else { return false };
    let [command, leasehold] = [place, place + 1].map(|at| Stat::of(above[at]));
    let (Some(command), Some(leasehold)) = (command, leasehold) else { return false };
    command.group() == command.pid() && command.session() == leasehold.session()
}

/// Fails if waiting for this lock would be a deadlock with an enclosing `leasehold run`.
pub(crate) async fn refuse_what_is_held_above(
    locks: &Client,
    args: &TakeArgs,
    name: &str,
) -> Result<(), Failure> {
    if args.tries_only() {
        return Ok(());
    }
    let Some(Above { holder, .. }) = held_above(locks, args, name).await else { return Ok(()) };
    let what =
        format!("deadlock: {name:?} is already held by the enclosing leasehold run (pid {holder})");
    Err(Failure::new(exit::USAGE, what).hint("use --reenter to run under that hold"))
}
