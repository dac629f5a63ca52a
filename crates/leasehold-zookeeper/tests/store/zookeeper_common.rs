//! Helpers of the tests of the ZooKeeper store.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use leasehold::store::{Claim, Joined, Mode, Store};
use leasehold::{Client, ErrorKind, Hold, Kind, LostReason, Name, State};
pub(crate) use leasehold_test_support::{PATIENCE, connect, until, until_waiting};
use testbed::{Proxy, ZooKeeper, zookeeper};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use zookeeper_client::{Acls, Client as RawClient, CreateMode};

pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(test)
}

/// Returns the URL of the server that all tests share, with this rest.
pub(crate) fn url(rest: &str) -> String {
    format!("{}{rest}", zookeeper().url())
}

/// Returns the URL of the same server behind this proxy.
pub(crate) fn through(proxy: &Proxy, rest: &str) -> String {
    format!("zookeeper://127.0.0.1:{}{rest}", proxy.port())
}

/// Connects a client that knows one member only.
pub(crate) async fn connect_to(member: &ZooKeeper, rest: &str) -> Client {
    connect(&format!("{}{rest}", member.url())).await
}

/// Connects a client of the driver to the top of the tree. Its session is long. The driver would
/// request the shortest one, which expires if the machine pauses for a moment.
pub(crate) async fn raw(port: u16) -> RawClient {
    let connector = RawClient::connector().with_session_timeout(Duration::from_secs(60));
    connector.connect(&format!("127.0.0.1:{port}")).await.unwrap()
}

pub(crate) async fn children(client: &RawClient, lock: &str) -> Vec<String> {
    let mut names = client.list_children(lock).await.unwrap_or_default();
    names.sort_unstable();
    names
}

/// Deletes the claim with this number, as an operator would.
pub(crate) async fn evict(client: &RawClient, name: &str, number: u32) {
    let lock = format!("/leasehold/{name}");
    let all = children(client, &lock).await;
    let child = all.iter().find(|child| child.ends_with(&format!("{number:010}"))).unwrap();
    client.delete(&format!("{lock}/{child}"), None).await.unwrap();
}

/// Creates a persistent node and all nodes above it.
pub(crate) async fn make(client: &RawClient, path: &str) {
    client.mkdir(path, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.unwrap();
}

/// Creates a child as another client would.
pub(crate) async fn make_child(client: &RawClient, prefix: &str) -> String {
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let (_, sequence) = client.create(prefix, b"10.0.0.1", &options).await.unwrap();
    format!("{prefix}{sequence}")
}

pub(crate) fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

/// Returns a claim that needs no heartbeat during a test, in a session of 60 s.
pub(crate) fn patient(name: &str) -> Claim {
    patiently(claim(name))
}

/// Returns such a claim for some permits.
pub(crate) fn permits(name: &str, weight: u32, capacity: u32) -> Claim {
    patiently(Claim::new(Name::new(name).unwrap(), Kind::Semaphore, weight, capacity).unwrap())
}

fn patiently(mut claim: Claim) -> Claim {
    let long = Duration::from_secs(40);
    (claim.lease, claim.waiter_lease) = (long, long);
    claim
}

pub(crate) async fn holds(store: &Arc<dyn Store>, claim: &Claim) {
    let joined = store.join(claim, Mode::Wait).await.unwrap();
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
}

pub(crate) async fn waits(store: &Arc<dyn Store>, claim: &Claim, behind: usize) {
    let joined = store.join(claim, Mode::Wait).await.unwrap();
    assert!(matches!(&joined, Joined::Waiting(place) if place.ahead == behind), "{joined:?}");
}

pub(crate) async fn leaves(store: &Arc<dyn Store>, claim: &Claim) {
    assert!(store.leave(claim, None).await.unwrap());
}

pub(crate) async fn release(hold: impl Into<Hold>) {
    hold.into().release().await.unwrap();
}

pub(crate) async fn is_pending<F: Future>(future: &mut Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
}

/// Breaks the holder's member while another client waits. Checks that the holder learns of its loss
/// before the other client is granted.
pub(crate) async fn lost_before_the_next_holds(
    held: &Client,
    other: &Client,
    name: &str,
    breaking: impl FnOnce(),
) {
    let (guard, next) = loop {
        let guard = held.mutex(name).lock_timeout(PATIENCE).await.unwrap();
        let next = tokio::spawn({
            let lock = other.mutex(name);
            async move { lock.lock_timeout(PATIENCE).await }
        });
        until("the other client is in the queue", async || {
            let info = other.inspect(name).await.unwrap();
            next.is_finished() || info.is_some_and(|info| info.waiters().count() == 1)
        })
        .await;
        // After this pause, the leader's knowledge is as old as it usually is.
        tokio::time::sleep(Duration::from_millis(700)).await;
        if guard.is_held() {
            break (guard, next);
        }
        // If the machine paused, the lease is over before anything is broken.
        release(next.await.unwrap().unwrap()).await;
    };
    breaking();
    let next = next.await.unwrap().unwrap();
    assert!(!guard.is_held(), "two clients hold the lock: {guard:?} and {next:?}");
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    assert!(next.token() > guard.token());
    release(next).await;
}

#[track_caller]
pub(crate) fn is_one_line(error: &leasehold::Error, kind: ErrorKind, says: &[&str]) {
    let shown = format!("{error:#}");
    assert_eq!(error.kind(), kind, "{shown}");
    assert_eq!(shown.lines().count(), 1, "{shown}");
    for word in says {
        assert!(shown.contains(word), "{shown} does not contain {word}");
    }
}

/// A proxy in front of one server, which records its replies.
#[derive(Default)]
pub(crate) struct Listener {
    /// The first reply on each connection.
    pub(crate) first: Mutex<Vec<Vec<u8>>>,
    /// How many bytes the server has sent after it.
    pub(crate) bytes: AtomicUsize,
}

pub(crate) async fn listening_in(port: u16) -> (u16, Arc<Listener>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = listener.local_addr().unwrap().port();
    let recorded = Arc::<Listener>::default();
    let keeping = recorded.clone();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let recorded = keeping.clone();
            tokio::spawn(async move {
                let server = TcpStream::connect(("127.0.0.1", port)).await?;
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let up = async {
                    tokio::io::copy(&mut from_client, &mut to_server).await?;
                    std::io::Result::Ok(())
                };
                let down = async {
                    let mut first = vec![0; 4];
                    from_server.read_exact(&mut first).await?;
                    let length = u32::from_be_bytes(first[..4].try_into().unwrap());
                    first.resize(4 + usize::try_from(length).unwrap(), 0);
                    from_server.read_exact(&mut first[4..]).await?;
                    to_client.write_all(&first).await?;
                    recorded.first.lock().unwrap().push(first);
                    let mut buffer = [0; 4096];
                    loop {
                        let n = from_server.read(&mut buffer).await?;
                        if n == 0 {
                            return Ok(());
                        }
                        recorded.bytes.fetch_add(n, Ordering::SeqCst);
                        to_client.write_all(&buffer[..n]).await?;
                    }
                };
                tokio::select! { ended = up => ended, ended = down => ended }
            });
        }
    });
    (here, recorded)
}
