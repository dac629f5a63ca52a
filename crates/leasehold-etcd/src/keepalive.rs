//! Keep-alives: a few streams for all leases of a client.
//!
//! On one stream etcd answers one after the other, each with what the lease was granted for, or with 0
//! if it is over. A member that does not lead asks the leader about each before it takes the next: at
//! 2 ms to the leader, one stream renews 500 leases a second. So where many are unanswered on a
//! stream, the next goes on another one ([`DEPTH`], [`MOST`]): thousands of locks are renewed in a
//! fraction of their lease.
//!
//! *Never two unanswered for one lease*: who asks again, since the last one gave up, shares the answer
//! that is on its way. What cannot be answered as fast as it is asked for would pile up otherwise, and
//! each try to catch up would make it later. A shared answer counts from when its request was sent
//! ([`Alive::from`]), however long ago that is.
//!
//! A member that cannot keep up ends the stream and says so; the next one is opened on the same
//! connection. Silence is no answer: when nothing was heard on a stream for some time, the connection is condemned and
//! with it all its streams (scenario 82). One of thousands waits for those before it.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::client::{Client, Connection};
use super::fault::{Failure, unreachable};
use super::proto::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use leasehold_core::{Clock, Moment};

/// How many may be unanswered on a stream before the next one is opened.
const DEPTH: usize = 32;
/// How many streams there are at most.
const MOST: usize = 32;

/// The streams of the current connection, opened when they are first needed.
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
    /// What is unanswered of each lease. `None`: the stream has ended.
    asked: Mutex<Option<HashMap<i64, Unanswered>>>,
    /// When the last answer came.
    heard: Mutex<Instant>,
}

/// A request, and who waits for its answer.
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
pub(super) struct Alive {
    /// When the request was sent. Perhaps before it was asked for here.
    pub(super) from: Moment,
    /// How long it is good from then.
    pub(super) granted: Duration,
}

impl Alive {
    pub(super) fn ends(&self) -> Moment {
        self.from.plus(self.granted)
    }
}

impl KeepAlives {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self { client, clock: Clock::default(), live: Mutex::default() }
    }

    /// Sends a keep-alive without waiting for its answer, so that many can be under way.
    pub(super) async fn send(&self, lease: i64) -> Result<Pending, Failure> {
        let connection = self.client.connection().await?;
        // Under one lock, so that nobody else asks about the lease on another stream meanwhile.
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

    /// For how long the lease is good; `None` if it is over.
    pub(super) async fn answer(&self, pending: Pending) -> Result<Option<Alive>, Failure> {
        let Pending { stream, answer } = pending;
        let answer = async { answer.await.map_err(|_| ended()) };
        let heard = || *locked(&stream.heard);
        let (from, ttl) = self.client.while_heard(stream.generation, &heard, answer).await?;
        let granted = u64::try_from(ttl).ok().filter(|ttl| *ttl > 0).map(Duration::from_secs);
        Ok(granted.map(|granted| Alive { from, granted }))
    }

    /// Both of it, counted from now or later.
    pub(super) async fn ask(&self, lease: i64) -> Result<Option<Alive>, Failure> {
        let now = self.clock.now();
        loop {
            let pending = self.send(lease).await?;
            match self.answer(pending).await? {
                // It was under way already; what is sent after it is not.
                Some(alive) if alive.from < now => {}
                alive => return Ok(alive),
            }
        }
    }

    fn open(&self, connection: &Connection) -> Arc<Stream> {
        let (requests, orders) = mpsc::unbounded_channel();
        let asked = Mutex::new(Some(HashMap::new()));
        let heard = Mutex::new(Instant::now());
        let stream = Arc::new(Stream { generation: connection.generation, requests, asked, heard });
        let serving = serve(self.client.clone(), connection.clone(), stream.clone(), orders);
        self.client.runtime().spawn(serving);
        stream
    }
}

impl Stream {
    /// How many leases are unanswered; `None` if it has ended.
    fn unanswered(&self) -> Option<usize> {
        locked(&self.asked).as_ref().map(HashMap::len)
    }

    /// Waits for an answer that is on its way.
    fn share(&self, lease: i64) -> Option<oneshot::Receiver<(Moment, i64)>> {
        let mut asked = locked(&self.asked);
        let unanswered = asked.as_mut()?.get_mut(&lease)?;
        // Those who gave up are many where it takes long.
        unanswered.who.retain(|who| !who.is_closed());
        let (who, answer) = oneshot::channel();
        unanswered.who.push(who);
        Some(answer)
    }

    /// Sends a request; `None` if the stream has ended.
    fn ask(&self, lease: i64, sent: Moment) -> Option<oneshot::Receiver<(Moment, i64)>> {
        let mut asked = locked(&self.asked);
        let (who, answer) = oneshot::channel();
        self.requests.send(LeaseKeepAliveRequest { id: lease }).ok()?;
        asked.as_mut()?.insert(lease, Unanswered { sent, who: vec![who] });
        Some(answer)
    }

    /// Tells an answer to those who wait for it; whether anybody may still ask.
    fn answered(&self, LeaseKeepAliveResponse { id, ttl }: LeaseKeepAliveResponse) -> bool {
        *locked(&self.heard) = Instant::now();
        let mut asked = locked(&self.asked);
        let Some(asked) = asked.as_mut() else { return false };
        let Some(Unanswered { sent, who }) = asked.remove(&id) else { return true };
        for who in who {
            // Who asked may have given up.
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
    // Whoever waits is told by the end of the channel.
    *locked(&stream.asked) = None;
    match failed {
        // What else is on the connection goes on: to begin all of that anew would be more to do.
        Some(Failure::Slow(_)) => return,
        Some(Failure::Token(_)) => client.forget_token(),
        _ => {}
    }
    client.condemn(connection.generation);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f09_who_asks_again_shares_the_answer_that_is_on_its_way() {
        let (requests, mut orders) = mpsc::unbounded_channel();
        let (asked, heard) = (Mutex::new(Some(HashMap::new())), Mutex::new(Instant::now()));
        let stream = Stream { generation: 0, requests, asked, heard };
        let (first, later) = (Moment::from_nanos(1), Moment::from_nanos(2));
        assert!(stream.share(7).is_none());
        let gave_up = stream.ask(7, first).unwrap();
        drop(gave_up);
        let mut shares = stream.share(7).unwrap();
        assert_eq!(stream.unanswered(), Some(1));
        assert!(orders.try_recv().is_ok() && orders.try_recv().is_err(), "asked once");
        assert!(stream.answered(LeaseKeepAliveResponse { id: 7, ttl: 15 }));
        assert_eq!(shares.try_recv(), Ok((first, 15)), "from when it was sent");
        assert!(stream.share(7).is_none());
        let mut fresh = stream.ask(7, later).unwrap();
        assert!(stream.answered(LeaseKeepAliveResponse { id: 7, ttl: 15 }));
        assert_eq!(fresh.try_recv(), Ok((later, 15)));
    }
}
