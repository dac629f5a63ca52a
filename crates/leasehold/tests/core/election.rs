//! Elections, where time passes when we say so.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::testing::{Fault, Op, TestStore};
use leasehold::{ErrorKind, Guard, State, Token};

/// Leads where no renewal is answered until the hold is at risk: the terms, and why each ended from outside.
async fn leads_at_risk(prudent: bool) -> (Vec<Token>, Vec<ErrorKind>) {
    let store = TestStore::new().unwrap();
    let (terms, ends) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (told, healed) = (ends.clone(), store.clone());
    let election = store.client().unwrap().election("leader").on_pause(move |why, _| {
        told.lock().unwrap().push(why.kind());
        healed.faults().heal();
    });
    let election = if prudent { election.stop_at_risk() } else { election };
    let work = |guard: Guard| {
        let (store, terms) = (store.clone(), terms.clone());
        async move {
            terms.lock().unwrap().push(guard.token());
            if terms.lock().unwrap().len() == 1 {
                let mut watch = guard.watch();
                store.faults().always(Op::Renew, Fault::ErrorBefore);
                // Of a lease of 15 s.
                store.advance(Duration::from_secs(11));
                while !matches!(watch.state(), State::AtRisk(_)) {
                    watch.changed().await;
                }
                // The clock says so at once: who is told by it stops at the next step.
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
async fn who_stops_at_risk_stands_again_and_who_does_not_leads_on() {
    let (terms, ends) = leads_at_risk(true).await;
    assert_eq!(ends, [ErrorKind::AtRisk]);
    assert!(terms.len() == 2 && terms[0] < terms[1], "{terms:?}");
    let (terms, ends) = leads_at_risk(false).await;
    assert_eq!((terms.len(), ends), (1, Vec::new()), "a late renewal has saved the term");
}

/// Work that does not stop, for it awaits nothing: a page must not say that it leads.
#[tokio::test]
async fn who_has_lost_its_hold_does_not_lead_though_its_work_goes_on() {
    let store = TestStore::new().unwrap();
    let election = store.client().unwrap().election("leader");
    let (candidate, seen) = (election.clone(), Mutex::new(Vec::new()));
    let work = |guard: Guard| {
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
