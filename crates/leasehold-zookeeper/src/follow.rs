//! Following a lock's queue: one watch of all that happens under the lock's node, begun by the first claim
//! that waits there, for all of this client's. Who joins in a queue that is followed sends the creation and
//! nothing else, and whose turn it is knows by the news of a departure: a hand-over is a deletion and an
//! event. Why the picture is to be believed is in [`picture`](super::picture).
//!
//! # In which order
//! The watch is asked for just before the listing, in one breath, and the server tells what happens in the
//! order in which it happens, before it answers with what comes of it. So each creation and each
//! departure is in the listing or in the news after it. A claim counts its own creation among the news,
//! and waits for it rather than for its answer.
//!
//! # What if
//! - *the connection breaks*: the driver sets watches of this kind no more, but says so between the news
//!   before and after. Nothing is known from there on until the queue is watched and listed anew;
//!   whose turn came meanwhile is told then, and who is not there any more is told to ask. A join that
//!   is under way waits for its own creation to be known, and lists for itself if it is not, in a second;
//! - *the session ends, the lock's node goes, or the picture becomes unclear*: it is followed no longer,
//!   and who waits is told to ask; the heartbeat then begins anew;
//! - *news of a departure never comes*: a waiter waits on until its heartbeat, which finds that the lock's
//!   node has changed, lists the queue. Of a child that is closed to us no news would come, so where one
//!   is listed the queue is not followed; one that comes later leaves a gap;
//! - *the caller's future is dropped*: all of this is in tasks of the client's own. The only future of the
//!   driver's that is dropped is that of a watch's next event, which loses none.
//!
//! # How many hear of a turn
//! Each who follows hears of all who come and go. So only those begin who have few before them, and who
//! waits no longer goes on only for as many turns of others, or two seconds. Others watch who is in
//! their way ([`stand`](super::stand)).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};
use zookeeper_client::{AddWatchMode, Error as Fault, EventType, PersistentWatcher, WatchedEvent};

use super::claims::{Listening, Standing};
use super::fault::explain;
use super::followed::Followed;
use super::join::Verdict;
use super::picture::{News, Picture};
use super::session::{Answer, Session, Watching};
use super::shared::Shared;
use super::together::{READ_TOGETHER, all_of};
use leasehold_core::store::{Joined, Mode};
use leasehold_core::{Claim, ErrorKind, Moment, Result};

/// Who has more than so many before it does not begin to follow a queue.
const NEAR: usize = 16;
/// So much news of others is heard out after the last use.
const NEWS: u32 = 2 * NEAR as u32;
/// And for so long.
const LINGER: Duration = Duration::from_secs(2);
/// Between two connections that break at once.
const PAUSE: Duration = Duration::from_millis(50);

/// What a piece of news means for who follows.
enum Heard {
    Known,
    /// Some news may be missing: the queue is to be listed.
    Broken,
    /// It cannot be followed.
    Over,
}

/// Follows a queue for as long as somebody uses it.
async fn follow(
    shared: Weak<Shared>,
    session: Weak<Session>,
    lock: String,
    followed: Arc<Followed>,
    _watching: Watching,
) {
    while let Some(mut watcher) = begin(&shared, &session, &lock, &followed).await {
        if let Heard::Over = keep(&shared, &session, &lock, &followed, &mut watcher).await {
            break;
        }
    }
    if let Some(shared) = shared.upgrade() {
        shared.follows.end(&lock, &followed);
        shared.claims.ask_unless(&followed.open, |_| false);
    }
}

/// Watches and lists the queue; `None` if that cannot be.
async fn begin(
    shared: &Weak<Shared>,
    session: &Weak<Session>,
    lock: &str,
    followed: &Arc<Followed>,
) -> Option<PersistentWatcher> {
    loop {
        let (shared, session) = (shared.upgrade()?, session.upgrade()?);
        match shared.watch_and_list(&session, lock).await {
            Ok((watcher, picture)) => {
                let picture = picture?;
                if shared.is_closed(&session, lock, &picture).await {
                    return None;
                }
                shared.show(&session, followed, picture);
                return Some(watcher);
            }
            Err(fault) => {
                let unreachable = explain(fault, lock).kind() == ErrorKind::Unreachable;
                if !unreachable || session.is_over() {
                    return None;
                }
            }
        }
        sleep(PAUSE).await;
    }
}

/// Takes in the news until there is none to be had, or nobody has use for it.
async fn keep(
    shared: &Weak<Shared>,
    session: &Weak<Session>,
    lock: &str,
    followed: &Arc<Followed>,
    watcher: &mut PersistentWatcher,
) -> Heard {
    let (mut idle, mut used) = (0, Instant::now());
    loop {
        let event = timeout(LINGER, watcher.changed()).await;
        let (Some(shared), Some(session)) = (shared.upgrade(), session.upgrade()) else {
            return Heard::Over;
        };
        if let Ok(event) = event {
            match shared.hear(&session, lock, followed, &event) {
                Heard::Known => {}
                ended => return ended,
            }
        }
        if followed.is_used() {
            (idle, used) = (0, Instant::now());
            continue;
        }
        idle += 1;
        if idle > NEWS || used.elapsed() >= LINGER {
            return Heard::Over;
        }
    }
}

impl Shared {
    /// Stands in a queue that is followed, or that is to be since so few are before it. `None` if it is
    /// not known how it stands.
    pub(super) async fn wait_in(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        started: Moment,
        standing: &Standing,
        ahead: usize,
    ) -> Option<Result<Joined>> {
        let lock = &standing.lock;
        let followed = match self.follows.of(session.id(), lock) {
            Some(followed) => followed,
            None if ahead > NEAR => return None,
            None => self.begin_to_follow(session, lock),
        };
        self.stand_in(session, claim, Mode::Wait, started, standing, &followed).await
    }

    fn begin_to_follow(self: &Arc<Self>, session: &Arc<Session>, lock: &str) -> Arc<Followed> {
        let (followed, begun) = self.follows.begin(session.id(), lock);
        if begun {
            let (shared, of) = (Arc::downgrade(self), Arc::downgrade(session));
            let watching = session.watching();
            self.runtime.spawn(follow(shared, of, lock.to_owned(), followed.clone(), watching));
        }
        followed
    }

    /// What becomes of a child in a queue that is followed; `None` if that is not known.
    pub(super) async fn stand_in(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        standing: &Standing,
        followed: &Followed,
    ) -> Option<Result<Joined>> {
        if !followed.knows(standing.sequence).await {
            return None;
        }
        let judged = {
            let picture = followed.picture();
            let judged = self.judge(claim, mode, &standing.node, &picture.as_ref()?.children);
            // Before the next piece of news, which may be that of its turn.
            if let Ok(Verdict::Waits(stand)) = &judged {
                self.claims.waits(claim, stand.ahead, started);
                self.claims.listens(claim.id, Listening::Queue(followed.open.clone()));
            }
            judged
        };
        Some(match judged {
            Ok(verdict) => self.answer(session, claim, started, standing, verdict).await,
            Err(error) => Err(error),
        })
    }

    /// The watch, and the queue as it is from there on; no queue where it cannot be followed.
    async fn watch_and_list(
        &self,
        session: &Session,
        lock: &str,
    ) -> Answer<(PersistentWatcher, Option<Picture>)> {
        let (watcher, (names, stat)) = session
            .read(|c| async {
                // Requests go out in the order of these lines.
                let watch = c.watch(lock, AddWatchMode::PersistentRecursive);
                let list = c.get_children(lock);
                match tokio::join!(watch, list) {
                    (Ok(watcher), Ok(listed)) => Ok((watcher, listed)),
                    (Err(fault), _) | (_, Err(fault)) => Err(fault),
                }
            })
            .await?;
        // It counts what came and what went; what came is what numbers are drawn from.
        let next = (i64::from(stat.cversion) + i64::from(stat.num_children)) / 2;
        let children = self.order(lock, names).ok();
        let picture = children.and_then(|all| Picture::new(self.naming(), all, next).ok());
        Ok((watcher, picture))
    }

    /// Whether somebody stands there whom we may not read: nobody would tell us when he goes.
    async fn is_closed(&self, session: &Session, lock: &str, picture: &Picture) -> bool {
        let nodes = picture.children.nodes().iter();
        let paths: Vec<String> = nodes.map(|node| format!("{lock}/{}", node.name)).collect();
        for some in paths.chunks(READ_TOGETHER) {
            let read = session.read(|c| async {
                Ok(all_of(some.iter().map(|path| c.get_data(path)).collect()).await)
            });
            if read.await.is_ok_and(|read| read.iter().any(|r| matches!(r, Err(Fault::NoAuth)))) {
                return true;
            }
        }
        false
    }

    /// The queue as it was listed: whose turn has come, and who is not there any more, is told.
    fn show(&self, session: &Session, followed: &Followed, picture: Picture) {
        let mut shown = followed.picture();
        let picture = shown.insert(picture);
        let places = picture.children.places();
        self.claims.ask_unless(&followed.open, |node| places.of(node).is_some());
        self.tell_turns(session, followed, picture);
        drop(shown);
        followed.tell();
    }

    /// Takes in one event, and tells those whom it concerns.
    fn hear(
        &self,
        session: &Session,
        lock: &str,
        followed: &Followed,
        event: &WatchedEvent,
    ) -> Heard {
        let child = event.path.strip_prefix(lock).and_then(|rest| rest.strip_prefix('/'));
        let news = match (event.event_type, child) {
            (EventType::Session, _) => {
                *followed.picture() = None;
                return Heard::Broken;
            }
            (EventType::NodeDeleted, None) => return Heard::Over,
            (EventType::NodeCreated, Some(name)) => News::Came(name),
            (EventType::NodeDeleted, Some(name)) => News::Went(name),
            _ => return Heard::Known,
        };
        let mut picture = followed.picture();
        let Some(known) = picture.as_mut() else { return Heard::Broken };
        if known.hear(news).is_err() {
            return Heard::Over;
        }
        if let News::Went(name) = news
            && let Some(id) = self.claim_of(name)
        {
            self.claims.gone(id, name, &followed.open);
        }
        self.tell_turns(session, followed, known);
        drop(picture);
        followed.tell();
        Heard::Known
    }

    fn tell_turns(&self, session: &Session, followed: &Followed, picture: &mut Picture) {
        let certain = session.certain_until();
        for node in picture.newly_granted() {
            if let Some(id) = node.id(self.naming()) {
                self.claims.turn_of(id, &node.name, &followed.open, certain);
            }
        }
    }
}
