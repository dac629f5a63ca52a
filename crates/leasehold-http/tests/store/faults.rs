//! The effects of networks, proxies and crashed replicas on a client's locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Method;
use leasehold::store::{Claim, Converted, Evict, Joined, Mode, Queues, Renew, Renewal, Signal};
use leasehold::{ErrorKind, Kind, LostReason, Released, Token};
use leasehold_test_support::{PATIENCE, connect, run};

use crate::common::{Replica, claim, holding, url_of};
use crate::proxy::{Fault, HttpProxy};

/// Longer than any test: a test that passes has not waited for a renewal or an expiry.
const LONG: Duration = Duration::from_secs(3600);

/// Returns a claim that neither expires nor is renewed during a test.
fn long(name: &str) -> Claim {
    let mut claim = claim(name, Kind::Mutex, 1, 1);
    (claim.lease, claim.waiter_lease) = (LONG, LONG);
    claim
}

/// Applies `fault` to the next request with this method, and none to the others.
fn once(proxy: &HttpProxy, method: Method, fault: Fault) -> Arc<AtomicUsize> {
    let hits = Arc::<AtomicUsize>::default();
    let counted = hits.clone();
    proxy.plan(move |got, path| {
        let hit = *got == method && path.starts_with("/v1/claims");
        match hit && counted.fetch_add(1, Ordering::SeqCst) == 0 {
            true => fault,
            false => Fault::None,
        }
    });
    hits
}

#[test]
fn lost_reply_is_requested_again_and_grants_once() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let (ours, witness) =
            (connect(&url_of(&[proxy.port()])).await, connect(&replica.url()).await);
        let first = long("lost-reply");
        let hits = once(&proxy, Method::POST, Fault::LoseReply);
        let token = holding(ours.store().join(&first, Mode::Wait).await);
        assert_eq!(hits.load(Ordering::SeqCst), 2, "expected the first copy and the second one");
        let shown = witness.inspect("lost-reply").await.unwrap().unwrap();
        assert_eq!(shown.claims.len(), 1, "{shown:?}");
        assert_eq!(shown.claims[0].token, Some(token));

        // It is unknown whether the first copy of a release removed the claim, so it counts as
        // released.
        let hits = once(&proxy, Method::DELETE, Fault::LoseReply);
        assert!(ours.store().leave(&first, None).await.unwrap());
        assert_eq!(hits.load(Ordering::SeqCst), 2);
        assert!(witness.inspect("lost-reply").await.unwrap().is_none());
    });
}

#[test]
fn requests_that_a_proxy_repeats_change_nothing() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let ours = connect(&url_of(&[proxy.port()])).await;
        let store = ours.store();
        proxy.plan(|method, path| match (method, path.starts_with("/v1/claims")) {
            (_, false) => Fault::None,
            (&Method::DELETE, _) => Fault::Twice,
            _ => Fault::Again,
        });
        let mut claims = ["a", "b"].map(|_| {
            let mut claim = claim("repeated", Kind::RwLock, 1 << 20, 1 << 20);
            (claim.lease, claim.waiter_lease) = (LONG, LONG);
            claim
        });
        let token = holding(store.join(&claims[0], Mode::Wait).await);
        let joined = store.join(&claims[1], Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(place) if place.ahead == 1), "{joined:?}");
        let renewals = claims.each_ref().map(|c| Renew { claim: c.clone(), lease: LONG });
        let renewed = store.renew(&renewals).await.unwrap();
        let [Renewal::Holding { token: same, .. }, Renewal::Waiting(_)] = renewed[..] else {
            panic!("{renewed:?}")
        };
        assert_eq!(same, token);
        claims[0].weight = 1;
        let converted = store.convert(&claims[0]).await.unwrap();
        assert_eq!(converted, Converted::Done { token });
        let shown = ours.inspect("repeated").await.unwrap().unwrap();
        assert_eq!(shown.claims.len(), 2, "{shown:?}");
        assert!(store.leave(&claims[0], None).await.unwrap());
        let signal = tokio::time::timeout(PATIENCE, store.changed(&claims[1])).await;
        assert!(matches!(signal, Ok(Ok(Signal::Granted(next))) if next > token), "{signal:?}");
    });
}

/// A release whose second copy is answered is a false alarm, which is safe.
#[test]
fn release_that_a_proxy_repeats_is_never_reported_as_held() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let ours = connect(&url_of(&[proxy.port()])).await;
        let guard = ours.mutex("twice").lock().await.unwrap();
        once(&proxy, Method::DELETE, Fault::Again);
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert_eq!(error.lost_reason(), Some(LostReason::Gone));
        assert!(ours.inspect("twice").await.unwrap().is_none());
    });
}

/// The copy of a join that arrives after the release makes a claim that is gone within its lease.
#[test]
fn late_request_blocks_a_lock_for_a_lease_at_most() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let (ours, others) =
            (connect(&url_of(&[proxy.port()])).await, connect(&replica.url()).await);
        let mut late = claim("late", Kind::Mutex, 1, 1);
        (late.lease, late.waiter_lease) = (Duration::from_secs(1), Duration::from_secs(1));
        once(&proxy, Method::POST, Fault::LateRequest);
        let token = holding(ours.store().join(&late, Mode::Wait).await);
        ours.store().leave(&late, None).await.unwrap();
        proxy.release();
        let next = others.mutex("late").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.grant() > token);
    });
}

#[test]
fn lease_is_counted_from_the_request_even_if_the_reply_is_late() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let ours = connect(&url_of(&[proxy.port()])).await;
        let late = Duration::from_secs(1);
        once(&proxy, Method::POST, Fault::LateReply(late));
        let lease = Duration::from_secs(60);
        let guard = ours.mutex("late-reply").lease(lease).lock().await.unwrap();
        assert!(guard.remaining() <= lease - late, "{:?}", guard.remaining());
        once(&proxy, Method::POST, Fault::LateReply(late));
        let remaining = guard.renew().await.unwrap();
        assert!(remaining <= lease - late, "{remaining:?}");
    });
}

#[test]
fn waiter_is_notified_after_its_poll_was_cut() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let (ours, others) =
            (connect(&url_of(&[proxy.port()])).await, connect(&replica.url()).await);
        let (holder, waiter) = (long("cut-poll"), long("cut-poll"));
        holding(others.store().join(&holder, Mode::Wait).await);
        let joined = ours.store().join(&waiter, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        // The first polls lose their answers, even those that report the grant.
        let polls = Arc::<AtomicUsize>::default();
        let counted = polls.clone();
        proxy.plan(move |method, path| {
            let is_poll = *method == Method::GET && path.starts_with("/v1/claims");
            match is_poll && counted.fetch_add(1, Ordering::SeqCst) < 3 {
                true => Fault::LoseReply,
                false => Fault::None,
            }
        });
        let store = ours.store().clone();
        let waiting = tokio::spawn(async move {
            loop {
                if let Signal::Granted(token) = store.changed(&waiter).await.unwrap() {
                    return token;
                }
            }
        });
        while polls.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        others.store().leave(&holder, None).await.unwrap();
        let granted = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
        let shown = others.inspect("cut-poll").await.unwrap().unwrap();
        assert_eq!(shown.claims[0].token, Some(granted));
        assert!(polls.load(Ordering::SeqCst) > 3);
    });
}

#[test]
fn changes_and_evictions_are_reported_after_a_stream_was_cut() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = testbed::Proxy::before(replica.port());
        let (ours, others) =
            (connect(&url_of(&[proxy.port()])).await, connect(&replica.url()).await);
        let guard = ours.mutex("cut-stream").lease(LONG).lock().await.unwrap();
        let follow = ours.store().follow(&Queues::All("cut-".into())).await.unwrap().unwrap();
        for round in 0..3 {
            proxy.cut();
            // A new subscription reports that something may have changed.
            tokio::time::timeout(PATIENCE, follow.changed())
                .await
                .expect("the follower was not notified again");
            let other = others.mutex(format!("cut-{round}")).try_lock().await.unwrap();
            tokio::time::timeout(PATIENCE, follow.changed()).await.expect("a change");
            other.release().await.unwrap();
        }
        // No renewal is due for a long time, so only the stream can cause one.
        proxy.refuse(true);
        assert_eq!(others.evict("cut-stream", Evict::Holders).await.unwrap(), 1);
        proxy.refuse(false);
        let lost = tokio::time::timeout(PATIENCE, guard.lost()).await;
        assert_eq!(lost, Ok(LostReason::Gone));
    });
}

#[test]
fn holder_and_waiter_survive_the_crash_of_a_replica() {
    run(async {
        let redis = testbed::redis();
        let mut replicas = [(); 2].map(|()| Replica::over(&redis.url()));
        let url = url_of(&[replicas[0].port(), replicas[1].port()]);
        let lease = Duration::from_secs(30);
        let name = format!("crash-{}", replicas[0].port());
        let (holder, waiter) = (connect(&url).await, connect(&url).await);
        let guard = holder.mutex(&name).lease(lease).lock().await.unwrap();
        let token = guard.token();
        let waiting = {
            let mutex = waiter.mutex(&name).lease(lease);
            tokio::spawn(async move { mutex.lock_timeout(PATIENCE).await })
        };
        let waits = async {
            while holder.inspect(&name).await.unwrap().is_none_or(|lock| lock.claims.len() < 2) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.expect("the two claims are not in the queue");
        // Every replica that they may use crashes in turn.
        for crashed in &mut replicas {
            crashed.kill();
            let renewed = tokio::time::timeout(PATIENCE, async {
                while let Err(error) = guard.renew().await {
                    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                }
            });
            renewed.await.expect("the lock was not renewed through the other replica");
            assert!(guard.is_held());
            let shown = holder.inspect(&name).await.unwrap().unwrap();
            assert_eq!(shown.claims.len(), 2, "{shown:?}");
            crashed.restart();
        }
        assert!(matches!(guard.release().await, Ok(Released::Now)));
        let next = waiting.await.unwrap().unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
    });
}

#[test]
fn locks_of_a_server_in_memory_are_lost_with_it() {
    run(async {
        let mut replica = Replica::over_memory();
        let ours = connect(&replica.url()).await;
        let guard = ours.mutex("memory").lease(LONG).lock().await.unwrap();
        replica.kill();
        let error = guard.renew().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(guard.is_held(), "an error of a renewal must not end the hold");
        replica.restart_empty();
        let renewed = tokio::time::timeout(PATIENCE, async {
            loop {
                match guard.renew().await {
                    Err(error) if error.kind() == ErrorKind::Lost => return,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
                    Ok(_) => panic!("a new server renewed an unknown hold"),
                }
            }
        });
        renewed.await.unwrap();
    });
}

#[test]
fn evicting_all_holders_is_sent_once() {
    run(async {
        let replica = Replica::over_memory();
        let proxy = HttpProxy::before(replica.port());
        let (ours, others) =
            (connect(&url_of(&[proxy.port()])).await, connect(&replica.url()).await);
        let guard = others.mutex("evicted-once").lock().await.unwrap();
        let hits = Arc::<AtomicUsize>::default();
        let counted = hits.clone();
        proxy.plan(move |_, path| match path.ends_with("/evict") {
            true => {
                counted.fetch_add(1, Ordering::SeqCst);
                Fault::LoseReply
            }
            false => Fault::None,
        });
        let error = ours.evict("evicted-once", Evict::Holders).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(hits.load(Ordering::SeqCst), 1, "a second copy would evict the next holder");
        assert_eq!(guard.lost().await, LostReason::Gone);
        // An eviction by token is repeatable.
        let next = others.mutex("evicted-once").lock().await.unwrap();
        let token: Token = next.grant();
        hits.store(0, Ordering::SeqCst);
        let error = ours.evict("evicted-once", Evict::Token(token)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(hits.load(Ordering::SeqCst), 2);
    });
}
