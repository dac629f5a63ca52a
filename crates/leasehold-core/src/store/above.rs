//! A store whose tokens are all told greater by one number: for a resource that moved here.
//!
//! A fence keeps the greatest token that it has seen. The stores do not draw theirs from one
//! source: most draw from a clock (1.8e15 today), etcd's are its revisions and ZooKeeper's its
//! transaction ids (both begin near 1). A resource whose lock moves to one of these has seen far
//! greater tokens than will ever come, and refuses everybody. Its mark must not be lowered: a
//! holder from before the move that wakes up late would pass. So the new store's tokens are raised
//! instead, for all of its clients.
//!
//! Nothing else changes: whatever number leaves the store is raised here, and whatever comes back
//! is lowered again, so the order of tokens and who is meant by one stay the same. A client that
//! was not told of the move has smaller tokens, and is refused by the fence: closed, never open.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;

use super::{
    ClaimInfo, Ear, Evict, Follow, Joined, LockInfo, Mode, Ownership, Place, Queues, Renew,
    Renewal, Reweighed, Signal, Store, StoreInfo,
};
use crate::words::claim::Claim;
use crate::words::doctor::Finding;
use crate::words::error::{Error, ErrorKind, HolderInfo, Result};
use crate::words::name::Name;
use crate::words::token::Token;

/// The greatest offset: above it there must be room for tokens.
pub(crate) const MAX_OFFSET: u64 = Token::MAX / 2;

#[derive(Debug)]
pub(crate) struct Above {
    inner: Arc<dyn Store>,
    /// The store's own, but that sequencers carry tokens: those of another offset are of another store.
    info: StoreInfo,
    offset: u64,
}

/// `store`, with tokens raised by `offset`.
pub(crate) fn above(store: Arc<dyn Store>, offset: u64) -> Result<Arc<dyn Store>> {
    match offset {
        0 => Ok(store),
        1..=MAX_OFFSET => {
            let info = store.info().clone();
            let identity = format!("{}+{offset}", info.identity);
            Ok(Arc::new(Above { inner: store, info: info.identified(identity), offset }))
        }
        _ => {
            let what = format!("invalid token_offset {offset}: expected 0 to {MAX_OFFSET}");
            Err(Error::new(ErrorKind::Config, what))
        }
    }
}

impl Above {
    fn up(&self, token: Token) -> Result<Token> {
        token.get().checked_add(self.offset).and_then(Token::new).ok_or_else(|| {
            let offset = self.offset;
            let what = format!("token {token} of the store is too large for token_offset {offset}");
            Error::new(ErrorKind::Full, what).with_hint("use a smaller token_offset")
        })
    }

    /// As the store knows it; `None` for what was never told from here.
    fn down(&self, token: Token) -> Option<Token> {
        token.get().checked_sub(self.offset).and_then(Token::new)
    }

    fn claim_down(&self, claim: &Claim) -> Claim {
        Claim { seen: claim.seen.saturating_sub(self.offset), ..claim.clone() }
    }

    fn place_up(&self, place: Place) -> Result<Place> {
        Ok(Place { token: place.token.map(|t| self.up(t)).transpose()?, ..place })
    }

    fn renewal_up(&self, renewal: Renewal) -> Result<Renewal> {
        Ok(match renewal {
            Renewal::Holding { token, remaining } => {
                Renewal::Holding { token: self.up(token)?, remaining }
            }
            Renewal::Waiting(place) => Renewal::Waiting(self.place_up(place)?),
            other @ (Renewal::Lost | Renewal::Unknown { .. }) => other,
        })
    }

    fn info_up(&self, mut info: LockInfo) -> Result<LockInfo> {
        let raise = |claim: ClaimInfo| {
            Ok(ClaimInfo { token: claim.token.map(|t| self.up(t)).transpose()?, ..claim })
        };
        info.claims = info.claims.into_iter().map(raise).collect::<Result<_>>()?;
        Ok(info)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for Above {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        Ok(match self.inner.join(&self.claim_down(claim), mode).await? {
            Joined::Holding { token, remaining } => {
                Joined::Holding { token: self.up(token)?, remaining }
            }
            Joined::Waiting(place) => Joined::Waiting(self.place_up(place)?),
            Joined::Busy { holders } => {
                let raise = |info: HolderInfo| {
                    Ok(HolderInfo::new(info.holder, self.up(info.token)?, info.since))
                };
                Joined::Busy { holders: holders.into_iter().map(raise).collect::<Result<_>>()? }
            }
        })
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let lower = |r: &Renew| Renew { claim: self.claim_down(&r.claim), lease: r.lease };
        let renewals: Vec<Renew> = renewals.iter().map(lower).collect();
        let answers = self.inner.renew(&renewals).await?;
        answers.into_iter().map(|answer| self.renewal_up(answer)).collect()
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.inner.leave(&self.claim_down(claim), keep).await
    }

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        Ok(match self.inner.reweigh(&self.claim_down(claim)).await? {
            Reweighed::Done { token } => Reweighed::Done { token: self.up(token)? },
            other @ (Reweighed::Busy | Reweighed::Lost) => other,
        })
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(match self.inner.changed(&self.claim_down(claim)).await? {
            Signal::Ask => Signal::Ask,
            Signal::Granted(token) => Signal::Granted(self.up(token)?),
        })
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.inner.read(name).await?.map(|info| self.info_up(info)).transpose()
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let below = token.and_then(|token| self.down(token));
        if token.is_some() && below.is_none() {
            // Nobody has a token that was never told from here; who stands there is told all the same.
            return self.read(name).await;
        }
        self.inner.holders(name, below).await?.map(|info| self.info_up(info)).transpose()
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let all = self.inner.list(prefix).await?;
        all.into_iter().map(|info| self.info_up(info)).collect()
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let which = match which {
            Evict::Holders => Evict::Holders,
            Evict::Token(token) => match self.down(token) {
                Some(token) => Evict::Token(token),
                None => return Ok(0),
            },
        };
        self.inner.evict(name, which).await
    }

    fn hear(&self, ear: Weak<dyn Ear>) {
        self.inner.hear(ear);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        self.inner.follow(queues).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.inner.diagnose().await
    }

    async fn disconnect(&self) {
        self.inner.disconnect().await;
    }

    fn longest_lease(&self) -> Duration {
        self.inner.longest_lease()
    }

    fn shard(&self, name: &Name) -> u64 {
        self.inner.shard(name)
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        self.inner.confirmed(claim)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        self.inner.ownership(claim)
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.inner.lifeline()
    }
}
