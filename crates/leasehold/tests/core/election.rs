//! Elections with a clock that the test controls.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::testing::{Fault, Op, TestStore};
use leasehold::{ErrorKind, FencingToken, MutexGuard, State};

/// Leads while no renewal is answered, until the hold is at risk. Returns the terms, and the
/// reasons with which they were ended.
async fn leads_at_risk(prudent: bool) -> (Vec<FencingToken>, Vec<ErrorKind>) {
    let store = TestStore::new().unwrap();
    let (terms, ends) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (ended, healed) = (ends.clone(), store.clone());
    let election = store.client().unwrap().election("leader").on_pause(move |why, _| {
        ended.lock().unwrap().push(why.kind());
        healed.faults().heal();
    });
    let election = if prudent { election.stop_at_risk() } else { election };
    let work = |guard: MutexGuard| {
        let (store, terms) = (store.clone(), terms.clone());
        async move {
            terms.lock().unwrap().push(guard.token());
            if terms.lock().unwrap().len() == 1 {
                let mut watch = guard.watch();
                store.faults().always(Op::Renew, Fault::ErrorBefore);
                // The lease is 15 s.
                store.advance(Duration::from_secs(11));
                while !matches!(watch.state(), State::AtRisk(_)) {
                    watch.changed().await;
                }
                // The state changes with the clock. Work that is ended because of it stops at its
                // next await.
                tokio::task::yield_now().await;
                store.faults().heal();
                while watch.state() != State::Held {
                    watch.changed().await;
                }
            }
            ControlFlow::Break(guard.token())
        }
    };
    let last = tokio::time::timeout(Duration::from_secs(60), election.lead(work)).await;
    let terms = terms.lock().unwrap().clone();
    assert_eq!(terms.last(), Some(&last.unwrap().unwrap()));
    let ends = ends.lock().unwrap().clone();
    (terms, ends)
}

#[tokio::test]
async fn only_a_leader_that_stops_at_risk_starts_a_new_term() {
    let (terms, ends) = leads_at_risk(true).await;
    assert_eq!(ends, [ErrorKind::AtRisk]);
    assert!(terms.len() == 2 && terms[0] < terms[1], "{terms:?}");
    let (terms, ends) = leads_at_risk(false).await;
    assert_eq!((terms.len(), ends), (1, Vec::new()), "a late renewal must save the term");
}

/// The work does not stop, because it awaits nothing. A status page must not report that it leads.
#[tokio::test]
async fn leader_that_lost_its_hold_is_not_reported_as_leading() {
    let store = TestStore::new().unwrap();
    let election = store.client().unwrap().election("leader");
    let (candidate, seen) = (election.clone(), Mutex::new(Vec::new()));
    let work = |guard: MutexGuard| {
        let (store, candidate, seen) = (&store, &candidate, &seen);
        async move {
            let began = candidate.leads();
            store.advance(Duration::from_secs(60));
            seen.lock().unwrap().push((began, Some(guard.token()), candidate.leads()));
            ControlFlow::Break(())
        }
    };
    election.lead(work).await.unwrap();
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].0, seen[0].2), (seen[0].1, None));
    assert_eq!(election.leads(), None);
}
