//! What the tests of the ZooKeeper store share.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::{Guard, Leasehold};
use zookeeper_client::{Acls, Client, CreateMode};

/// Far more than anything here takes; only a failing test waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(test)
}

pub(crate) async fn connect(url: &str) -> Leasehold {
    leasehold::connect(url).await.unwrap()
}

/// A client of the driver's, on the top of the tree. Its session is long: the driver asks for the
/// shortest, which a machine that stands still for a moment outlasts.
pub(crate) async fn raw(port: u16) -> Client {
    let connector = Client::connector().with_session_timeout(Duration::from_secs(60));
    connector.connect(&format!("127.0.0.1:{port}")).await.unwrap()
}

pub(crate) async fn children(client: &Client, lock: &str) -> Vec<String> {
    let mut names = client.list_children(lock).await.unwrap_or_default();
    names.sort_unstable();
    names
}

/// Makes a node that stays, and all above it.
pub(crate) async fn make(client: &Client, path: &str) {
    client.mkdir(path, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.unwrap();
}

/// Makes a child as another client would.
pub(crate) async fn make_child(client: &Client, prefix: &str) -> String {
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let (_, sequence) = client.create(prefix, b"10.0.0.1", &options).await.unwrap();
    format!("{prefix}{sequence}")
}

pub(crate) async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so().await {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn until_waiting(locks: &Leasehold, name: &str, count: usize) {
    until("standing in the queue", async || {
        locks.read(name).await.unwrap().is_some_and(|info| info.waiters().count() == count)
    })
    .await;
}

pub(crate) async fn release(guard: Guard) {
    guard.release().await.unwrap();
}

pub(crate) async fn is_pending<F: Future>(future: &mut Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
}
