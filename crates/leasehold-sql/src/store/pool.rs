//! The bounded pool of connections.
//!
//! This is not sqlx's pool, because a canceled `begin()` of that pool can leave a transaction open
//! on a connection that other calls then use. Here a connection returns to the pool only after an
//! operation has ended on it. Otherwise it is closed, and closing rolls back in every database.
//!
//! # Two pools, with as few connections as possible
//! Calls have one pool, and renewals and heartbeats have another. So renewals never wait for calls
//! that wait for a lock's row. Each pool lends its idle connections to the other. Both use the
//! listening connection while it receives nothing ([`ListeningConnection`]), before they open a new
//! one.
//!
//! On a busy server, opening a connection takes a good part of a short lease. If another connection
//! is returned in the meantime, the waiting task uses that one, and renewals come first. The new
//! connection then serves the next task. If the server has no room for a new connection, the task
//! waits for one of ours. So a client that has one connection can continue with that one, however
//! full the server is.
//!
//! Connections that were idle for a while are closed, except the last one, because other clients
//! may need the room. If the caller has a pool, calls that find our connections busy borrow from
//! that pool (`postgres/borrowed.rs`). In this case, the client opens no more connections than renewals
//! need.
//!
//! A call that is dropped while it waits here has taken nothing. A call that is dropped while it
//! uses a connection closes the connection.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::fault;
use super::limits::LIMIT;
use super::listening_connection::{BorrowPermit, ListeningConnection};
use super::wire::{Connect, Wire};
use leasehold_core::kit::locked;

/// The time limit for disconnecting. SQLite writes its log back to the file when it disconnects.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(4);

/// The idle time after which a connection is closed, unless it is the last one.
const REST: Duration = Duration::from_secs(3);
/// The time that a task waits for one of our connections if the server has no room. After that it
/// tries to open one again.
const ROOM_AGAIN: Duration = Duration::from_millis(100);

/// The maximum time that opening one connection delays opening others.
const ALONE: Duration = Duration::from_millis(250);

/// A connection on which no operation is in progress.
struct Resting {
    wire: Box<dyn Wire>,
    since: Instant,
}

type Idle = Mutex<Vec<Resting>>;

/// The state that both pools of a client share.
struct Common {
    connect: Arc<dyn Connect>,
    /// The source from which calls borrow if our connections are busy.
    lender: Option<Arc<dyn Connect>>,
    listening: Arc<ListeningConnection>,
    /// The number of connections in use.
    lent: AtomicUsize,
    /// The number of renewals that wait for a connection.
    waiting_renewals: AtomicUsize,
    /// Notified when a connection is returned, for renewals and for calls.
    for_renewals: Notify,
    for_calls: Notify,
    /// Held while connecting. Only one connection is opened at a time, unless that takes long.
    /// After a restart of the server, all clients connect at the same time. Each connection costs
    /// both sides some milliseconds for hashing the password. Meanwhile the first connection may
    /// become free again.
    connecting: Arc<tokio::sync::Mutex<()>>,
}

impl Common {
    /// Notifies one waiting task that a connection is available.
    fn returned(&self) {
        match self.waiting_renewals.load(Ordering::SeqCst) {
            0 => self.for_calls.notify_one(),
            _ => self.for_renewals.notify_one(),
        }
    }

    /// Adds a connection on which no operation is in progress to the idle ones. A borrowed
    /// connection returns to its own pool instead.
    fn rests(idle: &Idle, mut wire: Box<dyn Wire>) {
        wire.rests();
        if !wire.is_borrowed() {
            locked(idle).push(Resting { wire, since: Instant::now() });
        }
    }
}

/// A pool with a maximum number of connections.
pub(super) struct Pool {
    common: Arc<Common>,
    idle: Arc<Idle>,
    /// The idle connections of the other pool. They are as good as new ones, and already open.
    others: Arc<Idle>,
    /// Whether the pool is for renewals. Renewals first try the listening connection, so that other
    /// connections stay idle and can be closed.
    is_for_renewals: bool,
    size: usize,
    room: Arc<Semaphore>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("room", &self.room).finish_non_exhaustive()
    }
}

/// A connection that was taken from the pool. It is closed when dropped.
pub(super) struct Pooled {
    pub(super) wire: Box<dyn Wire>,
    /// Whether the connection was used before, so that the server may have closed it since.
    pub(super) used: bool,
    /// Set if this is the listening connection.
    borrow_permit: Option<BorrowPermit>,
    out: Out,
    doubt: Doubt,
    _room: OwnedSemaphorePermit,
}

/// Counts a connection in use, if the connection is the client's own.
struct Out(Option<Arc<Common>>);

impl Out {
    fn of(common: &Arc<Common>) -> Self {
        common.lent.fetch_add(1, Ordering::SeqCst);
        Self(Some(common.clone()))
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        let Some(common) = &self.0 else { return };
        common.lent.fetch_sub(1, Ordering::SeqCst);
        common.returned();
    }
}

/// Counts a renewal that waits for a connection.
struct Wanted<'a>(Option<&'a Common>);

impl<'a> Wanted<'a> {
    fn by(pool: &'a Pool) -> Self {
        let common = pool.is_for_renewals.then_some(&*pool.common);
        if let Some(common) = common {
            common.waiting_renewals.fetch_add(1, Ordering::SeqCst);
        }
        Self(common)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        let Some(common) = self.0 else { return };
        // A connection may have been announced to a renewal that no longer needs it. Calls can use
        // it.
        if common.waiting_renewals.fetch_sub(1, Ordering::SeqCst) == 1 {
            common.for_calls.notify_one();
        }
    }
}

/// Closes all idle connections if a connection in use is not returned, because it was dead or did
/// not answer. The idle connections of both pools lead to the same server, so they are closed
/// together instead of being found dead one by one.
struct Doubt(Option<[Arc<Idle>; 2]>);

impl Drop for Doubt {
    fn drop(&mut self) {
        self.0.iter().flatten().for_each(|idle| forget(idle));
    }
}

fn forget(idle: &Idle) {
    // The connections are closed after the lock is released.
    let connections = std::mem::take(&mut *locked(idle));
    drop(connections);
}

impl Pool {
    /// Returns a pool for calls and a pool for renewals.
    pub(super) fn pair(
        connect: Arc<dyn Connect>,
        lender: Option<Arc<dyn Connect>>,
        calls: usize,
        renewals: usize,
    ) -> (Self, Self) {
        let common = Arc::new(Common {
            connect,
            lender,
            listening: Arc::default(),
            lent: AtomicUsize::new(0),
            waiting_renewals: AtomicUsize::new(0),
            for_renewals: Notify::new(),
            for_calls: Notify::new(),
            connecting: Arc::default(),
        });
        let [of_calls, of_renewals] = [Arc::<Idle>::default(), Arc::default()];
        let pool = |idle: &Arc<Idle>, others: &Arc<Idle>, size, is_for_renewals| Self {
            common: common.clone(),
            idle: idle.clone(),
            others: others.clone(),
            is_for_renewals,
            size,
            room: Arc::new(Semaphore::new(size)),
        };
        (pool(&of_calls, &of_renewals, calls, false), pool(&of_renewals, &of_calls, renewals, true))
    }

    /// Returns the slot of the listening connection.
    pub(super) fn listening(&self) -> &Arc<ListeningConnection> {
        &self.common.listening
    }

    /// Returns the number of further calls for which there is room.
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.room.available_permits()
    }

    pub(super) async fn take(&self) -> sqlx::Result<Pooled> {
        let room = self.room.clone().acquire_owned().await;
        let room = room.map_err(|_| sqlx::Error::PoolClosed)?;
        Ok(self.out(self.find().await?, room))
    }

    fn out(&self, (wire, borrow_permit, used, out): Found, room: OwnedSemaphorePermit) -> Pooled {
        let doubt = Doubt(Some([self.idle.clone(), self.others.clone()]));
        Pooled { wire, used, borrow_permit, out, doubt, _room: room }
    }

    /// Waits for an idle connection, a returned one or a new one, whichever comes first.
    async fn find(&self) -> sqlx::Result<Found> {
        let until = Instant::now() + LIMIT;
        let _wanted = Wanted::by(self);
        let mut making = None;
        loop {
            let mut returned = pin!(match self.is_for_renewals {
                true => self.common.for_renewals.notified(),
                false => self.common.for_calls.notified(),
            });
            // Registers before the check, so that no returned connection is missed.
            returned.as_mut().enable();
            if let Some(found) = self.there().await {
                return Ok(found);
            }
            let made = tokio::select! {
                biased;
                () = &mut returned => continue,
                made = making.get_or_insert_with(|| self.make()) => made,
            };
            making = None;
            let error = match made.unwrap_or(Err(sqlx::Error::PoolClosed)) {
                Ok(wire) => {
                    let out = match wire.is_borrowed() {
                        true => Out(None),
                        false => Out::of(&self.common),
                    };
                    return Ok((wire, None, false, out));
                }
                Err(error) if fault::has_no_room(&error) => error,
                Err(error) => {
                    // The existing connections lead to the old server, not to where the URL leads
                    // now.
                    if fault::is_changed(&error) {
                        self.forget_idle();
                        self.common.listening.close().await;
                    }
                    return Err(error);
                }
            };
            let is_ours = !matches!(error, sqlx::Error::PoolTimedOut);
            if is_ours && !self.has_ours() || Instant::now() >= until {
                return Err(error);
            }
            let _ = tokio::time::timeout(ROOM_AGAIN, returned).await;
        }
    }

    /// Returns the idle connection that was used last. It is the most likely to work. All tasks
    /// prefer the same connections, so the others stay idle and can be closed.
    fn rested(&self) -> Option<Found> {
        let (first, then) = match self.is_for_renewals {
            true => (&self.others, &self.idle),
            false => (&self.idle, &self.others),
        };
        let found = locked(first).pop();
        let resting = found.or_else(|| locked(then).pop())?;
        Some((resting.wire, None, true, Out::of(&self.common)))
    }

    async fn borrowed(&self) -> Option<Found> {
        let (wire, lent) = self.common.listening.borrow().await?;
        Some((wire, Some(lent), true, Out::of(&self.common)))
    }

    async fn there(&self) -> Option<Found> {
        if self.is_for_renewals
            && let Some(found) = self.borrowed().await
        {
            return Some(found);
        }
        match self.rested() {
            None if !self.is_for_renewals => self.borrowed().await,
            found => found,
        }
    }

    fn has_ours(&self) -> bool {
        self.common.lent.load(Ordering::SeqCst) > 0
            || self.common.listening.is_there()
            || !locked(&self.idle).is_empty()
            || !locked(&self.others).is_empty()
    }

    /// Opens a connection in a separate task. If no task wants it any more when it is open, it
    /// becomes idle. Calls borrow instead if there is a lender and we have a connection of our own.
    fn make(&self) -> oneshot::Receiver<sqlx::Result<Box<dyn Wire>>> {
        let (mut wanted, made) = oneshot::channel();
        let (common, idle) = (self.common.clone(), self.idle.clone());
        let lender = common.lender.clone().filter(|_| !self.is_for_renewals && self.has_ours());
        tokio::spawn(async move {
            let alone = async {
                if lender.is_none() {
                    let alone = common.connecting.clone().lock_owned();
                    return tokio::time::timeout(ALONE, alone).await.ok();
                }
                None
            };
            let _alone = tokio::select! {
                alone = alone => alone,
                () = wanted.closed() => return,
            };
            // A server that accepts the connection and then does not answer must not block forever.
            let connect = lender.as_ref().unwrap_or(&common.connect).connect();
            let connected = tokio::time::timeout(LIMIT, connect).await;
            let wire = connected.unwrap_or_else(|_| {
                let what = format!("could not connect within {LIMIT:?}");
                Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, what)))
            });
            if let Err(Ok(wire)) = wanted.send(wire) {
                Common::rests(&idle, wire);
                common.returned();
            }
        });
        made
    }

    /// Takes back a connection on which no operation is in progress.
    pub(super) fn put(&self, pooled: Pooled) {
        let Pooled { wire, borrow_permit, mut doubt, out, .. } = pooled;
        doubt.0 = None;
        match borrow_permit {
            Some(permit) => permit.give_back(wire),
            None => Common::rests(&self.idle, wire),
        }
        // This wakes a waiting task, so the connection must be back in the pool first.
        drop(out);
    }

    /// Closes all idle connections of both pools, for example after one connection did not answer.
    pub(super) fn forget_idle(&self) {
        [&self.idle, &self.others].into_iter().for_each(|idle| forget(idle));
    }

    /// Closes connections that were idle for a while in either pool, except the last connection.
    pub(super) async fn trim(&self) {
        for idle in [&self.others, &self.idle] {
            while let Some(wire) = self.too_many(idle) {
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, wire.close()).await;
            }
        }
    }

    fn too_many(&self, idle: &Idle) -> Option<Box<dyn Wire>> {
        let there = usize::from(self.common.listening.is_there())
            + self.common.lent.load(Ordering::SeqCst)
            + locked(&self.idle).len()
            + locked(&self.others).len();
        let mut idle = locked(idle);
        let oldest = idle.first()?;
        (there > 1 && oldest.since.elapsed() >= REST).then(|| idle.remove(0).wire)
    }

    /// Disconnects all connections of this pool. Connections in use are waited for, up to a time
    /// limit. Tasks that need a connection during this or later are served as usual.
    pub(super) async fn disconnect(&self) {
        let used = Instant::now() + CLOSE_TIMEOUT;
        while self.room.available_permits() < self.size && Instant::now() < used {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let idle = std::mem::take(&mut *locked(&self.idle));
        for resting in idle {
            // A server that does not answer is treated as disconnected.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, resting.wire.close()).await;
        }
    }
}

/// A connection, the slot that it returns to if it is the listening one, whether it was used
/// before, and its count.
type Found = (Box<dyn Wire>, Option<BorrowPermit>, bool, Out);
