//! The small bounded pool of connections.
//!
//! Not sqlx's own pool: a `begin()` of it that is cancelled halfway can leave a transaction open on
//! a connection that others then use. Here a connection goes back to the pool only after an
//! operation has ended on it, and is closed otherwise; closing is what rolls back everywhere.
//!
//! # Two pools, and as few connections as will do
//! Calls have one pool, renewals and heartbeats another, so that these never stand behind calls that
//! wait for a lock's row. Each lends the other what lies idle, both ways, and both use the connection
//! that listens while it has nothing to say ([`Ear`]), before they make a new one. While a new one is
//! made, which takes a busy server a good part of a short lease, whoever wants it takes what comes
//! back meanwhile, renewals first; the new one is then for the next. Where the server has no room for
//! a new one, one of ours is waited for: a client that has one connection gets on with that one,
//! however full the server is. What lay idle for a while is closed, but for the last one: others may
//! need the room. Where the caller has a pool of his own, calls that find ours busy borrow from that
//! (`borrowed.rs`), and there are not more of ours than renewals want.
//!
//! A call that is dropped while it waits here has taken nothing; one that is dropped with a connection
//! in its hands closes it.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::ear::{Ear, Lent};
use super::fault;
use super::limits::LIMIT;
use super::wire::{Connect, Wire};
use leasehold_core::kit::locked;

/// How long a goodbye may take: SQLite writes its log back to the file.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long a connection lies idle before it is closed, if it is not the last.
const REST: Duration = Duration::from_secs(3);
/// How long who finds no room at the server waits for one of ours, before it asks for room again.
const ROOM_AGAIN: Duration = Duration::from_millis(100);

/// How long a connection that is being made keeps others from being made.
const ALONE: Duration = Duration::from_millis(250);

/// A connection on which nothing is under way.
struct Resting {
    wire: Box<dyn Wire>,
    since: Instant,
}

type Idle = Mutex<Vec<Resting>>;

/// What the pools of one client share.
struct Common {
    connect: Arc<dyn Connect>,
    /// Of whom calls borrow that find ours busy.
    lender: Option<Arc<dyn Connect>>,
    ear: Arc<Ear>,
    /// How many connections are in somebody's hands.
    lent: AtomicUsize,
    /// How many renewals want one.
    beats: AtomicUsize,
    /// One has come back, for a renewal or for a call.
    for_beats: Notify,
    for_calls: Notify,
    /// Held while connecting: one at a time, unless that takes long. When a server comes back, all its
    /// clients want their connections at once, and making one costs both sides some milliseconds of
    /// hashing the password; meanwhile the first may have come free.
    connecting: Arc<tokio::sync::Mutex<()>>,
}

impl Common {
    /// Tells one of those who want a connection that there is one.
    fn returned(&self) {
        match self.beats.load(Ordering::SeqCst) {
            0 => self.for_calls.notify_one(),
            _ => self.for_beats.notify_one(),
        }
    }

    /// Nothing is under way on it any more.
    fn rests(idle: &Idle, mut wire: Box<dyn Wire>) {
        wire.rests();
        if !wire.is_borrowed() {
            locked(idle).push(Resting { wire, since: Instant::now() });
        }
    }
}

/// At most so many connections.
pub(super) struct Pool {
    common: Arc<Common>,
    idle: Arc<Idle>,
    /// What lies idle in the other pool is as good as a new one, and there already.
    others: Arc<Idle>,
    /// Whether it is for renewals. These ask the connection that listens first, so that others may rest
    /// and be closed.
    is_for_beats: bool,
    size: usize,
    room: Arc<Semaphore>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("room", &self.room).finish_non_exhaustive()
    }
}

/// A connection out of the pool; closed when dropped.
pub(super) struct Pooled {
    pub(super) wire: Box<dyn Wire>,
    /// Whether it was used before, so that the server may have closed it meanwhile.
    pub(super) used: bool,
    /// If it is the one that listens.
    ear: Option<Lent>,
    out: Out,
    doubt: Doubt,
    _room: OwnedSemaphorePermit,
}

/// Counts a connection in somebody's hands, if it is one of ours.
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

/// Counts a renewal that wants a connection.
struct Wanted<'a>(Option<&'a Common>);

impl<'a> Wanted<'a> {
    fn by(pool: &'a Pool) -> Self {
        let common = pool.is_for_beats.then_some(&*pool.common);
        if let Some(common) = common {
            common.beats.fetch_add(1, Ordering::SeqCst);
        }
        Self(common)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        let Some(common) = self.0 else { return };
        // What is there, and was told to a renewal that has what it wants, is for the calls.
        if common.beats.fetch_sub(1, Ordering::SeqCst) == 1 {
            common.for_calls.notify_one();
        }
    }
}

/// A connection that does not come back was found dead, or silent, or was given up for being so. Its
/// like lie idle in both pools: they go with it, so that nobody finds that out one by one.
struct Doubt(Option<[Arc<Idle>; 2]>);

impl Drop for Doubt {
    fn drop(&mut self) {
        self.0.iter().flatten().for_each(|idle| forget(idle));
    }
}

fn forget(idle: &Idle) {
    // Closed after the lock.
    let connections = std::mem::take(&mut *locked(idle));
    drop(connections);
}

impl Pool {
    /// A pool for calls, and one for renewals.
    pub(super) fn pair(
        connect: Arc<dyn Connect>,
        lender: Option<Arc<dyn Connect>>,
        calls: usize,
        beats: usize,
    ) -> (Self, Self) {
        let common = Arc::new(Common {
            connect,
            lender,
            ear: Arc::default(),
            lent: AtomicUsize::new(0),
            beats: AtomicUsize::new(0),
            for_beats: Notify::new(),
            for_calls: Notify::new(),
            connecting: Arc::default(),
        });
        let [of_calls, of_beats] = [Arc::<Idle>::default(), Arc::default()];
        let pool = |idle: &Arc<Idle>, others: &Arc<Idle>, size, is_for_beats| Self {
            common: common.clone(),
            idle: idle.clone(),
            others: others.clone(),
            is_for_beats,
            size,
            room: Arc::new(Semaphore::new(size)),
        };
        (pool(&of_calls, &of_beats, calls, false), pool(&of_beats, &of_calls, beats, true))
    }

    /// The place of the connection that listens.
    pub(super) fn ear(&self) -> &Arc<Ear> {
        &self.common.ear
    }

    /// For how many calls there is room.
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.room.available_permits()
    }

    pub(super) async fn take(&self) -> sqlx::Result<Pooled> {
        let room = self.room.clone().acquire_owned().await;
        let room = room.map_err(|_| sqlx::Error::PoolClosed)?;
        Ok(self.out(self.find().await?, room))
    }

    /// One that lies idle, for somebody who may be stopped with it in his hands: so he leaves room for one
    /// more call, which may be what he waits for.
    pub(super) fn at_rest(&self) -> Option<Pooled> {
        let mut rooms = self.room.clone().try_acquire_many_owned(2).ok()?;
        let room = rooms.split(1)?;
        Some(self.out(self.rested()?, room))
    }

    fn out(&self, (wire, ear, used, out): Found, room: OwnedSemaphorePermit) -> Pooled {
        let doubt = Doubt(Some([self.idle.clone(), self.others.clone()]));
        Pooled { wire, used, ear, out, doubt, _room: room }
    }

    /// One that is there, or one that comes back, or a new one: whichever comes first.
    async fn find(&self) -> sqlx::Result<Found> {
        let until = Instant::now() + LIMIT;
        let _wanted = Wanted::by(self);
        let mut making = None;
        loop {
            let mut returned = pin!(match self.is_for_beats {
                true => self.common.for_beats.notified(),
                false => self.common.for_calls.notified(),
            });
            // Before the look, so that nothing comes back unseen.
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
                    // What there is leads where the URL does not lead any more.
                    if fault::is_changed(&error) {
                        self.forget_idle();
                        self.common.ear.close().await;
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

    /// The last one used is the likeliest to be alive. All have the same favourites, so that the rest
    /// can be closed.
    fn rested(&self) -> Option<Found> {
        let (first, then) = match self.is_for_beats {
            true => (&self.others, &self.idle),
            false => (&self.idle, &self.others),
        };
        let found = locked(first).pop();
        let resting = found.or_else(|| locked(then).pop())?;
        Some((resting.wire, None, true, Out::of(&self.common)))
    }

    async fn borrowed(&self) -> Option<Found> {
        let (wire, lent) = self.common.ear.borrow().await?;
        Some((wire, Some(lent), true, Out::of(&self.common)))
    }

    async fn there(&self) -> Option<Found> {
        if self.is_for_beats
            && let Some(found) = self.borrowed().await
        {
            return Some(found);
        }
        match self.rested() {
            None if !self.is_for_beats => self.borrowed().await,
            found => found,
        }
    }

    fn has_ours(&self) -> bool {
        self.common.lent.load(Ordering::SeqCst) > 0
            || self.common.ear.is_there()
            || !locked(&self.idle).is_empty()
            || !locked(&self.others).is_empty()
    }

    /// A new connection, made by a task of its own: if nobody wants it any more when it is there, it
    /// rests. For a call it is borrowed where there is a lender: one of ours is enough.
    fn make(&self) -> oneshot::Receiver<sqlx::Result<Box<dyn Wire>>> {
        let (mut wanted, made) = oneshot::channel();
        let (common, idle) = (self.common.clone(), self.idle.clone());
        let lender = common.lender.clone().filter(|_| !self.is_for_beats && self.has_ours());
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
            // Whoever accepts and then says nothing must not be waited for for ever.
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

    /// Takes back a connection on which nothing is under way.
    pub(super) fn put(&self, pooled: Pooled) {
        let Pooled { wire, ear, mut doubt, out, .. } = pooled;
        doubt.0 = None;
        match ear {
            Some(ear) => ear.give_back(wire),
            None => Common::rests(&self.idle, wire),
        }
        // After it is there, since this wakes who waits for it.
        drop(out);
    }

    /// Closes what lies idle: one of them does not answer.
    pub(super) fn forget_idle(&self) {
        [&self.idle, &self.others].into_iter().for_each(|idle| forget(idle));
    }

    /// Says goodbye to what has lain idle for a while in either pool, but for the last connection.
    pub(super) async fn trim(&self) {
        for idle in [&self.others, &self.idle] {
            while let Some(wire) = self.too_many(idle) {
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, wire.close()).await;
            }
        }
    }

    fn too_many(&self, idle: &Idle) -> Option<Box<dyn Wire>> {
        let there = usize::from(self.common.ear.is_there())
            + self.common.lent.load(Ordering::SeqCst)
            + locked(&self.idle).len()
            + locked(&self.others).len();
        let mut idle = locked(idle);
        let oldest = idle.first()?;
        (there > 1 && oldest.since.elapsed() >= REST).then(|| idle.remove(0).wire)
    }

    /// Says goodbye on every connection. Those that are just in use are waited for, not for long;
    /// who comes meanwhile or later is served as before.
    pub(super) async fn disconnect(&self) {
        let used = Instant::now() + CLOSE_TIMEOUT;
        while self.room.available_permits() < self.size && Instant::now() < used {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let idle = std::mem::take(&mut *locked(&self.idle));
        for resting in idle {
            // Who does not answer is gone all the same.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, resting.wire.close()).await;
        }
    }
}

/// A connection, the place that it goes back to if it is the one that listens, whether it was used
/// before, and the count of it.
type Found = (Box<dyn Wire>, Option<Lent>, bool, Out);
