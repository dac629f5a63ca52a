//! The epoch of a system that may lose all data and continue: one cell that exists as long as no
//! data was lost.
//!
//! A client that does not find the cell creates it as *closed*, because the system was restarted or
//! emptied, or is new. After a loss, the holders may rely on their holds for at most the guaranteed
//! lifetime of a session. The loss was before the cell was created. So no lock is granted until the
//! cell is older than that lifetime by the system's own clock. The next client that reads the cell
//! then opens it permanently.
//!
//! A queue's cell is created only while the epoch is open. The epoch is read again in the same
//! round trip as the creation. If the epoch is the same before and after the creation, nothing was
//! lost in between. A queue that a read has found needs no such check, because its content was
//! written in this epoch. A client that joins by a guess, without a read, reads the epoch together
//! with the write. The guessed queue may be the only cell that exists after all data was lost,
//! because a `leave` has written it since.
//!
//! Lock names may be distributed over several systems. A client that distributes them differently
//! would take a lock on another system than the other clients. So the epoch contains the list of
//! systems of the client that began it. A client with another list gets an error for every call, at
//! no extra cost.
//!
//! If a system had no room to write a cell and lost it, the system is treated as if it had lost all
//! data. The client whose write was refused ends the epoch.

use std::time::Duration;

use leasehold_core::kit::short;
use leasehold_core::{ClaimId, Error, ErrorKind, Result};

use crate::cells::{Answer, Cells, Found, Request};
use crate::text::Epoch;

/// Lifetime of a closed epoch's cell. The age of the cell is computed from its remaining lifetime.
const LIFE: Duration = Duration::from_secs(14 * 86_400);

/// Maximum number of attempts to end an epoch.
const ENDINGS: u32 = 3;

/// The epochs of a system.
#[derive(Clone, Debug)]
pub(crate) struct Epochs {
    key: String,
    /// How long a new epoch stays closed.
    delay: Duration,
    /// Maximum error of an age by the system's clock.
    grain: Duration,
    /// This system's name and the list of all systems that the lock names are distributed over.
    members: Option<String>,
}

impl Epochs {
    pub(crate) fn new(
        key: String,
        delay: Duration,
        grain: Duration,
        members: Option<String>,
    ) -> Self {
        Self { key, delay, grain, members }
    }

    /// Returns the request that reads the epoch.
    pub(crate) fn get(&self) -> Request {
        Request::Get { key: self.key.clone() }
    }

    /// Returns the ID of the current epoch if it is open, given the answer to [`get`](Self::get).
    ///
    /// # Errors
    /// - [`ErrorKind::Unreachable`]: the epoch is closed. The error contains the remaining time.
    /// - [`ErrorKind::Config`]: the epoch has other members.
    /// - [`ErrorKind::Corrupt`]: the cell cannot be read.
    /// - The errors of the system.
    pub(crate) async fn open(&self, cells: &dyn Cells, answer: Answer) -> Result<String> {
        match answer {
            Answer::Found(found) => self.enter(cells, found).await,
            _ => self.begin(cells).await,
        }
    }

    /// Returns the ID of an epoch that exists. Opens the epoch if its delay has passed.
    async fn enter(&self, cells: &dyn Cells, found: Found) -> Result<String> {
        let epoch = self.agreed(&found)?;
        if epoch.is_open {
            return Ok(epoch.id);
        }
        let left = self.delay.saturating_sub(self.age(&found));
        if !left.is_zero() {
            return Err(closed(left));
        }
        let id = epoch.id.clone();
        let value = Epoch { is_open: true, ..epoch }.written();
        let (key, version) = (self.key.clone(), found.version);
        // If the write is refused, another client has opened the epoch.
        cells.run(vec![Request::Replace { key, value, version, lives: None }]).await?;
        Ok(id)
    }

    /// Ensures that all later clients of this system use the same members as this client. Costs one
    /// round trip, or two if no client has used the system before.
    #[cfg(feature = "memcached")]
    pub(crate) async fn agree(&self, cells: &dyn Cells) -> Result<()> {
        if let Some(Answer::Found(found)) = cells.run(vec![self.get()]).await?.pop() {
            return self.agreed(&found).map(drop);
        }
        match self.begin(cells).await {
            // A new epoch begins closed unless the delay is zero. Or another client was faster, and
            // the next call reads its epoch.
            Err(error) if error.kind() == ErrorKind::Unreachable => Ok(()),
            begun => begun.map(drop),
        }
    }

    /// Returns the epoch that was read, if it has the same members as this client.
    fn agreed(&self, found: &Found) -> Result<Epoch> {
        let epoch = Epoch::read(&found.value)?;
        if epoch.members == self.members {
            return Ok(epoch);
        }
        if let (Some((ours, all)), Some((theirs, others))) =
            (self.members.as_deref().and_then(own), epoch.members.as_deref().and_then(own))
            && all == others
        {
            let what = format!(
                "this client calls a server \"{ours}\" that other clients call \"{theirs}\", so a \
                 lock could be on two servers"
            );
            let hint = "use the same server names in all clients: two hosts, names= or DNS names are swapped";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        let named = |members: &Option<String>| members.clone().unwrap_or("this server only".into());
        let what = format!(
            "other clients use a different list of servers, so a lock could be on two servers: \
             this client uses {}, the others {}",
            named(&self.members),
            named(&epoch.members)
        );
        let hint =
            "give all clients the same list, then restart or flush every server in either list";
        Err(Error::new(ErrorKind::Config, what).with_hint(hint))
    }

    /// Returns a lower bound for the age of the cell.
    fn age(&self, found: &Found) -> Duration {
        let left = found.remaining.unwrap_or(LIFE);
        LIFE.saturating_sub(left).saturating_sub(self.grain)
    }

    /// Begins a new epoch.
    async fn begin(&self, cells: &dyn Cells) -> Result<String> {
        let id = ClaimId::random()?.to_hex();
        let is_open = self.delay.is_zero();
        let value = Epoch { id: id.clone(), is_open, members: self.members.clone() }.written();
        let lives = (!is_open).then_some(LIFE);
        let create = Request::Create { key: self.key.clone(), value, lives };
        match cells.run(vec![create]).await?.pop() {
            Some(Answer::Written(_)) if is_open => Ok(id),
            // Another client began the epoch at the same time.
            _ if is_open => match cells.run(vec![self.get()]).await?.pop() {
                Some(Answer::Found(found)) => self.enter(cells, found).await,
                _ => Err(closed(self.delay)),
            },
            // If another client was faster, its epoch opens no later than ours would have.
            _ => Err(closed(self.delay)),
        }
    }

    /// Ends the current epoch regardless of its state. The next client that reads it begins another
    /// one.
    pub(crate) async fn end(&self, cells: &dyn Cells) {
        for _ in 0..ENDINGS {
            let Ok(mut found) = cells.run(vec![self.get()]).await else { continue };
            let Some(Answer::Found(found)) = found.pop() else { return };
            let (key, version) = (self.key.clone(), found.version);
            let removed = cells.run(vec![Request::Remove { key, version }]).await;
            if removed.is_ok_and(|answers| answers.contains(&Answer::Done)) {
                return;
            }
        }
    }

    /// Returns whether the epoch still has the ID `id`.
    pub(crate) fn is_still(&self, id: &str, answer: &Answer) -> bool {
        matches!(answer, Answer::Found(found)
            if Epoch::read(&found.value).is_ok_and(|epoch| epoch.id == id))
    }
}

/// Splits the members into the system's own name and the list of all systems.
fn own(members: &str) -> Option<(&str, &str)> {
    members.split_once('@')
}

fn closed(left: Duration) -> Error {
    let what = format!(
        "the server was restarted or emptied, or is new, and may have lost held locks: it grants \
         no lock for another {}",
        short(left)
    );
    Error::new(ErrorKind::Unreachable, what).with_hint("retry later").with_retry_after(left)
}
