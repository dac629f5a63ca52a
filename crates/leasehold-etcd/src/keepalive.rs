//! Keep-alives: a few streams for all leases of a client.
//!
//! **Several streams.** On one stream, etcd answers one request after the other, each with the
//! granted time of the lease, or with 0 if it has expired. A follower forwards each request to the
//! leader before it takes the next one. With 2 ms to the leader, one stream renews 500 leases per
//! second. So if many requests on a stream are unanswered, the next one is sent on another stream
//! ([`DEPTH`], [`MOST`]). Thousands of locks are renewed in a fraction of their lease.
//!
//! **At most one unanswered request per lease.** A task that requests another keep-alive after an
//! earlier caller gave up shares the reply that is on its way. Otherwise requests would pile up if
//! they are sent faster than they are answered, and each attempt to catch up would add delay. The
//! time in a shared reply is counted from when its request was sent ([`RenewedLease::from`]),
//! however long ago that is.
//!
//! **Failures.** An overloaded member ends the stream with an error, and the next stream is opened
//! on the same connection. If nothing arrives on a stream for some time, the connection is
//! condemned with all its streams (scenario 82). That time is counted from the last reply to any
//! request, because each of thousands of requests waits for those ahead of it.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::client::{Client, Connection};
use super::fault::{Failure, unreachable};
use super::proto::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use leasehold_core::{Clock, Moment};

/// Number of unanswered requests on a stream from which another stream is opened.
const DEPTH: usize = 32;
/// Maximum number of streams.
const MOST: usize = 32;

/// The streams of the current connection, which are opened on demand.
#[derive(Debug)]
pub(super) struct KeepAlives {
    client: Arc<Client>,
    clock: Clock,
    live: Mutex<Vec<Arc<Stream>>>,
}

#[derive(Debug)]
struct Stream {
    generation: u64,
    requests: mpsc::UnboundedSender<LeaseKeepAliveRequest>,
    /// The unanswered request of each lease. `None` if the stream has ended.
    asked: Mutex<Option<HashMap<i64, Unanswered>>>,
    /// The time of the last reply.
    last_reply: Mutex<Instant>,
}

/// A request, and the tasks that wait for its reply.
#[derive(Debug)]
struct Unanswered {
    sent: Moment,
    who: Vec<oneshot::Sender<(Moment, i64)>>,
}

/// A keep-alive under way.
#[derive(Debug)]
pub(super) struct Pending {
    stream: Arc<Stream>,
    answer: oneshot::Receiver<(Moment, i64)>,
}

/// A lease that was renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RenewedLease {
    /// When the request was sent. This may be before this caller requested the keep-alive.
    pub(super) from: Moment,
    /// The granted time, counted from `from`.
    pub(super) granted: Duration,
}

impl RenewedLease {
    pub(super) fn ends(&self) -> Moment {
        self.from.plus(self.granted)
    }
}

impl KeepAlives {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self { client, clock: Clock::default(), live: Mutex::default() }
    }

    /// Sends a keep-alive without waiting for its reply, so that many can be under way.
    pub(super) async fn send(&self, lease: i64) -> Result<Pending, Failure> {
        let connection = self.client.connection().await?;
        // One lock covers all streams, so that no other task sends a keep-alive for the lease on
        // another stream in the meantime.
        let mut live = locked(&self.live);
        live.retain(|s| s.generation == connection.generation && s.unanswered().is_some());
        let sharing =
            live.iter().find_map(|stream| stream.share(lease).map(|a| (stream.clone(), a)));
        if let Some((stream, answer)) = sharing {
            return Ok(Pending { stream, answer });
        }
        let shortest = live.iter().min_by_key(|s| s.unanswered().unwrap_or(usize::MAX)).cloned();
        let is_full = |s: &Stream| s.unanswered().is_none_or(|n| n >= DEPTH);
        let stream = match shortest {
            Some(stream) if live.len() >= MOST || !is_full(&stream) => stream,
            _ => {
                let stream = self.open(&connection);
                live.push(stream.clone());
                stream
            }
        };
        let answer = stream.ask(lease, self.clock.now()).ok_or_else(ended)?;
        self.client.count_sent();
        Ok(Pending { stream, answer })
    }

    /// Waits for the reply. Returns for how long the lease is valid, or `None` if it has expired.
    pub(super) async fn answer(&self, pending: Pending) -> Result<Option<RenewedLease>, Failure> {
        let Pending { stream, answer } = pending;
        let answer = async { answer.await.map_err(|_| ended()) };
        let last_reply = || *locked(&stream.last_reply);
        let (from, ttl) =
            self.client.while_replying(stream.generation, &last_reply, answer).await?;
        let granted = u64::try_from(ttl).ok().filter(|ttl| *ttl > 0).map(Duration::from_secs);
        Ok(granted.map(|granted| RenewedLease { from, granted }))
    }

    /// Sends a keep-alive and waits for the reply to a request that was sent now or later.
    pub(super) async fn ask(&self, lease: i64) -> Result<Option<RenewedLease>, Failure> {
        let now = self.clock.now();
        loop {
            let pending = self.send(lease).await?;
            match self.answer(pending).await? {
                // This reply belongs to an older request. The next keep-alive is sent after now.
                Some(alive) if alive.from < now => {}
                alive => return Ok(alive),
            }
        }
    }

    fn open(&self, connection: &Connection) -> Arc<Stream> {
        let (requests, orders) = mpsc::unbounded_channel();
        let asked = Mutex::new(Some(HashMap::new()));
        let last_reply = Mutex::new(Instant::now());
        let generation = connection.generation;
        let stream = Arc::new(Stream { generation, requests, asked, last_reply });
        let serving = serve(self.client.clone(), connection.clone(), stream.clone(), orders);
        self.client.runtime().spawn(serving);
        stream
    }
}

impl Stream {
    /// Returns how many leases have an unanswered request. Returns `None` if the stream has ended.
    fn unanswered(&self) -> Option<usize> {
        locked(&self.asked).as_ref().map(HashMap::len)
    }

    /// Joins the tasks that wait for a reply that is on its way.
    fn share(&self, lease: i64) -> Option<oneshot::Receiver<(Moment, i64)>> {
        let mut asked = locked(&self.asked);
        let unanswered = asked.as_mut()?.get_mut(&lease)?;
        // If the reply takes long, many tasks may have given up.
        unanswered.who.retain(|who| !who.is_closed());
        let (who, answer) = oneshot::channel();
        unanswered.who.push(who);
        Some(answer)
    }

    /// Sends a request. Returns `None` if the stream has ended.
    fn ask(&self, lease: i64, sent: Moment) -> Option<oneshot::Receiver<(Moment, i64)>> {
        let mut asked = locked(&self.asked);
        let (who, answer) = oneshot::channel();
        self.requests.send(LeaseKeepAliveRequest { id: lease }).ok()?;
        asked.as_mut()?.insert(lease, Unanswered { sent, who: vec![who] });
        Some(answer)
    }

    /// Passes a reply to the tasks that wait for it. Returns whether the stream still accepts
    /// requests.
    fn answered(&self, LeaseKeepAliveResponse { id, ttl }: LeaseKeepAliveResponse) -> bool {
        *locked(&self.last_reply) = Instant::now();
        let mut asked = locked(&self.asked);
        let Some(asked) = asked.as_mut() else { return false };
        let Some(Unanswered { sent, who }) = asked.remove(&id) else { return true };
        for who in who {
            // The waiting task may have given up.
            let _ = who.send((sent, ttl));
        }
        true
    }
}

impl Drop for KeepAlives {
    fn drop(&mut self) {
        if let Some(stream) = locked(&self.live).pop() {
            self.client.condemn(stream.generation);
        }
    }
}

fn ended() -> Failure {
    Failure::Passing(unreachable("the keep-alive stream has ended".into()))
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
        while let Some(answer) = answers.message().await? {
            client.has_answered();
            if !stream.answered(answer) {
                break;
            }
        }
        Err::<(), Failure>(ended())
    };
    let failed = tokio::select! {
        failed = answers => failed.err(),
        () = client.condemned(connection.generation) => None,
    };
    // The closed channel notifies all tasks that wait.
    *locked(&stream.asked) = None;
    match failed {
        // The other streams of the connection stay, because restarting them would be even more
        // load.
        Some(Failure::Slow(_)) => return,
        Some(Failure::Token(_)) => client.forget_token(),
        _ => {}
    }
    client.condemn(connection.generation);
}

#[cfg(test)]
mod tests {
    use super::*;

    // F09
    #[test]
    fn repeated_keep_alive_shares_the_pending_reply() {
        let (requests, mut orders) = mpsc::unbounded_channel();
        let (asked, last_reply) = (Mutex::new(Some(HashMap::new())), Mutex::new(Instant::now()));
        let stream = Stream { generation: 0, requests, asked, last_reply };
        let (first, later) = (Moment::from_nanos(1), Moment::from_nanos(2));
        assert!(stream.share(7).is_none());
        let gave_up = stream.ask(7, first).unwrap();
        drop(gave_up);
        let mut shares = stream.share(7).unwrap();
        assert_eq!(stream.unanswered(), Some(1));
        assert!(
            orders.try_recv().is_ok() && orders.try_recv().is_err(),
            "the keep-alive was not sent exactly once"
        );
        assert!(stream.answered(LeaseKeepAliveResponse { id: 7, ttl: 15 }));
        assert_eq!(
            shares.try_recv(),
            Ok((first, 15)),
            "the keep-alive must count from when it was sent"
        );
        assert!(stream.share(7).is_none());
        let mut fresh = stream.ask(7, later).unwrap();
        assert!(stream.answered(LeaseKeepAliveResponse { id: 7, ttl: 15 }));
        assert_eq!(fresh.try_recv(), Ok((later, 15)));
    }
}
