//! Watches: one stream for all watches of a client.
//!
//! **Every watch begins at the current revision.** etcd serves a watch that begins at a past
//! revision from a loop that runs every 100 ms. So the client reads *after* a watch is confirmed,
//! and all events after that read are reported. Compaction cannot remove any of them (scenario 84).
//! If etcd cancels a watch, or its connection ends, the watch is marked as broken, and its owner
//! creates another one.
//!
//! **Idle watches.** If clients acquire one lock in turns, each is queued after the same client
//! again and again, whose key is the same each time. So a watch on one key stays idle for a moment
//! before it is canceled. A watch that began before an entry was created has all events since then.
//! Its owner need not read, and etcd need not create a watch. (A watch that is created while etcd
//! has many writes may also be served from that loop. Its first events are up to 100 ms late.)
//!
//! **Whole queues.** Waiters near the front of a mutex need all deletions under its name
//! ([`DeletionLog`]). All waiters of a client share one such watch. It also stays idle for a
//! moment, and has all deletions since it began.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::client::{Client, Connection};
use super::fault::{Failure, unreachable};
use super::predecessors::DeletionLog;
use super::proto::{
    Event, EventKind, WatchCancelRequest, WatchCreateRequest, WatchFilter, WatchOrder,
    WatchRequest, WatchResponse,
};
use super::queue::end_of;

/// The first watch ID of this client. etcd uses the IDs as they are. A proxy that assigns its own
/// IDs begins at 0.
const OURS: i64 = 1 << 32;

/// Maximum number of idle watches. Each costs etcd a message whenever its key is deleted.
const MAX_IDLE: usize = 8;
/// Minimum time for which a watch stays idle. The maximum is twice that.
const IDLE_FOR: Duration = Duration::from_secs(1);

/// The stream of the current connection, which is opened on demand.
#[derive(Debug)]
pub(super) struct Watches {
    client: Arc<Client>,
    live: Mutex<Option<Arc<Stream>>>,
    last_id: AtomicI64,
    idle: Arc<Mutex<AllIdle>>,
}

#[derive(Debug, Default)]
struct AllIdle {
    /// The idle watches on one key, the oldest first.
    all: Vec<Idle>,
    /// The watches on the deletions of a whole queue, in use or idle, by the queue's prefix.
    whole: HashMap<Vec<u8>, QueueWatch>,
    /// Whether there is a task that cancels idle watches.
    tended: bool,
}

/// An idle watch for the deletion of one key, which has no owner.
#[derive(Debug)]
struct Idle {
    key: Vec<u8>,
    watching: Watching,
    since: Instant,
}

/// A watch on a whole queue, which all waiters of a client share.
#[derive(Debug)]
struct QueueWatch {
    watching: Arc<Watching>,
    /// Whether no waiter has requested it since the last check.
    unused: bool,
}

#[derive(Debug)]
struct Stream {
    generation: u64,
    orders: mpsc::UnboundedSender<WatchRequest>,
    /// `None` if the stream has ended.
    watching: Mutex<Option<HashMap<i64, Arc<News>>>>,
}

/// What is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Watched {
    /// A key is written or deleted.
    Key(Vec<u8>),
    /// A key is deleted.
    Deletion(Vec<u8>),
    /// Any key from the first (inclusive) to the second (exclusive) is deleted.
    Deletions(Vec<u8>, Vec<u8>),
    /// Any key from the first (inclusive) to the second (exclusive) is written or deleted.
    All(Vec<u8>, Vec<u8>),
}

/// The events of the watches of one owner.
#[derive(Debug, Default)]
struct WatchState {
    /// How many of the watches etcd has confirmed.
    confirmed: usize,
    /// All events after this revision are reported, once the watches are confirmed.
    began: i64,
    broken: bool,
    latest: UnseenEvents,
    /// The observed deletions. `None` unless a whole queue is watched.
    deletions: Option<DeletionLog>,
    /// The written values. Set if they are needed.
    values: Option<Vec<Vec<u8>>>,
}

/// Events that were not yet reported to the owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnseenEvents {
    /// Whether a key was written.
    pub(super) written: bool,
    /// Whether a key was deleted.
    pub(super) deleted: bool,
    /// The revision of the last event.
    pub(super) revision: i64,
}

#[derive(Debug, Default)]
struct News(watch::Sender<WatchState>);

/// The watches of one owner. Dropping the value cancels them.
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

    /// Returns an idle watch that has, or will have, all events since that revision.
    pub(super) fn idle_since(&self, all: &[Watched], revision: i64) -> Option<Watching> {
        let [Watched::Deletion(key)] = all else { return None };
        let mut idle = locked(&self.idle);
        let has = |i: &Idle| i.key == *key && i.watching.has_all_since(revision);
        let at = idle.all.iter().position(has)?;
        Some(idle.all.remove(at).watching)
    }

    /// Takes back a watch that is currently not needed.
    pub(super) fn put_back(&self, all: &[Watched], watching: Watching) {
        let [Watched::Deletion(key)] = all else { return };
        let mut idle = locked(&self.idle);
        // One idle watch per key is enough.
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

    /// Returns the watch for deletions in the queue with this prefix. It may not be
    /// [confirmed](Watching::confirmed) yet.
    pub(super) async fn watch_deletions(&self, prefix: &[u8]) -> Result<Arc<Watching>, Failure> {
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
        let state = WatchState { deletions: Some(DeletionLog::default()), ..WatchState::default() };
        let watching = Arc::new(self.begin(&connection, &all, state)?);
        let whole = QueueWatch { watching: watching.clone(), unused: false };
        idle.whole.insert(prefix.to_vec(), whole);
        self.have_tended(&mut idle);
        Ok(watching)
    }

    /// Watches all of these from now on. Events before etcd has [confirmed](Watching::confirmed)
    /// the watches are not reported.
    pub(super) async fn watch(&self, all: &[Watched]) -> Result<Watching, Failure> {
        let connection = self.client.connection().await?;
        self.begin(&connection, all, WatchState::default())
    }

    /// Watches the values that are written to the keys from `from` (inclusive) to `end`
    /// (exclusive).
    pub(super) async fn watch_values(
        &self,
        from: Vec<u8>,
        end: Vec<u8>,
    ) -> Result<Watching, Failure> {
        let connection = self.client.connection().await?;
        let state = WatchState { values: Some(Vec::new()), ..WatchState::default() };
        self.begin(&connection, &[Watched::All(from, end)], state)
    }

    fn begin(
        &self,
        connection: &Connection,
        all: &[Watched],
        state: WatchState,
    ) -> Result<Watching, Failure> {
        let stream = self.stream(connection);
        let news = Arc::new(News(watch::Sender::new(state)));
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
        // If the stream has ended, its task notifies the watchers.
        let _ = self.orders.send(WatchRequest { order: Some(order) });
    }
}

impl Watching {
    /// Waits until etcd has confirmed all watches. From then on all events are reported.
    pub(super) async fn confirmed(&self) -> Result<(), Failure> {
        let all = self.ids.len();
        self.news(|h| (h.confirmed >= all).then_some(())).await
    }

    /// Waits for an event since the confirmation.
    pub(super) async fn event(&self) -> Result<UnseenEvents, Failure> {
        self.news(|h| (h.latest.written || h.latest.deleted).then_some(h.latest)).await
    }

    /// Waits for the first deletions in the queue for which the closure returns a result.
    pub(super) async fn until_deletions<T>(
        &self,
        mut check: impl FnMut(&DeletionLog) -> Option<T>,
    ) -> Result<T, Failure> {
        let all = self.ids.len();
        let mut result = |h: &WatchState| h.deletions.as_ref().and_then(&mut check);
        self.news(|h| if h.confirmed >= all { result(h) } else { None }).await
    }

    /// Waits until values were written since the last call, and returns them.
    pub(super) async fn written_values(&self) -> Result<Vec<Vec<u8>>, Failure> {
        let has_values = |h: &WatchState| h.values.as_ref().is_some_and(|v| !v.is_empty());
        self.news(|h| has_values(h).then_some(())).await?;
        let mut taken = Vec::new();
        self.news.update(|h| taken = h.values.as_mut().map(std::mem::take).unwrap_or_default());
        Ok(taken)
    }

    /// Forgets the events so far.
    pub(super) fn clear(&self) {
        self.news.update(|h| (h.latest.written, h.latest.deleted) = (false, false));
    }

    fn is_broken(&self) -> bool {
        self.news.0.borrow().broken
    }

    /// Returns whether the watch has all events since this revision. Marks deletions since then as
    /// not yet reported, because only an earlier owner may have seen them, and all other events as
    /// reported.
    fn has_all_since(&self, revision: i64) -> bool {
        self.news.update(|h| {
            (h.latest.written, h.latest.deleted) = (false, h.latest.revision > revision);
        });
        let state = self.news.0.borrow();
        !state.broken && state.confirmed >= self.ids.len() && state.began <= revision
    }

    async fn news<T>(&self, mut check: impl FnMut(&WatchState) -> Option<T>) -> Result<T, Failure> {
        let mut result = None;
        // `self` owns the sender, so the channel cannot close.
        let _ = self
            .news
            .0
            .subscribe()
            .wait_for(|h| {
                result = if h.broken { Some(Err(ended())) } else { check(h).map(Ok) };
                result.is_some()
            })
            .await;
        result.unwrap_or_else(|| Err(ended()))
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

impl QueueWatch {
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.watching) > 1
    }
}

impl News {
    fn update(&self, change: impl FnOnce(&mut WatchState)) {
        self.0.send_modify(change);
    }
}

/// Cancels watches that have been idle for too long.
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
            // A watch that is refused when it is created means that the stream uses an expired auth
            // token. Requests already use a newer one, but only a new stream will use it as well.
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
        news.update(|h| h.broken = true);
    }
    if let Some(Failure::Token(_)) = failed {
        client.forget_token();
    }
    client.condemn(connection.generation);
}

/// Returns whether a watch was created with an ID that this client did not choose.
fn is_renumbered(response: &WatchResponse) -> bool {
    response.created && !response.canceled && response.watch_id < OURS
}

/// Returns whether the server assigns its own watch IDs, as etcd's `grpc-proxy` does. To find out,
/// it creates a watch on this key, which ends with its stream.
pub(super) async fn renumbers(client: &Client, key: Vec<u8>) -> Result<bool, Failure> {
    let connection = client.connection().await?;
    let (orders, requests) = mpsc::unbounded_channel();
    let create = WatchOrder::Create(Watched::Deletion(key).request(OURS));
    // The receiver still exists, so this cannot fail.
    let _ = orders.send(WatchRequest { order: Some(create) });
    client.count_sent();
    let result = async {
        let path = "/etcdserverpb.Watch/Watch";
        let mut events = client.stream::<_, WatchResponse>(&connection, path, requests).await?;
        while let Some(response) = events.message().await? {
            if response.created {
                return Ok(is_renumbered(&response));
            }
        }
        Err(ended())
    };
    let result = client.in_time(connection.generation, result).await;
    drop(orders);
    result
}

fn take_in(stream: &Stream, response: &WatchResponse) {
    let mut all = locked(&stream.watching);
    let Some(all) = all.as_mut() else { return };
    if response.canceled {
        // If the watch is not registered, this client has canceled it.
        if let Some(news) = all.remove(&response.watch_id) {
            news.update(|h| h.broken = true);
        }
        return;
    }
    let Some(news) = all.get(&response.watch_id) else { return };
    let revision = response.header.as_ref().map_or(i64::MAX, |header| header.revision);
    if response.created {
        news.update(|h| {
            h.confirmed += 1;
            h.began = h.began.max(revision);
            if let Some(deletions) = &mut h.deletions {
                deletions.begin(revision);
            }
        });
    }
    if response.events.is_empty() {
        return;
    }
    let is_deletion = |e: &&Event| e.kind == i32::from(EventKind::Delete);
    let deleted = || response.events.iter().filter(is_deletion);
    let written = || response.events.iter().filter(|event| !is_deletion(event));
    news.update(|h| {
        let latest = &mut h.latest;
        latest.written |= deleted().count() < response.events.len();
        latest.deleted |= deleted().next().is_some();
        latest.revision = latest.revision.max(revision);
        if let Some(kept) = &mut h.values {
            let values = written().filter_map(|event| event.kv.as_ref());
            kept.extend(values.map(|kv| kv.value.clone()));
        }
        if let Some(deletions) = &mut h.deletions {
            // All events of one revision arrive together, so no reader sees only some of them.
            for kv in deleted().filter_map(|event| event.kv.as_ref()) {
                deletions.note(kv.mod_revision, kv.key.clone());
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

    /// Returns one watch on a stream that sends no requests.
    fn one() -> Watching {
        let (orders, _) = mpsc::unbounded_channel();
        let news = Arc::<News>::default();
        let watching = Mutex::new(Some(HashMap::from([(1, news.clone())])));
        let stream = Arc::new(Stream { generation: 0, orders, watching });
        Watching { stream, ids: vec![1], news }
    }

    fn respond(watching: &Watching, revision: i64, created: bool) {
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
    fn idle_watch_is_reused_only_if_it_has_all_events() {
        let watching = one();
        assert!(!watching.has_all_since(20), "an unconfirmed watch has no events");
        respond(&watching, 10, true);
        assert!(!watching.has_all_since(9), "the watch began later");
        assert!(watching.has_all_since(10));
        respond(&watching, 12, false);
        let deleted = || watching.news.0.borrow().latest.deleted;
        assert!(watching.has_all_since(11) && deleted(), "events since revision 11");
        assert!(watching.has_all_since(12) && !deleted(), "events since revision 12");
        assert!(
            watching.has_all_since(11) && deleted(),
            "events since revision 11, after another reader"
        );
        respond(&watching, 13, false);
        watching.news.update(|h| h.broken = true);
        assert!(!watching.has_all_since(12), "a broken watch has no events");
    }
}
