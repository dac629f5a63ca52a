//! Restores the highest token on a node that has forgotten its data. [`super::round`] contains the
//! argument.
//!
//! # When
//! A node's token is restored only after every lease that the node may have forgotten has expired.
//! The node itself stores since when it is known to have forgotten (see [`super::scripts`]). So a
//! server that was emptied, or another one at its address, waits like a restarted one, for every
//! client. Otherwise it would vote immediately, because it has been up for long enough.
//!
//! If only the node's start can be the reason for the loss, its uptime is used instead. That is the
//! case if this client has never seen this run vote, it is not a promoted replica, and one of these
//! conditions holds:
//! - It has the memory of another run.
//! - No node that responds has voted since its memory was restored. This is a deployment that has
//!   just been set up. (One that was emptied completely looks the same, because nothing is left to
//!   distinguish them.)

use std::sync::Arc;
use std::time::Duration;

use super::attempt::LATE;
use super::node::{MEMORY_KEY, Trouble};
use super::round::{Known, recollect};
use super::shared::Shared;
use leasehold_core::Moment;
use leasehold_core::kit::wall_micros;

/// State that the nodes report.
struct NodeReports {
    /// Time at which the requests were sent.
    sent: Moment,
    known: Vec<Known>,
    /// All clocks that were read, the client's first.
    clocks: Vec<u64>,
    /// Whether some node has voted since its memory was restored.
    in_use: bool,
}

impl Shared {
    /// Queries the state of the nodes that `which` selects.
    async fn query_nodes(self: &Arc<Self>, which: impl Fn(usize) -> bool) -> NodeReports {
        let sent = self.claims.now();
        let mut answers = self.ask_each(self.patient(), LATE, |i| {
            let (shared, wanted) = (self.clone(), which(i));
            async move {
                if !wanted {
                    return Err(Trouble::Over);
                }
                let node = &shared.nodes[i];
                // A second name of the same server has no knowledge of its own.
                node.met(false).await?;
                match shared.twin_of(i) {
                    Some(twin) => Err(twin),
                    None => node.known(&shared.scripts).await,
                }
            }
        });
        let known = vec![Known::Silent; self.nodes.len()];
        let mut reports = NodeReports { sent, known, clocks: vec![wall_micros()], in_use: false };
        while let Some((i, answer)) = answers.recv().await {
            if let Ok((memory, clock, in_use)) = answer {
                reports.known[i] = memory;
                reports.clocks.push(clock);
                reports.in_use |= in_use;
            }
        }
        reports
    }

    /// Restores the token on every known node that has forgotten its data and may vote again.
    pub(super) async fn restore_all(self: &Arc<Self>) {
        let reports = self.query_nodes(|i| self.nodes[i].run().is_some()).await;
        let forgot = |i: &usize| matches!(reports.known[*i], Known::Forgot(_));
        for i in (0..self.nodes.len()).filter(forgot) {
            // If a node cannot be restored yet, the next client that requests its vote does so.
            let _ = self.restore_with(i, &reports).await;
        }
    }

    /// Restores the token on one node, in a separate task.
    pub(super) fn restore_later(self: &Arc<Self>, node: usize) {
        let shared = self.clone();
        self.runtime.spawn(async move { drop(shared.restore(node).await) });
    }

    /// Restores the token on one node.
    async fn restore(self: &Arc<Self>, i: usize) -> Result<(), Trouble> {
        let node = &self.nodes[i];
        let Ok(_restoring) = node.restoring.try_lock() else { return Ok(()) };
        let run = node.met(true).await?;
        let left = run.votes_from().since(self.claims.now());
        if !left.is_zero() {
            return Err(Trouble::Young(left));
        }
        let reports = self.query_nodes(|_| true).await;
        self.restore_with(i, &reports).await
    }

    /// Restores the token on one node from the other nodes' replies.
    ///
    /// The node's delay must have ended when the others *were queried*. Then every grant from
    /// before the loss was either complete, so that their replies include it, or had expired.
    async fn restore_with(&self, i: usize, reports: &NodeReports) -> Result<(), Trouble> {
        let node = &self.nodes[i];
        let run = node.met(false).await?;
        let left = run.votes_from().since(reports.sent);
        if !left.is_zero() {
            return Err(Trouble::Young(left));
        }
        let now = self.claims.now();
        let delay = node.restart_delay.saturating_add(now.since(reports.sent));
        let token =
            recollect(&reports.known, reports.clocks.iter().copied()).ok_or(Trouble::Forgot)?;
        let age = run.has_forgotten_for(now);
        let age_if_empty = if reports.in_use { Duration::ZERO } else { age };
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
