//! Telling a node what it has forgotten (the argument is in [`super::round`]).

use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use super::attempt::LATE;
use super::node::{MEMORY_KEY, Trouble};
use super::round::{Known, recollect};
use crate::clock::wall_micros;

impl Inner {
    /// What each node knows of tokens, and all the clocks that were seen, ours first.
    async fn what_is_known(self: &Arc<Self>, limit: Duration) -> (Vec<Known>, Vec<u64>) {
        let mut answers = self.ask_each(limit, LATE, |i| {
            let inner = self.clone();
            async move {
                let node = &inner.nodes[i];
                // A twin has no knowledge of its own.
                node.met(false).await?;
                match inner.twin_of(i) {
                    Some(twin) => Err(twin),
                    None => node.known(&inner.scripts).await,
                }
            }
        });
        let mut known = vec![Known::Silent; self.nodes.len()];
        let mut clocks = vec![wall_micros()];
        while let Some((i, answer)) = answers.recv().await {
            if let Ok((told, clock)) = answer {
                known[i] = told;
                clocks.push(clock);
            }
        }
        (known, clocks)
    }

    /// Tells every node that has forgotten and is old enough what the others know.
    pub(super) async fn tell_all(self: &Arc<Self>, limit: Duration) {
        let (known, _) = self.what_is_known(limit).await;
        for (i, known) in known.iter().enumerate() {
            if matches!(known, Known::Forgot(_)) {
                // A node that cannot be told yet is told by whoever next asks for its vote.
                let _ = self.tell(i, limit).await;
            }
        }
    }

    /// As [`tell`](Self::tell), in a task of its own.
    pub(super) fn tell_later(self: &Arc<Self>, node: usize) {
        let inner = self.clone();
        self.runtime.spawn(async move {
            let limit = inner.node_timeout;
            let _ = inner.tell(node, limit).await;
        });
    }

    /// Tells one node what it has forgotten.
    async fn tell(self: &Arc<Self>, i: usize, limit: Duration) -> Result<(), Trouble> {
        let node = &self.nodes[i];
        let Ok(_telling) = node.telling.try_lock() else { return Ok(()) };
        let run = node.met(true).await?;
        let left = run.votes_from.since(self.claims.now());
        if !left.is_zero() {
            return Err(Trouble::Young(left));
        }
        // Asked only now: whatever was granted before the restart is complete, or over.
        let (known, clocks) = self.what_is_known(limit).await;
        let token = recollect(&known, clocks).ok_or(Trouble::Forgot)?;
        let mut call = self.scripts.tell.call(1);
        call.arg(MEMORY_KEY).arg(&run.id).arg(token);
        match node.ask(&self.scripts.tell, &call).await?.natural() {
            Some(1) => Ok(()),
            _ => Err(Trouble::Forgot),
        }
    }
}
