//! `leasehold run` under `leasehold run`: what an outer one hands down to what it runs.
//!
//! - *What is held above.* Whoever waits for a lock that is held by a `leasehold run` above it
//!   waits for itself, for ever. So the outer ones' sequencers are handed down, and such a wait is
//!   refused.
//! - *How much time there is.* Where an outer lock is as good as lost, its CMD is killed, which may
//!   be us: then our own CMD, which is in a group of its own, is our watchdog's to end, before the
//!   *outer* lock can be another's. The outer one kills a tenth of its lease before that at the
//!   latest, and releases no sooner than a tenth of its lease after it; so this tenth is what all
//!   below it have together: each takes half of what it was given, and hands down the other half.

use std::env;
use std::time::Duration;

use leasehold::{Kind, Leasehold, Sequencer, Token};

use crate::args::TakeArgs;
use crate::exit::{self, Failure};
use crate::proc::lineage;

/// Sequencers, outermost first, with blanks between them (they have none in them).
const HELD: &str = "LEASEHOLD_HELD";
/// Milliseconds.
const GRACE: &str = "LEASEHOLD_GRACE";

/// How long all below the outer one have to end.
fn given() -> Option<Duration> {
    env::var(GRACE).ok()?.parse().ok().map(Duration::from_millis)
}

/// How long our own CMD has after our death: as long as we would give it, or less.
pub(crate) fn grace(ours: Duration) -> Duration {
    given().map_or(ours, |given| ours.min(given / 2))
}

/// What CMD finds in its environment: these holds among the others, and how long all below it have
/// once CMD is killed (`None`: our lock is not lost before they have ended).
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

/// A hold of a `leasehold run` above us.
pub(crate) struct Above {
    pub(crate) sequencer: Sequencer,
    pub(crate) token: Token,
    /// Its process.
    pub(crate) holder: u32,
}

/// The hold above us that keeps us from having this lock.
pub(crate) async fn held_above(locks: &Leasehold, args: &TakeArgs, name: &str) -> Option<Above> {
    let held = env::var(HELD).unwrap_or_default();
    let held = held.split(' ').filter_map(|text| text.parse::<Sequencer>().ok());
    let ours = held.filter(|s| s.name().as_str() == name && s.store() == locks.identity());
    let ourselves = i32::try_from(std::process::id()).unwrap_or(0);
    let mut permits = args.permits.unwrap_or(1);
    for sequencer in ours {
        // One that is over, or of a store that does not answer, is the acquisition's to find out.
        let Ok(claim) = locks.check(&sequencer).await else { continue };
        let holder = claim.holder.pid;
        if !lineage(ourselves).skip(1).any(|pid| u32::try_from(pid) == Ok(holder)) {
            continue;
        }
        permits = permits.saturating_add(claim.weight);
        let excludes = match sequencer.kind() {
            Kind::Mutex => !args.shared && !args.exclusive && args.of.is_none(),
            Kind::RwLock => args.exclusive || (args.shared && sequencer.is_exclusive()),
            Kind::Semaphore => args.of.is_some_and(|of| permits > of),
        };
        if excludes {
            let token = sequencer.token();
            return Some(Above { sequencer, token, holder });
        }
    }
    None
}

/// Refuses a wait for what a `leasehold run` above us holds.
pub(crate) async fn refuse_what_is_held_above(
    locks: &Leasehold,
    args: &TakeArgs,
    name: &str,
) -> Result<(), Failure> {
    if args.tries_only() {
        return Ok(());
    }
    let Some(Above { holder, .. }) = held_above(locks, args, name).await else { return Ok(()) };
    let what = format!(
        "{name:?} is held by the leasehold above this command (pid {holder}), which would be \
         waited for for ever: take it once, or `run --reenter` under its hold"
    );
    Err(Failure::new(exit::USAGE, what))
}
