//! A store that raises all tokens by one number, for a resource whose lock has moved to this store.
//!
//! A fence stores the highest token seen. Stores do not draw tokens from the same source. Most draw
//! them from a clock (1.8e15 today). etcd's tokens are revisions and ZooKeeper's are transaction
//! IDs, and both begin near 1. If a lock moves to one of these stores, its resource has already
//! seen much larger tokens than the new store assigns, and rejects all holders. The fence's stored
//! token must not be lowered, because then a holder from before the move that resumes late would be
//! accepted. So the new store's tokens are raised instead, for all of its clients.
//!
//! Nothing else changes. Every token that leaves the store is raised here, and every token that is
//! passed to it is lowered again. So the order of tokens, and the claim that each one identifies,
//! stay the same. A client without the offset has smaller tokens. The fence rejects it, so a
//! missing offset is safe.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;

use super::{
    ClaimInfo, Converted, Evict, EvictionListener, Follow, Joined, LockInfo, Mode, Ownership,
    Place, Queues, Renew, Renewal, Signal, Store, StoreInfo,
};
use crate::types::claim::Claim;
use crate::types::doctor::Finding;
use crate::types::error::{Error, ErrorKind, HolderInfo, Result};
use crate::types::name::Name;
use crate::types::token::Token;

/// The largest offset. It leaves room for tokens above it.
pub(crate) const MAX_OFFSET: u64 = Token::MAX / 2;

#[derive(Debug)]
pub(crate) struct TokenOffset {
    inner: Arc<dyn Store>,
    /// The store's information with another identity. Sequencers contain tokens, so a client with
    /// another offset must count as a client of another store.
    info: StoreInfo,
    offset: u64,
}

/// Returns `store` with tokens raised by `offset`.
pub(crate) fn with_token_offset(store: Arc<dyn Store>, offset: u64) -> Result<Arc<dyn Store>> {
    match offset {
        0 => Ok(store),
        1..=MAX_OFFSET => {
            let info = store.info().clone();
            let identity = format!("{}+{offset}", info.identity);
            Ok(Arc::new(TokenOffset { inner: store, info: info.identified(identity), offset }))
        }
        _ => {
            let what = format!("invalid token_offset {offset}: expected 0 to {MAX_OFFSET}");
            Err(Error::new(ErrorKind::Config, what))
        }
    }
}

impl TokenOffset {
    fn up(&self, token: Token) -> Result<Token> {
        token.get().checked_add(self.offset).and_then(Token::new).ok_or_else(|| {
            let offset = self.offset;
            let what = format!(
                "the store's token {token} plus token_offset {offset} exceeds the maximum token \
                 (2^63-1)"
            );
            Error::new(ErrorKind::Full, what).with_hint("use a smaller token_offset")
        })
    }

    /// Returns the token as the store knows it, or `None` if it is too small to be a raised token.
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
impl Store for TokenOffset {
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

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        Ok(match self.inner.convert(&self.claim_down(claim)).await? {
            Converted::Done { token } => Converted::Done { token: self.up(token)? },
            other @ (Converted::Busy | Converted::Lost) => other,
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
            // No claim has such a token. The holders are returned nevertheless.
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

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.inner.on_eviction(listener);
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
