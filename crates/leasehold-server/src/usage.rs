//! What an identity currently uses of this server, for its quota and for metrics.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold_core::kit::locked;
use leasehold_core::{ClaimId, Error, ErrorKind, Token};
use serde::Deserialize;

use crate::problem::Failure;

/// Limits of what an identity may use of one server at the same time.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Quota {
    /// The number of holders and waiters together.
    pub(crate) claims: usize,
    /// The number of open streams and long polls.
    pub(crate) streams: usize,
    /// The number of requests per second, on average.
    pub(crate) requests_per_second: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self { claims: 10_000, streams: 10_000, requests_per_second: 50_000 }
    }
}

/// The smallest number of claims at which expired ones are removed.
const SWEEP_AT: usize = 1024;

/// What an identity currently uses.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    streams: AtomicUsize,
    /// How many requests the quota still allowed, and when that was computed. `None` before the
    /// first request.
    requests: Mutex<Option<(f64, Instant)>>,
    claims: Mutex<Claims>,
}

#[derive(Debug, Default)]
struct Claims {
    /// The counted claims. Those that have expired stay for a while, because only the next call of
    /// their client shows whether a hold was lost.
    all: HashMap<ClaimId, Counted>,
    /// The number of claims at which expired ones are removed next.
    sweep_at: usize,
    totals: BTreeMap<Arc<str>, OfPrefix>,
}

#[derive(Debug)]
struct Counted {
    /// The latest time at which the claim expires.
    until: Instant,
    prefix: Arc<str>,
    /// The token of its hold. `None`: the claim waits, or its call has not returned.
    token: Option<Token>,
    /// Whether its client has tried to release it.
    is_releasing: bool,
}

/// An identity's use of the locks with one prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OfPrefix {
    pub(crate) holders: u64,
    pub(crate) waiters: u64,
    /// The number of grants since the server was started.
    pub(crate) grants: u64,
    /// The number of holds of which a call of their client found that they were lost.
    pub(crate) losses: u64,
}

impl Usage {
    /// Returns the number of open streams.
    pub(crate) fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Returns the use of each prefix that has been used.
    pub(crate) fn by_prefix(&self) -> BTreeMap<Arc<str>, OfPrefix> {
        let (claims, now) = (locked(&self.claims), Instant::now());
        let mut all = claims.totals.clone();
        for counted in claims.all.values().filter(|counted| counted.until > now) {
            let of = all.entry(counted.prefix.clone()).or_default();
            *if counted.token.is_some() { &mut of.holders } else { &mut of.waiters } += 1;
        }
        all
    }

    /// Counts one request, and fails if it exceeds the quota.
    pub(crate) fn count_request(&self, quota: &Quota) -> Result<(), Failure> {
        let per_second = quota.requests_per_second;
        if per_second == u32::MAX {
            return Ok(());
        }
        let (now, most) = (Instant::now(), f64::from(per_second).max(1.0));
        let mut requests = locked(&self.requests);
        let (left, since) = requests.unwrap_or((most, now));
        let left = (left + now.duration_since(since).as_secs_f64() * most).min(most);
        if left >= 1.0 {
            *requests = Some((left - 1.0, now));
            return Ok(());
        }
        *requests = Some((left, now));
        let wait = Duration::from_secs_f64(((1.0 - left) / most).max(0.001));
        Err(over_quota(format!("more than {per_second} requests per second"), wait))
    }

    /// Counts a stream for as long as the result exists. Fails if it exceeds the quota.
    pub(crate) fn open_stream(self: &Arc<Self>, quota: &Quota) -> Result<Streaming, Failure> {
        let streaming = Streaming(self.clone());
        if self.streams.fetch_add(1, Ordering::Relaxed) >= quota.streams {
            let what = format!("more than {} open streams", quota.streams);
            return Err(over_quota(what, Duration::from_secs(1)));
        }
        Ok(streaming)
    }

    /// Counts a claim before it is sent to the store, until it is known to be gone or has expired.
    /// Returns whether it was not counted before. Fails if it exceeds the quota.
    pub(crate) fn count_claim(
        &self,
        quota: &Quota,
        id: ClaimId,
        prefix: &Arc<str>,
        lease: Duration,
    ) -> Result<bool, Failure> {
        let now = Instant::now();
        let mut claims = locked(&self.claims);
        if let Some(counted) = claims.all.get_mut(&id) {
            counted.until = now + lease;
            return Ok(false);
        }
        if claims.all.len() >= claims.sweep_at.min(quota.claims) {
            claims.all.retain(|_, counted| counted.until > now);
            claims.sweep_at = (2 * claims.all.len()).max(SWEEP_AT);
            if claims.all.len() >= quota.claims {
                let what = format!("more than {} claims", quota.claims);
                return Err(over_quota(what, Duration::from_secs(1)));
            }
        }
        let prefix = prefix.clone();
        let counted = Counted { until: now + lease, prefix, token: None, is_releasing: false };
        claims.all.insert(id, counted);
        Ok(true)
    }

    /// Records that a claim that was counted before the call holds its lock.
    pub(crate) fn granted(&self, id: ClaimId, token: Token) {
        let mut claims = locked(&self.claims);
        let Some(counted) = claims.all.get_mut(&id) else { return };
        let before = counted.token.replace(token);
        if before == Some(token) {
            return;
        }
        let prefix = counted.prefix.clone();
        let totals = claims.totals.entry(prefix).or_default();
        totals.grants += 1;
        // The claim was lost, and has joined again.
        totals.losses += u64::from(before.is_some());
    }

    /// Records that a claim holds its lock. If it was not counted, another server has granted it,
    /// or this one before a restart.
    pub(crate) fn renewed(&self, id: ClaimId, token: Token, is_new: bool) {
        if !is_new {
            return self.granted(id, token);
        }
        if let Some(counted) = locked(&self.claims).all.get_mut(&id) {
            counted.token = Some(token);
        }
    }

    /// Records that a counted claim waits.
    pub(crate) fn waits(&self, id: ClaimId) {
        let mut claims = locked(&self.claims);
        let Some(counted) = claims.all.get_mut(&id) else { return };
        if counted.token.take().is_some() {
            let prefix = counted.prefix.clone();
            claims.totals.entry(prefix).or_default().losses += 1;
        }
    }

    /// Removes a claim that has expired or was evicted.
    pub(crate) fn lost(&self, id: ClaimId) {
        let mut claims = locked(&self.claims);
        if let Some(Counted { prefix, token: Some(_), .. }) = claims.all.remove(&id) {
            claims.totals.entry(prefix).or_default().losses += 1;
        }
    }

    /// Records that the client tries to release the claim. Returns whether it has tried before.
    pub(crate) fn begin_release(&self, id: ClaimId) -> bool {
        let mut claims = locked(&self.claims);
        let counted = claims.all.get_mut(&id);
        counted.is_some_and(|counted| std::mem::replace(&mut counted.is_releasing, true))
    }

    /// Removes a claim that is not in its queue any more.
    pub(crate) fn forget_claim(&self, id: ClaimId) {
        locked(&self.claims).all.remove(&id);
    }
}

/// An open stream of an identity.
#[derive(Debug)]
pub(crate) struct Streaming(Arc<Usage>);

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

fn over_quota(what: String, wait: Duration) -> Failure {
    let error = Error::new(ErrorKind::Full, format!("over quota: {what}"))
        .with_hint("retry later, or ask the operator of the service for a larger quota")
        .with_retry_after(wait);
    Failure::from(error).with_status(axum::http::StatusCode::TOO_MANY_REQUESTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn id(n: u128) -> ClaimId {
        ClaimId::from_u128(n)
    }

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    #[test]
    fn claims_are_counted_by_prefix_until_they_expire_or_leave() {
        let (usage, quota) = (Usage::default(), Quota { claims: 3, ..Quota::default() });
        let prefixes: [Arc<str>; 2] = ["a:".into(), "b:".into()];
        let count = |n, of: usize, lease| usage.count_claim(&quota, id(n), &prefixes[of], lease);
        let of = |n: usize| usage.by_prefix().get(&prefixes[n]).copied().unwrap_or_default();
        assert!(count(1, 0, LONG).is_ok() && count(2, 0, LONG).is_ok());
        count(3, 1, Duration::ZERO).unwrap();
        usage.granted(id(1), token(1));
        usage.granted(id(1), token(1));
        assert_eq!(of(0), OfPrefix { holders: 1, waiters: 1, grants: 1, losses: 0 });
        assert_eq!(of(1), OfPrefix::default());
        count(4, 1, LONG).unwrap();
        count(1, 0, LONG).unwrap();
        assert!(count(5, 0, LONG).is_err(), "over quota");
        usage.lost(id(1));
        // A waiter that was lost was not a holder.
        usage.lost(id(2));
        usage.forget_claim(id(4));
        assert_eq!(of(0), OfPrefix { grants: 1, losses: 1, ..OfPrefix::default() });
        assert_eq!(of(1), OfPrefix::default());
    }

    #[test]
    fn grants_and_losses_are_counted_once() {
        let (usage, quota, prefix) = (Usage::default(), Quota::default(), Arc::from(""));
        let count = |lease| usage.count_claim(&quota, id(1), &prefix, lease).unwrap();
        let totals = || {
            let of = usage.by_prefix().get(&prefix).copied().unwrap_or_default();
            (of.grants, of.losses)
        };
        // Another server has granted it.
        count(LONG);
        usage.renewed(id(1), token(1), true);
        assert_eq!(totals(), (0, 0));
        // It was lost, and joins again with its ID: first it waits, then it holds.
        usage.waits(id(1));
        assert_eq!(totals(), (0, 1));
        usage.renewed(id(1), token(2), false);
        assert_eq!(totals(), (1, 1));
        usage.granted(id(1), token(3));
        assert_eq!(totals(), (2, 2));
        // Its lease has ended when the client renews it. A scrape in between changes nothing.
        count(Duration::ZERO);
        assert_eq!(totals(), (2, 2));
        usage.lost(id(1));
        assert_eq!(totals(), (2, 3));
    }
}
