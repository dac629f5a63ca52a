//! Telling a node what it has forgotten (the argument is in [`super::round`]).
//!
//! # When
//! Not before every lease that it may have forgotten is over. The node itself keeps since when it is
//! known to have forgotten (see [`super::scripts`]), so a server that was emptied, or another one at
//! its address, waits like one that restarted, for every client. Without this it would vote at once,
//! since it has been up for long. Where only its start can have taken its memory, its age counts:
//! - if this client has never seen this run vote, and it is no promoted replica, and
//! - if it has the memory of another run, or if no node that answers has voted since it was told what
//!   it knows: a deployment that was just set up. (One that was emptied as a whole looks the same:
//!   nothing is left by which to tell.)

use std::sync::Arc;
use std::time::Duration;

use super::attempt::LATE;
use super::node::{MEMORY_KEY, Trouble};
use super::round::{Known, recollect};
use super::shared::Shared;
use leasehold_core::Moment;
use leasehold_core::kit::wall_micros;

/// What the nodes say of themselves.
struct Heard {
    /// When they were asked.
    asked: Moment,
    known: Vec<Known>,
    /// All the clocks that were seen, ours first.
    clocks: Vec<u64>,
    /// Some node has voted.
    in_use: bool,
}

impl Shared {
    /// What each node knows; of those that `which` names.
    async fn what_is_known(self: &Arc<Self>, which: impl Fn(usize) -> bool) -> Heard {
        let asked = self.claims.now();
        let mut answers = self.ask_each(self.patient(), LATE, |i| {
            let (shared, wanted) = (self.clone(), which(i));
            async move {
                if !wanted {
                    return Err(Trouble::Over);
                }
                let node = &shared.nodes[i];
                // A twin has no knowledge of its own.
                node.met(false).await?;
                match shared.twin_of(i) {
                    Some(twin) => Err(twin),
                    None => node.known(&shared.scripts).await,
                }
            }
        });
        let known = vec![Known::Silent; self.nodes.len()];
        let mut heard = Heard { asked, known, clocks: vec![wall_micros()], in_use: false };
        while let Some((i, answer)) = answers.recv().await {
            if let Ok((told, clock, in_use)) = answer {
                heard.known[i] = told;
                heard.clocks.push(clock);
                heard.in_use |= in_use;
            }
        }
        heard
    }

    /// Tells every node that we have met, that has forgotten and that may vote again what the others
    /// know.
    pub(super) async fn tell_all(self: &Arc<Self>) {
        let heard = self.what_is_known(|i| self.nodes[i].run().is_some()).await;
        let forgot = |i: &usize| matches!(heard.known[*i], Known::Forgot(_));
        for i in (0..self.nodes.len()).filter(forgot) {
            // A node that cannot be told yet is told by whoever next asks for its vote.
            let _ = self.tell_with(i, &heard).await;
        }
    }

    /// Tells one node, in a task of its own.
    pub(super) fn tell_later(self: &Arc<Self>, node: usize) {
        let shared = self.clone();
        self.runtime.spawn(async move { drop(shared.tell(node).await) });
    }

    /// Tells one node what it has forgotten.
    async fn tell(self: &Arc<Self>, i: usize) -> Result<(), Trouble> {
        let node = &self.nodes[i];
        let Ok(_telling) = node.telling.try_lock() else { return Ok(()) };
        let run = node.met(true).await?;
        let left = run.votes_from().since(self.claims.now());
        if !left.is_zero() {
            return Err(Trouble::Young(left));
        }
        let heard = self.what_is_known(|_| true).await;
        self.tell_with(i, &heard).await
    }

    /// The node must be old enough when the others *were asked*: then whatever was granted before it
    /// forgot was complete, or over, and they have told of it.
    async fn tell_with(&self, i: usize, heard: &Heard) -> Result<(), Trouble> {
        let node = &self.nodes[i];
        let run = node.met(false).await?;
        let left = run.votes_from().since(heard.asked);
        if !left.is_zero() {
            return Err(Trouble::Young(left));
        }
        let now = self.claims.now();
        let delay = node.restart_delay.saturating_add(now.since(heard.asked));
        let token = recollect(&heard.known, heard.clocks.iter().copied()).ok_or(Trouble::Forgot)?;
        let age = run.has_forgotten_for(now);
        let age_if_empty = if heard.in_use { Duration::ZERO } else { age };
        let mut call = self.scripts.tell.call(1);
        call.arg(MEMORY_KEY).arg(&run.id).arg(token);
        for time in [delay, age, age_if_empty] {
            call.arg(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        }
        let mut answer = node.ask(&self.scripts.tell, &call).await?;
        match (answer.natural(), answer.natural()) {
            (Some(1), _) => Ok(()),
            (Some(_), Some(left @ 1..)) => {
                let left = Duration::from_micros(left);
                run.votes_not_before(self.claims.now().plus(left));
                Err(Trouble::Young(left))
            }
            _ => Err(Trouble::Forgot),
        }
    }
}
