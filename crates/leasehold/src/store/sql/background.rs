//! What a client does by itself: asking for its waiters, and forgetting what nobody uses.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::rows::Cells;
use super::{LIMIT, POLL, SWEEP, Shared};
use crate::claim::{ClaimId, Token};
use crate::store::Signal;

impl Shared {
    /// Asks for all our waiters which of them hold by now. Never ends by itself.
    pub(super) async fn poll(self: Arc<Self>) {
        let [shortest, longest] = POLL;
        let mut pause = shortest;
        let mut known: BTreeSet<String> = BTreeSet::new();
        loop {
            if self.waiters.count() == 0 {
                known.clear();
                self.waiters.more().await;
                pause = shortest;
            }
            tokio::time::sleep(pause).await;
            // All may have been granted, or have left, meanwhile.
            if self.waiters.count() == 0 {
                continue;
            }
            pause = (pause * 3 / 2).min(longest);
            let Ok(mut pooled) = self.pool.take().await else { continue };
            let asked = pooled.wire.rows(&self.sql.granted, vec![self.session.clone().into()]);
            let Ok(Ok(rows)) = tokio::time::timeout(LIMIT, asked).await else { continue };
            self.pool.put(pooled);
            let mut hold = BTreeSet::new();
            for row in rows {
                let mut cells = Cells::new(row);
                let (Ok(id), Ok(token)) = (cells.text(), cells.count()) else { continue };
                if let (Some(claim), Some(token)) = (ClaimId::from_hex(&id), Token::new(token)) {
                    hold.insert(id);
                    self.waiters.tell(claim, Signal::Granted(token));
                }
            }
            if !hold.is_subset(&known) {
                pause = shortest;
            }
            known = hold;
        }
    }

    /// Forgets, now and then, what nobody used for a day. Never ends by itself.
    pub(super) async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let Ok(mut pooled) = self.pool.take().await else { continue };
            // Who may not delete leaves the rows: they do no harm.
            let swept = pooled.wire.run(&self.sql.sweep, Vec::new());
            if let Ok(Ok(_)) = tokio::time::timeout(LIMIT, swept).await {
                self.pool.put(pooled);
            }
        }
    }
}
