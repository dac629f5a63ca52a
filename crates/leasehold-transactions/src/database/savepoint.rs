//! A part of the caller's transaction that can be rolled back separately.

use std::sync::atomic::{AtomicU64, Ordering};

use super::fault::Fault;
use super::session::Transaction;

/// A savepoint. Each name is used once per process, because on MySQL a second savepoint of the same
/// name removes the first.
pub(crate) struct Savepoint(u64);

impl Savepoint {
    pub(crate) async fn set<T: Transaction + ?Sized>(tx: &mut T) -> Result<Self, Fault> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        tx.batch(&format!("SAVEPOINT leasehold_{number}")).await?;
        Ok(Self(number))
    }

    pub(crate) async fn keep<T: Transaction + ?Sized>(self, tx: &mut T) -> Result<(), Fault> {
        tx.batch(&format!("RELEASE SAVEPOINT leasehold_{}", self.0)).await
    }

    pub(crate) async fn undo<T: Transaction + ?Sized>(self, tx: &mut T) -> Result<(), Fault> {
        tx.batch(&format!("ROLLBACK TO SAVEPOINT leasehold_{}", self.0)).await
    }
}
