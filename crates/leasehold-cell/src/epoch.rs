//! Since when the system knows what it knows, where it may lose everything and go on: one cell that
//! is there as long as nothing was lost.
//!
//! Whoever finds no such cell makes it, *closed*: the system was restarted or emptied, or never used.
//! Those that it has forgotten may believe in their holds for as long as their sessions were vouched for
//! when it forgot, which was before the cell was made. Until it is older than that, by the
//! system's own clock, nobody is let in; then whoever looks opens it, for good.
//!
//! A queue's cell is created only while the epoch is open, and in the answer to its creation the epoch is
//! looked at once more: the same before and after, nothing was lost in between. A queue that is looked at
//! and there needs no such look: what it says was said in this epoch. Who writes a queue by guess, to join it,
//! looks at the epoch together with the write: it may have been a queue of somebody who left one, and nothing
//! else, after all was lost.
//!
//! Where names are shared out among several systems, who does that differently takes a lock on another than all
//! others do. So an epoch says which systems there are by the word of whoever began it, and who names others is
//! refused by all that it asks for, without a request more.
//!
//! A system that loses the cell which it had no room to write anew is taken for one that has lost all: who
//! was refused so ends the epoch.

use std::time::Duration;

use leasehold_core::kit::short;
use leasehold_core::{ClaimId, Error, ErrorKind, Result};

use crate::cells::{Answer, Cells, Found, Request};
use crate::text::Epoch;

/// How long the cell of a closed epoch lives: from what is left of that its age is told.
const LIFE: Duration = Duration::from_secs(14 * 86_400);

/// How often it is tried to end one.
const ENDINGS: u32 = 3;

/// The epochs of a system.
#[derive(Clone, Debug)]
pub(crate) struct Epochs {
    key: String,
    /// How long a new one is closed.
    delay: Duration,
    /// What the system's clock may be wrong by as it tells an age.
    grain: Duration,
    /// The systems of which this is one.
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

    /// Looks at it.
    pub(crate) fn get(&self) -> Request {
        Request::Get { key: self.key.clone() }
    }

    /// What the present one is called, from the answer to [`get`](Self::get), if it is open.
    ///
    /// # Errors
    /// If it is not, with the time that it takes.
    pub(crate) async fn open(&self, cells: &dyn Cells, answer: Answer) -> Result<String> {
        let found = match answer {
            Answer::Found(found) => found,
            _ => return self.begin(cells).await,
        };
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
        // Refused, somebody else has done it.
        cells.run(vec![Request::Replace { key, value, version, lives: None }]).await?;
        Ok(id)
    }

    /// Sees to it that all who use this system from now on name the same ones as we do. One round trip, and one more
    /// where nobody has used it.
    #[cfg(feature = "memcached")]
    pub(crate) async fn agree(&self, cells: &dyn Cells) -> Result<()> {
        if let Some(Answer::Found(found)) = cells.run(vec![self.get()]).await?.pop() {
            return self.agreed(&found).map(drop);
        }
        match self.begin(cells).await {
            // It begins closed, where it does; or somebody else was faster, whom the next call meets.
            Err(error) if error.kind() == ErrorKind::Unreachable => Ok(()),
            begun => begun.map(drop),
        }
    }

    /// The epoch that was found, if it names the same systems as we do.
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
                "this client calls a server \"{ours}\" that other clients call \"{theirs}\", so that a lock \
                 could be on two servers"
            );
            let hint = "use the same server names in all clients: two hosts, names= or DNS names are swapped";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        let named = |members: &Option<String>| members.clone().unwrap_or("this server only".into());
        let what = format!(
            "other clients use a different list of servers, so that a lock could be on two \
             servers: this client uses {}, the others {}",
            named(&self.members),
            named(&epoch.members)
        );
        let hint =
            "give all clients the same list, then restart or flush every server of both lists";
        Err(Error::new(ErrorKind::Config, what).with_hint(hint))
    }

    /// At least this old.
    fn age(&self, found: &Found) -> Duration {
        let left = found.remaining.unwrap_or(LIFE);
        LIFE.saturating_sub(left).saturating_sub(self.grain)
    }

    /// There is none: begins one.
    async fn begin(&self, cells: &dyn Cells) -> Result<String> {
        let id = ClaimId::random()?.to_hex();
        let is_open = self.delay.is_zero();
        let value = Epoch { id: id.clone(), is_open, members: self.members.clone() }.written();
        let lives = (!is_open).then_some(LIFE);
        let create = Request::Create { key: self.key.clone(), value, lives };
        match cells.run(vec![create]).await?.pop() {
            Some(Answer::Written(_)) if is_open => Ok(id),
            // The other's is no older than ours.
            _ => Err(closed(self.delay)),
        }
    }

    /// Ends the present one, whatever has become of it: whoever looks next begins another.
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

    /// Whether it is still the one that it was.
    pub(crate) fn is_still(&self, id: &str, answer: &Answer) -> bool {
        matches!(answer, Answer::Found(found)
            if Epoch::read(&found.value).is_ok_and(|epoch| epoch.id == id))
    }
}

/// The own name of a system, and the list of all.
fn own(members: &str) -> Option<(&str, &str)> {
    members.split_once('@')
}

fn closed(left: Duration) -> Error {
    let what = format!(
        "the server was restarted or emptied, or is new, and may have lost held locks: it grants \
         no lock for another {}",
        short(left)
    );
    Error::new(ErrorKind::Unreachable, what).with_hint("retry later").not_before(left)
}
