//! Compares the notifications of waiters with a model of the queue. No waiter is notified of a
//! grant too early (P1), and every one is eventually notified without a heartbeat (P6).

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::store::queue::{Queue, StoreTime};
use leasehold::store::{Claim, Evict, Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold::{Client, Kind, Name, Token};
use testbed::SeededRng;

/// Time limit for a notification. It is shorter than all leases, so that an expired lease cannot be
/// the cause.
const PATIENCE: Duration = Duration::from_secs(30);

/// A claim in the queue.
struct TestClaim {
    claim: Claim,
    store: Arc<dyn Store>,
    token: Token,
    is_notified: bool,
}

/// A lock, the claims on it, and the notifications that they should get.
struct Case {
    what: String,
    queue: Queue,
    now: u64,
    all: Vec<TestClaim>,
}

/// Makes random calls by these clients on locks of all kinds.
pub async fn pushes_agree(clients: &[Client]) {
    let stores: Vec<_> = clients.iter().map(|locks| locks.store().clone()).collect();
    let kinds = [(Kind::Mutex, 1), (Kind::Semaphore, 3), (Kind::RwLock, 1 << 20)];
    let all = (1..).zip(kinds.into_iter().cycle().take(12));
    let mut running = tokio::task::JoinSet::new();
    for (seed, lock) in all {
        let stores = stores.clone();
        running.spawn(async move { agree_on(&stores, lock, seed, 60).await });
    }
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
}

/// Makes `steps` random calls by these clients on one lock.
async fn agree_on(
    clients: &[Arc<dyn Store>],
    (kind, capacity): (Kind, u32),
    seed: u64,
    steps: u32,
) {
    let mut rng = SeededRng(seed * 7_919);
    let name = format!("pushes-{kind}-{capacity}-{seed}").replace(' ', "-");
    let queue = Queue::new(kind, capacity, true);
    let mut case = Case { what: name.clone(), queue, now: 1, all: Vec::new() };
    for step in 0..steps {
        case.what = format!("{name}, step {step}");
        case.now += 1;
        match rng.below(8) {
            0..4 if case.all.len() < 9 => {
                let weight = match kind {
                    Kind::Mutex => 1,
                    Kind::RwLock => rng.one_of(&[1, 1, capacity]),
                    Kind::Semaphore => u32::try_from(rng.below(capacity.into())).unwrap() + 1,
                };
                let mut claim =
                    Claim::new(Name::new(&name).unwrap(), kind, weight, capacity).unwrap();
                (claim.lease, claim.waiter_lease) =
                    (Duration::from_secs(45), Duration::from_secs(40));
                let mode = rng.one_of(&[Mode::Wait, Mode::Wait, Mode::Wait, Mode::Try]);
                case.join(clients[rng.index(clients.len())].clone(), claim, mode).await;
            }
            4 if !case.all.is_empty() => {
                let one = rng.index(case.all.len());
                case.renew(one).await;
            }
            5 if !case.all.is_empty() => {
                let gone = case.all.swap_remove(rng.index(case.all.len()));
                let token = gone.token;
                assert_eq!(
                    gone.store.evict(&gone.claim.name, Evict::Token(token)).await.unwrap(),
                    1
                );
                case.queue.leave(gone.claim.id, None, case.now);
                assert!(!gone.store.leave(&gone.claim, None).await.unwrap(), "{}", case.what);
            }
            _ if !case.all.is_empty() => {
                // Holders leave more often than waiters, so that there are many hand-overs.
                let first = rng.index(case.all.len());
                let second = rng.index(case.all.len());
                let one = if case.holds(first) { first } else { second };
                let gone = case.all.swap_remove(one);
                assert!(gone.store.leave(&gone.claim, None).await.unwrap(), "{}", case.what);
                case.queue.leave(gone.claim.id, None, case.now);
            }
            _ => continue,
        }
        case.check().await;
    }
    for one in 0..case.all.len() {
        case.renew(one).await;
    }
    for gone in case.all {
        assert!(gone.store.leave(&gone.claim, None).await.unwrap());
    }
}

impl Case {
    fn holds(&self, one: usize) -> bool {
        let id = self.all[one].claim.id;
        let weights = self.queue.entries().map(|e| (e.id, e.weight)).collect::<Vec<_>>();
        let granted = leasehold::store::queue::granted(
            weights.iter().map(|(_, w)| *w),
            self.queue.capacity(),
        );
        weights[..granted].iter().any(|(granted, _)| *granted == id)
    }

    async fn join(&mut self, store: Arc<dyn Store>, claim: Claim, mode: Mode) {
        let at = StoreTime { now: self.now, stamp: self.now };
        let model = self.queue.join(&claim, mode, at, "").unwrap();
        let real = store.join(&claim, mode).await.unwrap();
        let (token, is_notified) = match (&real, &model) {
            (Joined::Holding { token, .. }, Joined::Holding { .. }) => (*token, true),
            (Joined::Waiting(place), Joined::Waiting(also)) => {
                assert_eq!(place.ahead, also.ahead, "{}", self.what);
                (place.token.unwrap(), false)
            }
            (Joined::Busy { .. }, Joined::Busy { .. }) => return,
            _ => panic!("{}: {real:?}, not {model:?}", self.what),
        };
        let last = self.all.iter().map(|s| s.token).max();
        assert!(last.is_none_or(|last| last < token), "{}: {token} after {last:?}", self.what);
        self.all.push(TestClaim { claim, store, token, is_notified });
    }

    async fn renew(&mut self, one: usize) {
        let holds = self.holds(one);
        let TestClaim { claim, store, token, is_notified } = &mut self.all[one];
        let renew = Renew { claim: claim.clone(), lease: claim.lease };
        match &store.renew(&[renew]).await.unwrap()[..] {
            [Renewal::Holding { token: its, .. }] if holds => {
                assert_eq!(its, token);
                *is_notified = true;
            }
            [Renewal::Waiting(place)] if !holds => {
                assert_eq!(Some(place.ahead), self.queue.position(claim.id), "{}", self.what);
            }
            other => panic!("{}: {other:?}, while it holds: {holds}", self.what),
        }
    }

    /// Checks that all current holders are notified, and no waiters.
    async fn check(&mut self) {
        for one in 0..self.all.len() {
            let holds = self.holds(one);
            let end = Instant::now() + PATIENCE;
            while !self.all[one].is_notified {
                let TestClaim { claim, store, token, .. } = &self.all[one];
                let signal = match holds {
                    true => tokio::time::timeout(PATIENCE, store.changed(claim)).await.ok(),
                    false => {
                        let mut changed = pin!(store.changed(claim));
                        poll_fn(|cx| match changed.as_mut().poll(cx) {
                            Poll::Ready(signal) => Poll::Ready(Some(signal)),
                            Poll::Pending => Poll::Ready(None),
                        })
                        .await
                    }
                };
                match signal.transpose().unwrap() {
                    None if !holds => break,
                    Some(Signal::Granted(its)) if holds && its == *token => {
                        self.all[one].is_notified = true;
                    }
                    Some(Signal::Ask) if Instant::now() < end => self.renew(one).await,
                    other => {
                        panic!("{}: notified with {other:?}, while it holds: {holds}", self.what)
                    }
                }
            }
        }
    }
}
