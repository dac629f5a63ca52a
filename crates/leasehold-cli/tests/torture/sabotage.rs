//! Stores that break one guarantee each, used by real processes. The checker must report which
//! guarantee is broken.
//!
//! The checker's own tests use artificially modified histories. These histories come from real
//! runs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use leasehold::store::{
    Claim, Evict, Joined, LockInfo, MemoryStore, Mode, Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold::{Name, Result, Token};

use crate::common::turn;

/// Number of calls that a store with [`Halts`](Sabotage::Halts) has delayed.
static HALTED: AtomicUsize = AtomicUsize::new(0);

/// The defect of a [`Broken`] store.
#[derive(Clone, Copy, Debug)]
enum Sabotage {
    /// Processes with even and odd numbers do not see each other.
    TwoQueues,
    /// The store reports three times the lease that it keeps.
    ShortLeases,
    /// Later grants have smaller tokens.
    FallingTokens,
    /// A heartbeat sends its waiter to the back of the queue.
    Unfair,
    /// A release leaves something behind.
    Ghosts,
    /// The store is correct, but it occasionally blocks for nearly a lease.
    Halts,
}

#[derive(Debug)]
struct Broken {
    inner: MemoryStore,
    info: StoreInfo,
    how: Sabotage,
}

impl Broken {
    fn bend(&self, claim: &Claim) -> Claim {
        let mut claim = claim.clone();
        match self.how {
            Sabotage::TwoQueues if claim.holder.pid.is_multiple_of(2) => {
                claim.name = Name::new(format!("{}'", claim.name.as_str())).unwrap();
            }
            Sabotage::ShortLeases => claim.lease /= 3,
            _ => {}
        }
        claim
    }

    /// Delays all calls until the current halt ends. All calls wait for the same moments.
    async fn halt(&self) {
        const EVERY: u128 = 1_500;
        const FOR: u128 = 450;
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        let at = START.elapsed().as_millis() % EVERY;
        if matches!(self.how, Sabotage::Halts) && at < FOR {
            let left = u64::try_from(FOR - at).unwrap();
            HALTED.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(left)).await;
        }
    }

    fn token(&self, token: Token) -> Token {
        match self.how {
            Sabotage::FallingTokens => Token::new(Token::MAX - token.get()).unwrap(),
            _ => token,
        }
    }

    fn left(&self, remaining: Option<Duration>) -> Option<Duration> {
        match self.how {
            Sabotage::ShortLeases => remaining.map(|r| r * 3),
            _ => remaining,
        }
    }
}

#[async_trait]
impl Store for Broken {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.halt().await;
        Ok(match self.inner.join(&self.bend(claim), mode).await? {
            Joined::Holding { token, remaining } => {
                Joined::Holding { token: self.token(token), remaining: self.left(remaining) }
            }
            other => other,
        })
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.halt().await;
        let mut answers = Vec::new();
        for Renew { claim, lease } in renewals {
            let claim = self.bend(claim);
            let lease = (*lease).min(claim.lease);
            let renew = Renew { claim: claim.clone(), lease };
            let mut answer = self.inner.renew(&[renew]).await?.remove(0);
            if let (Sabotage::Unfair, Renewal::Waiting(_)) = (self.how, &answer) {
                self.inner.leave(&claim, None).await?;
                if let Joined::Waiting(place) = self.inner.join(&claim, Mode::Wait).await? {
                    answer = Renewal::Waiting(place);
                }
            }
            answers.push(match answer {
                Renewal::Holding { token, remaining } => {
                    Renewal::Holding { token: self.token(token), remaining: self.left(remaining) }
                }
                other => other,
            });
        }
        Ok(answers)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.halt().await;
        let claim = self.bend(claim);
        if matches!(self.how, Sabotage::Ghosts) {
            let mut ghost = Claim::new(claim.name.clone(), claim.kind, 1, claim.capacity)?;
            ghost.name = Name::new(format!("{} ghost", claim.name.as_str()))?;
            self.inner.join(&ghost, Mode::Try).await?;
        }
        self.inner.leave(&claim, keep).await
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(match self.inner.changed(&self.bend(claim)).await? {
            Signal::Granted(token) => Signal::Granted(self.token(token)),
            Signal::Ask => Signal::Ask,
        })
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.inner.read(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.inner.list(prefix).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.inner.evict(name, which).await
    }
}

/// Makes sure that one of these runs at a time. With more, their many processes delay each other,
/// and the checker tolerates late events.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the report of a run on a store with this defect.
fn report(how: Sabotage, arguments: &str) -> serde_json::Value {
    let _alone = alone();
    let _turn = turn();
    let inner = MemoryStore::new();
    let info = StoreInfo::new("memory:", inner.info().guarantees.clone());
    let store = Broken { inner, info, how };
    let store = leasehold::builder().store(Arc::new(store)).unwrap();
    let program = env!("CARGO_BIN_EXE_leasehold").into();
    leasehold_torture::report_on(store, arguments, program).unwrap()
}

/// Returns how often the checker found this guarantee broken.
fn violations(report: &serde_json::Value, property: &str) -> u64 {
    let lines = report["properties"].as_array().unwrap();
    let line = lines.iter().find(|l| l["property"] == property).unwrap();
    assert_eq!(line["claimed"], true);
    line["violations"].as_u64().unwrap()
}

fn caught(how: Sabotage, arguments: &str, properties: &[&str]) {
    // The given time includes the start of the processes. A run that proves nothing is followed by
    // a longer one.
    let mut last = serde_json::Value::Null;
    let shown = |report: &serde_json::Value| properties.iter().any(|p| violations(report, p) > 0);
    for seconds in [3, 6, 12] {
        last = report(how, &format!("{arguments} --seconds {seconds}"));
        if shown(&last) {
            break;
        }
    }
    assert_eq!(last["verdict"], "violated", "{last:#}");
    assert!(shown(&last), "{last:#}");
}

#[test]
fn two_holders_are_caught() {
    caught(Sabotage::TwoQueues, "--fault none", &["exclusion"]);
}

#[test]
fn lease_that_expires_too_early_is_caught() {
    // One of two things happens. If the paused holder finds out by its own clock, two clients held
    // the lock at once. Or the store reports the loss too early.
    let either = ["exclusion", "renewal"];
    caught(Sabotage::ShortLeases, "--fault pause --kind mutex", &either);
}

#[test]
fn falling_tokens_are_caught() {
    caught(Sabotage::FallingTokens, "--fault none", &["token-order"]);
}

#[test]
fn unfairness_is_caught() {
    caught(Sabotage::Unfair, "--fault none --kind mutex --clients 12", &["fifo"]);
}

#[test]
fn leftover_claims_are_caught() {
    caught(Sabotage::Ghosts, "--fault none --kind mutex", &["residue"]);
}

#[test]
fn paused_store_is_not_blamed_for_late_events() {
    let report = report(Sabotage::Halts, "--fault none --seconds 6");
    assert_ne!(report["verdict"], "violated", "{report:#}");
    // Waiters' claims expired during the halts. The checker must not report this as a broken order.
    assert!(HALTED.load(Ordering::SeqCst) > 0, "the store never halted");
}
