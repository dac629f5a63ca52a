//! Watches: one stream for all that a client watches.
//!
//! Every watch begins at the present: etcd serves one that begins at a past revision from a loop
//! that comes round every 100 ms. So whoever watches reads *after* the watch was confirmed, and
//! whatever happens after that reading is told (scenario 84: there is nothing that a compaction
//! could take from us). A watch that etcd cancels, or whose connection ends, is told as broken, and
//! its owner begins anew.
//!
//! Where many want one lock by turns, each stands behind the same one again and again, whose key is
//! the same again. So a watch on one key lies idle for a moment before it is cancelled. One that began
//! before a place was made has seen all that happened since: its owner need not read, and etcd does not
//! have to begin anything. (A watch that begins while etcd writes much may be served from that loop,
//! too: its first news are up to 100 ms late.)
//!
//! Those who wait for a mutex near its front need all deletions under its name ([`Departures`]), and all of
//! a client have one watch for that. It lies idle in the same way, whole from where it began.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::client::{Client, Connection};
use super::fault::{Failure, unreachable};
use super::front::Departures;
use super::proto::{
    Event, EventKind, WatchCancelRequest, WatchCreateRequest, WatchFilter, WatchOrder,
    WatchRequest, WatchResponse,
};
use super::queue::end_of;

/// Our numbers begin here. etcd takes them as they are; a proxy that numbers watches itself begins at 0.
const OURS: i64 = 1 << 32;

/// How many watches lie idle at most: each costs etcd a message whenever its key is deleted.
const MAX_IDLE: usize = 8;
/// How long one lies idle at least, and at most twice as long.
const IDLE_FOR: Duration = Duration::from_secs(1);

/// The stream of the current connection, opened when it is first needed.
#[derive(Debug)]
pub(super) struct Watches {
    client: Arc<Client>,
    live: Mutex<Option<Arc<Stream>>>,
    last_id: AtomicI64,
    idle: Arc<Mutex<AllIdle>>,
}

#[derive(Debug, Default)]
struct AllIdle {
    /// The one that lies longest is the first.
    all: Vec<Idle>,
    /// Those that tell what leaves a whole queue, in use or idle, by the queue's prefix.
    whole: HashMap<Vec<u8>, Whole>,
    /// A task is there that cancels them in the end.
    tended: bool,
}

/// A watch for the deletion of one key, which nobody owns.
#[derive(Debug)]
struct Idle {
    key: Vec<u8>,
    watching: Watching,
    since: Instant,
}

/// A watch of a whole queue, which all of a client have in common.
#[derive(Debug)]
struct Whole {
    watching: Arc<Watching>,
    /// Nobody has wanted it since it was last looked at.
    unused: bool,
}

#[derive(Debug)]
struct Stream {
    generation: u64,
    orders: mpsc::UnboundedSender<WatchRequest>,
    /// `None`: the stream has ended.
    watching: Mutex<Option<HashMap<i64, Arc<News>>>>,
}

/// What is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Watched {
    /// That a key is written or deleted.
    Key(Vec<u8>),
    /// That a key is deleted.
    Deletion(Vec<u8>),
    /// That any key is deleted from this to before that.
    Deletions(Vec<u8>, Vec<u8>),
    /// That any key is written or deleted from this to before that.
    All(Vec<u8>, Vec<u8>),
}

/// What has happened to what is watched together.
#[derive(Debug, Default)]
struct Happened {
    /// How many of the watches etcd has confirmed.
    confirmed: usize,
    /// All that has happened since this revision is told, once they are confirmed.
    began: i64,
    broken: bool,
    latest: Latest,
    /// Kept where a whole queue is watched.
    departures: Option<Departures>,
    /// Kept where it matters what is written.
    said: Option<Vec<Vec<u8>>>,
}

/// What an owner was not told before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Latest {
    /// Something was written.
    pub(super) written: bool,
    /// Something was deleted.
    pub(super) deleted: bool,
    /// The revision of the last event.
    pub(super) revision: i64,
}

#[derive(Debug, Default)]
struct News(watch::Sender<Happened>);

/// Watches of one owner. Dropped, they are cancelled.
#[derive(Debug)]
pub(super) struct Watching {
    stream: Arc<Stream>,
    ids: Vec<i64>,
    news: Arc<News>,
}

impl Watches {
    pub(super) fn new(client: Arc<Client>) -> Self {
        let (live, last_id, idle) = (Mutex::new(None), AtomicI64::new(OURS), Arc::default());
        Self { client, live, last_id, idle }
    }

    /// An idle watch that tells, or will tell, all that has happened to this since that revision.
    pub(super) fn idle_since(&self, all: &[Watched], revision: i64) -> Option<Watching> {
        let [Watched::Deletion(key)] = all else { return None };
        let mut idle = locked(&self.idle);
        let has = |i: &Idle| i.key == *key && i.watching.has_all_since(revision);
        let at = idle.all.iter().position(has)?;
        Some(idle.all.remove(at).watching)
    }

    /// Takes back a watch that nobody needs just now.
    pub(super) fn put_back(&self, all: &[Watched], watching: Watching) {
        let [Watched::Deletion(key)] = all else { return };
        let mut idle = locked(&self.idle);
        // Nobody needs two.
        idle.all.retain(|i| i.key != *key);
        if idle.all.len() >= MAX_IDLE {
            idle.all.remove(0);
        }
        idle.all.push(Idle { key: key.clone(), watching, since: Instant::now() });
        self.have_tended(&mut idle);
    }

    fn have_tended(&self, idle: &mut AllIdle) {
        if !std::mem::replace(&mut idle.tended, true) {
            self.client.runtime().spawn(tend(Arc::downgrade(&self.idle)));
        }
    }

    /// The watch of what leaves the queue with this prefix, [confirmed](Watching::confirmed) or not.
    pub(super) async fn departures(&self, prefix: &[u8]) -> Result<Arc<Watching>, Failure> {
        let connection = self.client.connection().await?;
        let mut idle = locked(&self.idle);
        if let Some(whole) = idle.whole.get_mut(prefix)
            && !whole.watching.is_broken()
        {
            whole.unused = false;
            return Ok(whole.watching.clone());
        }
        if idle.whole.len() >= MAX_IDLE {
            idle.whole.retain(|_, whole| whole.is_in_use());
        }
        let all = [Watched::Deletions(prefix.to_vec(), end_of(prefix))];
        let happened = Happened { departures: Some(Departures::default()), ..Happened::default() };
        let watching = Arc::new(self.begin(&connection, &all, happened)?);
        idle.whole.insert(prefix.to_vec(), Whole { watching: watching.clone(), unused: false });
        self.have_tended(&mut idle);
        Ok(watching)
    }

    /// Watches all of these from now on; what happened before etcd has
    /// [confirmed](Watching::confirmed) them is not told.
    pub(super) async fn watch(&self, all: &[Watched]) -> Result<Watching, Failure> {
        let connection = self.client.connection().await?;
        self.begin(&connection, all, Happened::default())
    }

    /// Watches what is written into the keys from this to before that.
    pub(super) async fn saying(&self, from: Vec<u8>, end: Vec<u8>) -> Result<Watching, Failure> {
        let connection = self.client.connection().await?;
        let happened = Happened { said: Some(Vec::new()), ..Happened::default() };
        self.begin(&connection, &[Watched::All(from, end)], happened)
    }

    fn begin(
        &self,
        connection: &Connection,
        all: &[Watched],
        happened: Happened,
    ) -> Result<Watching, Failure> {
        let stream = self.stream(connection);
        let news = Arc::new(News(watch::Sender::new(happened)));
        let first =
            self.last_id.fetch_add(i64::try_from(all.len()).unwrap_or(1), Ordering::Relaxed);
        let ids: Vec<i64> = (first + 1..).take(all.len()).collect();
        let watching = Watching { stream, ids, news };
        {
            let mut others = locked(&watching.stream.watching);
            let Some(others) = others.as_mut() else { return Err(ended()) };
            for (id, watched) in watching.ids.iter().zip(all) {
                others.insert(*id, watching.news.clone());
                watching.stream.send(WatchOrder::Create(watched.request(*id)));
                self.client.count_sent();
            }
        }
        Ok(watching)
    }

    fn stream(&self, connection: &Connection) -> Arc<Stream> {
        let mut live = locked(&self.live);
        let usable = live.as_ref().filter(|stream| {
            stream.generation == connection.generation && locked(&stream.watching).is_some()
        });
        if let Some(stream) = usable {
            return stream.clone();
        }
        let (orders, requests) = mpsc::unbounded_channel();
        let watching = Mutex::new(Some(HashMap::new()));
        let stream = Arc::new(Stream { generation: connection.generation, orders, watching });
        let serving = serve(self.client.clone(), connection.clone(), stream.clone(), requests);
        self.client.runtime().spawn(serving);
        *live = Some(stream.clone());
        stream
    }
}

impl Watched {
    fn request(&self, watch_id: i64) -> WatchCreateRequest {
        let (key, range_end) = match self {
            Self::Key(key) | Self::Deletion(key) => (key.clone(), Vec::new()),
            Self::Deletions(from, to) | Self::All(from, to) => (from.clone(), to.clone()),
        };
        let filters = match self {
            Self::Key(_) | Self::All(..) => Vec::new(),
            Self::Deletion(_) | Self::Deletions(..) => vec![i32::from(WatchFilter::NoPut)],
        };
        WatchCreateRequest { key, range_end, filters, watch_id }
    }
}

impl Stream {
    fn send(&self, order: WatchOrder) {
        // A stream that has ended tells its watchers so itself.
        let _ = self.orders.send(WatchRequest { order: Some(order) });
    }
}

impl Watching {
    /// Resolves when etcd has confirmed all: what happens from here on is told.
    pub(super) async fn confirmed(&self) -> Result<(), Failure> {
        let all = self.ids.len();
        self.news(|h| (h.confirmed >= all).then_some(())).await
    }

    /// Resolves when something happened since it was confirmed.
    pub(super) async fn happened(&self) -> Result<Latest, Failure> {
        self.news(|h| (h.latest.written || h.latest.deleted).then_some(h.latest)).await
    }

    /// Resolves when this tells something of what has left the queue.
    pub(super) async fn departed<T>(
        &self,
        mut tells: impl FnMut(&Departures) -> Option<T>,
    ) -> Result<T, Failure> {
        let all = self.ids.len();
        let mut told = |h: &Happened| h.departures.as_ref().and_then(&mut tells);
        self.news(|h| if h.confirmed >= all { told(h) } else { None }).await
    }

    /// What was written since this was last asked, as soon as there is some.
    pub(super) async fn said(&self) -> Result<Vec<Vec<u8>>, Failure> {
        self.news(|h| h.said.as_ref().is_some_and(|said| !said.is_empty()).then_some(())).await?;
        let mut taken = Vec::new();
        self.news.tell(|h| taken = h.said.as_mut().map(std::mem::take).unwrap_or_default());
        Ok(taken)
    }

    /// Forgets what has happened so far.
    pub(super) fn clear(&self) {
        self.news.tell(|h| (h.latest.written, h.latest.deleted) = (false, false));
    }

    fn is_broken(&self) -> bool {
        self.news.0.borrow().broken
    }

    /// Whether it tells all that has happened since this revision. It tells anew what an owner before
    /// may have heard already, and nothing that is older.
    fn has_all_since(&self, revision: i64) -> bool {
        self.news.tell(|h| {
            (h.latest.written, h.latest.deleted) = (false, h.latest.revision > revision);
        });
        let happened = self.news.0.borrow();
        !happened.broken && happened.confirmed >= self.ids.len() && happened.began <= revision
    }

    async fn news<T>(&self, mut tells: impl FnMut(&Happened) -> Option<T>) -> Result<T, Failure> {
        let mut told = None;
        // It has no end: the sender is ours.
        let _ = self
            .news
            .0
            .subscribe()
            .wait_for(|h| {
                told = if h.broken { Some(Err(ended())) } else { tells(h).map(Ok) };
                told.is_some()
            })
            .await;
        told.unwrap_or_else(|| Err(ended()))
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut all = locked(&self.stream.watching);
        let Some(all) = all.as_mut() else { return };
        for id in &self.ids {
            if all.remove(id).is_some() {
                self.stream.send(WatchOrder::Cancel(WatchCancelRequest { watch_id: *id }));
            }
        }
    }
}

impl Whole {
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.watching) > 1
    }
}

impl News {
    fn tell(&self, change: impl FnOnce(&mut Happened)) {
        self.0.send_modify(change);
    }
}

/// Cancels what lay idle for long.
async fn tend(idle: Weak<Mutex<AllIdle>>) {
    loop {
        tokio::time::sleep(IDLE_FOR).await;
        let Some(idle) = idle.upgrade() else { return };
        let mut idle = locked(&idle);
        idle.all.retain(|i| i.since.elapsed() < IDLE_FOR);
        idle.whole
            .retain(|_, whole| whole.is_in_use() || !std::mem::replace(&mut whole.unused, true));
        if idle.all.is_empty() && idle.whole.is_empty() {
            idle.tended = false;
            return;
        }
    }
}

fn ended() -> Failure {
    Failure::Passing(unreachable("a watch was cancelled".into()))
}

async fn serve(
    client: Arc<Client>,
    connection: Connection,
    stream: Arc<Stream>,
    requests: mpsc::UnboundedReceiver<WatchRequest>,
) {
    let events = async {
        let path = "/etcdserverpb.Watch/Watch";
        let mut events = client.stream(&connection, path, requests).await?;
        while let Some(response) = events.message().await? {
            client.has_answered();
            if is_renumbered(&response) {
                return Err(Failure::Passing(unreachable("the member is a proxy".into())));
            }
            take_in(&stream, &response);
            // Refused as it was to begin: the stream was opened with a token of our user that has
            // ended since. Requests have a new one by now, and only a new stream will have it too.
            if response.canceled && response.created {
                client.forget_no_users();
                break;
            }
        }
        Err::<(), Failure>(ended())
    };
    let failed = tokio::select! {
        failed = events => failed.err(),
        () = client.condemned(connection.generation) => None,
    };
    let all = locked(&stream.watching).take();
    for news in all.unwrap_or_default().into_values() {
        news.tell(|h| h.broken = true);
    }
    if let Some(Failure::Token(_)) = failed {
        client.forget_token();
    }
    client.condemn(connection.generation);
}

/// Whether a watch was begun under a number that we did not choose.
fn is_renumbered(response: &WatchResponse) -> bool {
    response.created && !response.canceled && response.watch_id < OURS
}

/// Whether who answers here numbers watches itself: etcd's `grpc-proxy` does. A watch is begun on this key
/// to see it, and ends with its stream.
pub(super) async fn renumbers(client: &Client, key: Vec<u8>) -> Result<bool, Failure> {
    let connection = client.connection().await?;
    let (orders, requests) = mpsc::unbounded_channel();
    let create = WatchOrder::Create(Watched::Deletion(key).request(OURS));
    // Its other end is here.
    let _ = orders.send(WatchRequest { order: Some(create) });
    client.count_sent();
    let told = async {
        let path = "/etcdserverpb.Watch/Watch";
        let mut events = client.stream::<_, WatchResponse>(&connection, path, requests).await?;
        while let Some(response) = events.message().await? {
            if response.created {
                return Ok(is_renumbered(&response));
            }
        }
        Err(ended())
    };
    let told = client.in_time(connection.generation, told).await;
    drop(orders);
    told
}

fn take_in(stream: &Stream, response: &WatchResponse) {
    let mut all = locked(&stream.watching);
    let Some(all) = all.as_mut() else { return };
    if response.canceled {
        // Else it was cancelled by us.
        if let Some(news) = all.remove(&response.watch_id) {
            news.tell(|h| h.broken = true);
        }
        return;
    }
    let Some(news) = all.get(&response.watch_id) else { return };
    let revision = response.header.as_ref().map_or(i64::MAX, |header| header.revision);
    if response.created {
        news.tell(|h| {
            h.confirmed += 1;
            h.began = h.began.max(revision);
            if let Some(departures) = &mut h.departures {
                departures.begin(revision);
            }
        });
    }
    if response.events.is_empty() {
        return;
    }
    let is_deletion = |e: &&Event| e.kind == i32::from(EventKind::Delete);
    let deleted = || response.events.iter().filter(is_deletion);
    let written = || response.events.iter().filter(|event| !is_deletion(event));
    news.tell(|h| {
        let latest = &mut h.latest;
        latest.written |= deleted().count() < response.events.len();
        latest.deleted |= deleted().next().is_some();
        latest.revision = latest.revision.max(revision);
        if let Some(said) = &mut h.said {
            let values = written().filter_map(|event| event.kv.as_ref());
            said.extend(values.map(|kv| kv.value.clone()));
        }
        if let Some(departures) = &mut h.departures {
            // All of one revision come together, so nobody looks in between.
            for kv in deleted().filter_map(|event| event.kv.as_ref()) {
                departures.note(kv.mod_revision, kv.key.clone());
            }
        }
    });
}

impl Drop for Watches {
    fn drop(&mut self) {
        if let Some(stream) = locked(&self.live).take() {
            self.client.condemn(stream.generation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::Header;
    use super::*;

    /// One watch on a stream of which nothing is sent.
    fn one() -> Watching {
        let (orders, _) = mpsc::unbounded_channel();
        let news = Arc::<News>::default();
        let watching = Mutex::new(Some(HashMap::from([(1, news.clone())])));
        let stream = Arc::new(Stream { generation: 0, orders, watching });
        Watching { stream, ids: vec![1], news }
    }

    fn told(watching: &Watching, revision: i64, created: bool) {
        let header = Some(Header { revision, ..Header::default() });
        let deletion = Event { kind: EventKind::Delete.into(), ..Event::default() };
        let events = if created { Vec::new() } else { vec![deletion] };
        let watch_id = 1;
        take_in(
            &watching.stream,
            &WatchResponse { header, watch_id, created, events, ..WatchResponse::default() },
        );
    }

    #[test]
    fn an_idle_watch_serves_only_whom_it_can_tell_everything() {
        let watching = one();
        assert!(!watching.has_all_since(20), "not confirmed");
        told(&watching, 10, true);
        assert!(!watching.has_all_since(9), "it began later");
        assert!(watching.has_all_since(10));
        told(&watching, 12, false);
        let deleted = || watching.news.0.borrow().latest.deleted;
        assert!(watching.has_all_since(11) && deleted(), "that one's news");
        assert!(watching.has_all_since(12) && !deleted(), "an earlier one's");
        assert!(watching.has_all_since(11) && deleted(), "that one's, though another has heard it");
        told(&watching, 13, false);
        watching.news.tell(|h| h.broken = true);
        assert!(!watching.has_all_since(12), "broken");
    }
}
