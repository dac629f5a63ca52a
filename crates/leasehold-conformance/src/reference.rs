//! Makes random calls and compares the answers with `queue.rs` as the reference.

use std::collections::HashMap;
use std::time::Duration;

use leasehold_core::queue::{Queue, StoreTime};
use leasehold_core::store::{Converted, Evict, Joined, Mode, Renew, Renewal, Store};
use leasehold_core::{Claim, ClaimId, Kind, Name, Token};

/// A small generator of reproducible numbers (xorshift64*), to avoid a dependency.
#[derive(Debug)]
pub(super) struct SeededRng(u64);

impl SeededRng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(high).unwrap_or(0) % n.max(1)
    }
}

/// An answer without the parts that depend on the clock.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Holding,
    Waiting { ahead: usize },
    Busy,
    Mismatch,
    Lost,
}

/// Makes the same random calls on the store and on a reference queue, and compares every answer.
pub(super) async fn compare(store: &dyn Store, name: &Name, kind: Kind, seed: u64, steps: usize) {
    let mut rng = SeededRng::new(seed);
    let capacity = match kind {
        Kind::Mutex => 1,
        Kind::RwLock => leasehold_core::MAX_READERS,
        Kind::Semaphore => 4,
    };
    let mut queue = Queue::new(kind, capacity, false);
    let mut claims: Vec<Claim> = Vec::new();
    let mut tokens: HashMap<ClaimId, Token> = HashMap::new();
    let at = StoreTime { now: 1, stamp: 1 };
    let lightens = store.guarantees().downgrades && kind != Kind::Mutex;
    let gets_heavier = store.guarantees().upgrades;
    for step in 0..steps {
        let context = |what: &str| format!("seed {seed} step {step}: {what} of {name} ({kind})");
        match rng.below(10) {
            0..4 => {
                let again = !claims.is_empty() && rng.below(4) == 0;
                let claim = match again {
                    true => claims[rng.below(claims.len())].clone(),
                    false => new_claim(&mut rng, name, kind, capacity),
                };
                let mode = if rng.below(3) == 0 { Mode::Try } else { Mode::Wait };
                let expected = match queue.join(&claim, mode, at, "") {
                    Ok(Joined::Holding { .. }) => Seen::Holding,
                    Ok(Joined::Waiting(place)) => Seen::Waiting { ahead: place.ahead },
                    Ok(Joined::Busy { .. }) => Seen::Busy,
                    Err(_) => Seen::Mismatch,
                };
                let got = match store.join(&claim, mode).await {
                    Ok(Joined::Holding { token, .. }) => {
                        let first = *tokens.entry(claim.id).or_insert(token);
                        assert_eq!(
                            token,
                            first,
                            "{}",
                            context("join: a second token for one claim")
                        );
                        Seen::Holding
                    }
                    Ok(Joined::Waiting(place)) => Seen::Waiting { ahead: place.ahead },
                    Ok(Joined::Busy { .. }) => Seen::Busy,
                    Err(e) if e.kind() == leasehold_core::ErrorKind::Mismatch => Seen::Mismatch,
                    Err(e) => panic!("{}: {e}", context("join")),
                };
                assert_eq!(got, expected, "{}", context("join"));
                if !again {
                    claims.push(claim);
                }
            }
            4..6 if !claims.is_empty() => {
                let claim = claims[rng.below(claims.len())].clone();
                let expected = renewed(&queue.renew(&claim, claim.lease, 1));
                let renew = Renew { claim: claim.clone(), lease: claim.lease };
                let got = match store.renew(&[renew]).await {
                    Ok(answers) => answers,
                    Err(e) => panic!("{}: {e}", context("renew")),
                };
                assert_eq!(got.len(), 1, "{}", context("renew"));
                assert_eq!(renewed(&got[0]), expected, "{}", context("renew"));
            }
            6..9 if !claims.is_empty() => {
                let claim = claims.swap_remove(rng.below(claims.len()));
                let expected = queue.leave(claim.id, None, 1);
                match store.leave(&claim, None).await {
                    Ok(left) => assert_eq!(left, expected, "{}", context("leave")),
                    Err(e) => panic!("{}: {e}", context("leave")),
                }
            }
            9 if lightens && !claims.is_empty() && rng.below(2) == 0 => {
                let at = rng.below(claims.len());
                let claim = &mut claims[at];
                let weight = new_claim(&mut rng, name, kind, capacity).weight;
                if weight > claim.weight && !gets_heavier {
                    continue;
                }
                let mut other = claim.clone();
                other.weight = weight;
                let expected = converted(queue.convert(&other, 1));
                match store.convert(&other).await {
                    Ok(got) => assert_eq!(converted(got), expected, "{}", context("convert")),
                    Err(e) => panic!("{}: {e}", context("convert")),
                }
                if expected == Seen::Holding {
                    claim.weight = weight;
                }
            }
            9 if rng.below(4) == 0 => {
                let expected = queue.evict(Evict::Holders, 1).len();
                let got = store.evict(name, Evict::Holders).await;
                assert_eq!(got.ok(), Some(expected), "{}", context("evict"));
                // An evicted claim that joins again gets a new place with a new token.
                tokens.retain(|id, _| queue.position(*id).is_some());
            }
            _ => {}
        }
        let shown = store.read(name).await.ok().flatten();
        let shown: Vec<_> =
            shown.iter().flat_map(|i| &i.claims).map(|c| (c.weight, c.state)).collect();
        let expected: Vec<_> = queue.entries().map(|e| (e.weight, e.state)).collect();
        assert_eq!(shown, expected, "{}", context("read"));
    }
    for claim in claims {
        let _ = store.leave(&claim, None).await;
    }
}

fn new_claim(rng: &mut SeededRng, name: &Name, kind: Kind, capacity: u32) -> Claim {
    let weight = match kind {
        Kind::Mutex => 1,
        Kind::RwLock => [1, 1, capacity][rng.below(3)],
        Kind::Semaphore => [1, 1, 2, 3, 4][rng.below(5)],
    };
    // Occasionally a claim assumes another capacity for the same lock.
    let capacity = if rng.below(20) == 0 { capacity + 1 } else { capacity };
    match Claim::new(name.clone(), kind, weight, capacity) {
        Ok(mut claim) => {
            claim.lease = Duration::from_secs(3_600);
            claim.waiter_lease = claim.lease;
            claim
        }
        Err(e) => panic!("{e}"),
    }
}

fn converted(converted: Converted) -> Seen {
    match converted {
        Converted::Done { .. } => Seen::Holding,
        Converted::Busy => Seen::Busy,
        Converted::Lost => Seen::Lost,
    }
}

fn renewed(renewal: &Renewal) -> Seen {
    match renewal {
        Renewal::Holding { .. } => Seen::Holding,
        Renewal::Waiting(place) => Seen::Waiting { ahead: place.ahead },
        Renewal::Lost => Seen::Lost,
        Renewal::Unknown { why, .. } => panic!("{why}"),
    }
}
