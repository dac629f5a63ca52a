//! Watches: one stream for all that a client watches.
//!
//! Every watch begins at the present: etcd serves one that begins at a past revision from a loop
//! that comes round every 100 ms. So whoever watches reads *after* the watch was confirmed, and
//! whatever happens after that reading is told (scenario 84: there is nothing that a compaction
//! could take from us). A watch that etcd cancels, or whose connection ends, is told as broken, and
//! its owner begins anew.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, mpsc};

use super::client::{Client, Connection};
use super::fault::{Failure, unreachable};
use super::proto::{
    EventKind, WatchCancelRequest, WatchCreateRequest, WatchFilter, WatchOrder, WatchRequest,
    WatchResponse,
};

/// The stream of the current connection, opened when it is first needed.
#[derive(Debug)]
pub(super) struct Watches {
    client: Arc<Client>,
    live: Mutex<Option<Arc<Stream>>>,
    last_id: AtomicI64,
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
}

/// What has happened to what is watched together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Happened {
    /// How many of the watches etcd has confirmed.
    confirmed: usize,
    broken: bool,
    /// Something was written.
    pub(super) written: bool,
    /// Something was deleted.
    pub(super) deleted: bool,
    /// The revision of the last event.
    pub(super) revision: i64,
}

#[derive(Debug, Default)]
struct News {
    happened: Mutex<Happened>,
    wake: Notify,
}

/// Watches of one owner. Dropped, they are cancelled.
#[derive(Debug)]
pub(super) struct Watching {
    stream: Arc<Stream>,
    ids: Vec<i64>,
    news: Arc<News>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs between two consistent states.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watches {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self { client, live: Mutex::new(None), last_id: AtomicI64::new(0) }
    }

    /// Watches all of these from now on; what happened before etcd has
    /// [confirmed](Watching::confirmed) them is not told.
    pub(super) async fn watch(&self, all: &[Watched]) -> Result<Watching, Failure> {
        let connection = self.client.connection().await?;
        let stream = self.stream(&connection);
        let news = Arc::<News>::default();
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
            Self::Deletions(from, to) => (from.clone(), to.clone()),
        };
        let filters = match self {
            Self::Key(_) => Vec::new(),
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
        self.client_news(|h| h.confirmed >= all).await.map(drop)
    }

    /// Resolves when something happened since it was confirmed.
    pub(super) async fn happened(&self) -> Result<Happened, Failure> {
        self.client_news(|h| h.written || h.deleted).await
    }

    /// Forgets what has happened so far.
    pub(super) fn clear(&self) {
        let mut happened = locked(&self.news.happened);
        (happened.written, happened.deleted) = (false, false);
    }

    async fn client_news(&self, enough: impl Fn(&Happened) -> bool) -> Result<Happened, Failure> {
        loop {
            {
                let happened = *locked(&self.news.happened);
                if happened.broken {
                    return Err(ended());
                }
                if enough(&happened) {
                    return Ok(happened);
                }
            }
            self.news.wake.notified().await;
        }
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

impl News {
    fn tell(&self, change: impl FnOnce(&mut Happened)) {
        change(&mut locked(&self.happened));
        self.wake.notify_one();
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
            take_in(&stream, &response);
            // Refused as it was to begin: the stream was opened with a token of our user that has
            // ended since. Requests have a new one by now, and only a new stream will have it too.
            if response.canceled && response.created {
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
    if response.created {
        news.tell(|h| h.confirmed += 1);
    }
    if response.events.is_empty() {
        return;
    }
    let is = |kind: EventKind| response.events.iter().any(|e| e.kind == i32::from(kind));
    let revision = response.header.as_ref().map_or(0, |header| header.revision);
    news.tell(|h| {
        h.written |= is(EventKind::Put);
        h.deleted |= is(EventKind::Delete);
        h.revision = h.revision.max(revision);
    });
}

impl Drop for Watches {
    fn drop(&mut self) {
        if let Some(stream) = locked(&self.live).take() {
            self.client.condemn(stream.generation);
        }
    }
}
