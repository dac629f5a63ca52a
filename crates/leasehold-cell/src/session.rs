//! The session of this client: a cell that proves that the client lives, to which all its claims
//! refer.
//!
//! The cell expires by the system's own clock unless it is renewed. So the cell alone decides
//! whether a client is alive, and a client that reads it once (a `--try` from cron) knows as much
//! as one that polls all the time.
//!
//! # Guaranteed lifetime
//! A renewal that was sent at `t` and answered has restarted the cell's lifetime at `t` or later.
//! So the cell exists at least until `t` plus its lifetime, minus the grain of the system's clock,
//! minus the possible drift between two clocks in that time. No hold is promised beyond that time.
//!
//! An ID is used for one cell only, which is created once. So a cell that was renewed has existed
//! all along, and a cell that is gone never reappears. A late renewal only makes the cell live
//! longer. A late creation of an abandoned session is harmless, because no claim refers to it.
//!
//! If a renewal is a write, it is refused unless the cell has the version that was read. After a
//! lost reply the version has changed, but the cell is still ours. The client then reads the cell
//! and renews it again.
//!
//! *After the guaranteed lifetime* the session has ended for this client. The client no longer
//! renews it even if the cell still exists, because the system may be about to remove it.
//!
//! *A stale read* does not prove that a session is gone. A client that finds a session missing
//! creates a marker in its place, which is refused if the session exists. After the marker no
//! renewal succeeds.
//!
//! *One assumption* is that the system uses the current time when it processes a renewal. A server
//! that was paused may set a cell's expiry before it has read its own clock. So a slow reply proves
//! nothing, and the renewal is repeated.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::{drift, locked};
use leasehold_core::{ClaimId, Clock, Error, ErrorKind, Moment, Result};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use crate::cells::{Answer, Cells, Message, Request, Version};
use crate::text::SESSION;

/// Maximum number of attempts to create a session.
const CREATIONS: u32 = 3;

/// The lifetimes of sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetimes {
    /// The longest lease that a session guarantees at any time.
    pub(crate) lease: Duration,
    /// The interval between renewals of the cell.
    pub(crate) period: Duration,
    /// How long the cell lives without a renewal.
    pub(crate) cell: Duration,
    /// How much earlier than `cell` the cell may expire.
    pub(crate) grain: Duration,
}

impl Lifetimes {
    /// Returns the lifetimes for leases of up to `lease`, on a system with the given `grain`.
    pub(crate) fn of(lease: Duration, grain: Duration) -> Self {
        // However short the lease, a renewal must guarantee more than the possible drift of two
        // clocks.
        let period = (lease / 5).max(drift(lease + grain) * 2);
        Self { lease, period, cell: lease + period + grain, grain }
    }
}

/// A session of this client.
#[derive(Debug)]
pub(crate) struct Session {
    /// The ID that claims refer to.
    pub(crate) id: String,
    key: String,
    state: Mutex<State>,
    /// Serializes renewals, because the second of two concurrent ones would be refused.
    touching: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    version: Version,
    /// The end of the guaranteed lifetime.
    certain: Moment,
    is_over: bool,
}

impl Session {
    /// Returns the end of the guaranteed lifetime, or a moment in the past if the session has
    /// ended.
    pub(crate) fn certain(&self) -> Moment {
        let state = locked(&self.state);
        if state.is_over { Moment::from_nanos(0) } else { state.certain }
    }

    fn end(&self) {
        locked(&self.state).is_over = true;
    }

    pub(crate) fn is_over(&self) -> bool {
        locked(&self.state).is_over
    }
}

/// The sessions of this client. At most one is current at a time.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) lifetimes: Lifetimes,
    cells: Arc<dyn Cells>,
    clock: Clock,
    current: Mutex<Option<Arc<Session>>>,
    opening: tokio::sync::Mutex<()>,
    opened: Notify,
    sender: UnboundedSender<Message>,
}

impl Sessions {
    /// Creates the session manager. Messages to the current session are sent to `sender`.
    pub(crate) fn new(
        cells: Arc<dyn Cells>,
        lifetimes: Lifetimes,
        clock: Clock,
        sender: UnboundedSender<Message>,
    ) -> Self {
        let (current, opening, opened) = Default::default();
        Self { lifetimes, cells, clock, current, opening, opened, sender }
    }

    /// Returns the current session, unless it is known to have ended.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        locked(&self.current).clone().filter(|session| !session.is_over())
    }

    /// Completes when a session is opened.
    pub(crate) async fn until_opened(&self) {
        self.opened.notified().await;
    }

    /// Returns the current session, or opens a new one.
    pub(crate) async fn open(&self, key: impl Fn(&str) -> String) -> Result<Arc<Session>> {
        if let Some(session) = self.current() {
            return Ok(session);
        }
        let _alone = self.opening.lock().await;
        if let Some(session) = self.current() {
            return Ok(session);
        }
        for _ in 0..CREATIONS {
            let id = ClaimId::random()?.to_hex();
            if let Some(messenger) = self.cells.messenger() {
                messenger.listen(&id, self.sender.clone()).await?;
            }
            if let Some(session) = self.create(id, &key).await? {
                *locked(&self.current) = Some(session.clone());
                self.opened.notify_one();
                return Ok(session);
            }
        }
        let what = "the store refused each new session: another program writes under its keys, or a proxy answers for \
                    the store";
        Err(Error::new(ErrorKind::Unreachable, what))
    }

    /// Creates the cell of a new session. Returns `None` if the system refused to create it, and
    /// the existing cell is not this session.
    async fn create(
        &self,
        id: String,
        key: impl Fn(&str) -> String,
    ) -> Result<Option<Arc<Session>>> {
        let key = key(&id);
        let (value, lives) = (SESSION.to_vec(), Some(self.lifetimes.cell));
        let sent = self.clock.now();
        let create = Request::Create { key: key.clone(), value, lives };
        let version = match self.cells.run(vec![create]).await?.pop() {
            Some(Answer::Written(version)) => version,
            // No other client has this ID. A session with this ID is ours, and the request was
            // delivered twice.
            _ => {
                let get = Request::Get { key: key.clone() };
                match self.cells.run(vec![get]).await?.pop() {
                    Some(Answer::Found(found)) if found.value == SESSION => found.version,
                    _ => return Ok(None),
                }
            }
        };
        let state = State { version, certain: self.end_of(sent), is_over: false };
        let (state, touching) = (Mutex::new(state), Default::default());
        Ok(Some(Arc::new(Session { id, key, state, touching })))
    }

    /// Returns the end of the guaranteed lifetime of a cell that was renewed by a request sent at
    /// `sent`.
    fn end_of(&self, sent: Moment) -> Moment {
        let Lifetimes { cell, grain, .. } = self.lifetimes;
        sent.plus(cell.saturating_sub(grain).saturating_sub(drift(cell)))
    }

    /// Renews the session unless it is guaranteed to live for `lease` from now on. Returns `false`
    /// if the session has ended.
    ///
    /// # Errors
    /// The errors of the system. The state of the session is then unknown.
    pub(crate) async fn vouch(&self, session: &Session, lease: Duration) -> Result<bool> {
        let lease = lease.min(self.lifetimes.lease);
        for _ in 0..2 {
            if session.is_over() {
                return Ok(false);
            }
            if session.certain().since(self.clock.now()) >= lease {
                return Ok(true);
            }
            self.touch(session).await?;
        }
        if session.is_over() {
            return Ok(false);
        }
        Err(Error::no_reply(self.cells.system().slow))
    }

    /// Renews the session's cell, and records in `session` if it has ended.
    ///
    /// # Errors
    /// The errors of the system. The state of the session is then unknown.
    pub(crate) async fn touch(&self, session: &Session) -> Result<()> {
        let _alone = session.touching.lock().await;
        let (key, lives) = (session.key.clone(), self.lifetimes.cell);
        for _ in 0..2 {
            let sent = self.clock.now();
            let version = {
                let state = locked(&session.state);
                (!state.is_over && state.certain > sent).then(|| state.version.clone())
            };
            let Some(version) = version else {
                session.end();
                return Ok(());
            };
            let touch =
                Request::Touch { key: key.clone(), value: SESSION.to_vec(), version, lives };
            match self.cells.run(vec![touch]).await?.pop() {
                Some(Answer::Absent) => session.end(),
                Some(Answer::Refused) => {
                    self.look_again(session).await?;
                    continue;
                }
                answer => self.is_touched(session, answer, sent),
            }
            return Ok(());
        }
        Ok(())
    }

    /// Records a renewal that was sent at `sent`.
    fn is_touched(&self, session: &Session, answer: Option<Answer>, sent: Moment) {
        let now = self.clock.now();
        let mut state = locked(&session.state);
        if let Some(Answer::Written(version)) = answer {
            state.version = version;
        }
        if now >= state.certain {
            state.is_over = true;
        } else if now.since(sent) <= self.cells.system().slow {
            state.certain = state.certain.max(self.end_of(sent));
        }
    }

    /// Reads the cell's current version after a renewal was refused.
    async fn look_again(&self, session: &Session) -> Result<()> {
        let get = Request::Get { key: session.key.clone() };
        match self.cells.run(vec![get]).await?.pop() {
            Some(Answer::Found(found)) if found.value == SESSION => {
                locked(&session.state).version = found.version;
            }
            _ => session.end(),
        }
        Ok(())
    }

    /// Ends the session by removing its cell, which frees its claims immediately. A later call
    /// opens another session.
    pub(crate) async fn close(&self) {
        self.close_if(|| true).await;
    }

    /// Like [`close`](Self::close), but only if `is_so` returns true. While `is_so` runs, no call
    /// can get the session.
    pub(crate) async fn close_if(&self, is_so: impl FnOnce() -> bool) {
        let taken = {
            let mut current = locked(&self.current);
            if is_so() { current.take() } else { None }
        };
        let Some(session) = taken else { return };
        session.end();
        let (key, version) = (session.key.clone(), locked(&session.state).version.clone());
        // A failure is harmless, because the cell expires.
        let _ = self.cells.run(vec![Request::Remove { key, version }]).await;
    }
}
