//! Keep-alives: one stream for all leases of a client.
//!
//! etcd answers them in the order in which they came, each with what the lease was granted for, or
//! with 0 if it is over. Silence is no answer: when nothing was heard for some time, the connection is
//! condemned and with it the stream (scenario 82). One of thousands waits for those before it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::client::{Client, Connection};
use super::fault::{Failure, unreachable};
use super::proto::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};

/// The stream of the current connection, opened when it is first needed.
#[derive(Debug)]
pub(super) struct KeepAlives {
    client: Arc<Client>,
    live: Mutex<Option<Arc<Stream>>>,
}

#[derive(Debug)]
struct Stream {
    generation: u64,
    requests: mpsc::UnboundedSender<LeaseKeepAliveRequest>,
    /// `None`: the stream has ended.
    asked: Mutex<Option<Asked>>,
    /// When the last answer came.
    heard: Mutex<Instant>,
}

/// Who waits for the next answers about each lease.
type Asked = HashMap<i64, VecDeque<oneshot::Sender<i64>>>;

/// A keep-alive under way.
#[derive(Debug)]
pub(super) struct Pending {
    stream: Arc<Stream>,
    answer: oneshot::Receiver<i64>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs between two consistent states.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KeepAlives {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self { client, live: Mutex::new(None) }
    }

    /// Sends a keep-alive without waiting for its answer, so that many can be under way.
    pub(super) async fn send(&self, lease: i64) -> Result<Pending, Failure> {
        let connection = self.client.connection().await?;
        let stream = self.stream(&connection);
        let (answered, answer) = oneshot::channel();
        {
            let mut asked = locked(&stream.asked);
            let Some(asked) = asked.as_mut() else { return Err(ended()) };
            // Under the lock, so that the order here is the order on the wire.
            let sent = stream.requests.send(LeaseKeepAliveRequest { id: lease });
            sent.map_err(|_| ended())?;
            asked.entry(lease).or_default().push_back(answered);
        }
        self.client.count_sent();
        Ok(Pending { stream, answer })
    }

    /// For how long the lease is good from when this was sent; `None` if it is over.
    pub(super) async fn answer(&self, pending: Pending) -> Result<Option<Duration>, Failure> {
        let Pending { stream, answer } = pending;
        let answer = async { answer.await.map_err(|_| ended()) };
        let heard = || *locked(&stream.heard);
        let ttl = self.client.while_heard(stream.generation, &heard, answer).await?;
        Ok(u64::try_from(ttl).ok().filter(|ttl| *ttl > 0).map(Duration::from_secs))
    }

    /// Both of it.
    pub(super) async fn ask(&self, lease: i64) -> Result<Option<Duration>, Failure> {
        let pending = self.send(lease).await?;
        self.answer(pending).await
    }

    fn stream(&self, connection: &Connection) -> Arc<Stream> {
        let mut live = locked(&self.live);
        let usable = live.as_ref().filter(|stream| {
            stream.generation == connection.generation && locked(&stream.asked).is_some()
        });
        if let Some(stream) = usable {
            return stream.clone();
        }
        let (requests, orders) = mpsc::unbounded_channel();
        let asked = Mutex::new(Some(Asked::new()));
        let heard = Mutex::new(Instant::now());
        let stream = Arc::new(Stream { generation: connection.generation, requests, asked, heard });
        let serving = serve(self.client.clone(), connection.clone(), stream.clone(), orders);
        self.client.runtime().spawn(serving);
        *live = Some(stream.clone());
        stream
    }
}

impl Drop for KeepAlives {
    fn drop(&mut self) {
        if let Some(stream) = locked(&self.live).take() {
            self.client.condemn(stream.generation);
        }
    }
}

fn ended() -> Failure {
    Failure::Passing(unreachable("the stream of keep-alives has ended".into()))
}

async fn serve(
    client: Arc<Client>,
    connection: Connection,
    stream: Arc<Stream>,
    orders: mpsc::UnboundedReceiver<LeaseKeepAliveRequest>,
) {
    let answers = async {
        let path = "/etcdserverpb.Lease/LeaseKeepAlive";
        let mut answers = client.stream(&connection, path, orders).await?;
        while let Some(LeaseKeepAliveResponse { id, ttl }) = answers.message().await? {
            *locked(&stream.heard) = Instant::now();
            client.has_answered();
            let mut asked = locked(&stream.asked);
            let Some(all) = asked.as_mut() else { break };
            let Some(first) = all.get_mut(&id) else { continue };
            if let Some(asked) = first.pop_front() {
                // Who asked may have given up.
                let _ = asked.send(ttl);
            }
            if first.is_empty() {
                all.remove(&id);
            }
        }
        Err::<(), Failure>(ended())
    };
    let failed = tokio::select! {
        failed = answers => failed.err(),
        () = client.condemned(connection.generation) => None,
    };
    // Whoever waits is told by the end of the channel.
    *locked(&stream.asked) = None;
    if let Some(Failure::Token(_)) = failed {
        client.forget_token();
    }
    client.condemn(connection.generation);
}
