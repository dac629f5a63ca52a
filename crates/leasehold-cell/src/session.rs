//! The session of this client: one cell that says that it lives, to which all its claims refer.
//!
//! The cell ends by the system's own clock unless it is touched. So whether a client lives is decided in
//! one place, and whoever looks once (a `--try` from cron) knows as much as who looks all the time.
//!
//! # What is certain
//! A touch that was sent at `t` and answered began the cell's life anew at `t` or later. So the cell is
//! there at least until `t` + its life − the grain of the system's clock − what two clocks may differ
//! by in that time. Nothing that is held is promised for longer. An id is used for one cell only, which
//! is created once: a cell that was touched has been there all along, and one that is gone never comes
//! back. What comes late is a touch, which only makes it live longer, or a creation that we gave up:
//! nobody refers to that.
//!
//! Where a touch is a write, it is refused unless the cell is what was read. If that is since an answer was
//! lost, the cell is still ours, and is looked at and touched again.
//!
//! *What was certain is over*: then the session is over for us, and is not touched any more, even if its cell
//! is there: the system may just be about to remove it.
//!
//! *A look that may be behind* proves of no session that it is gone. Who finds one gone puts a cell of its
//! own in its place, which is refused if the session is there; and no touch is done after that.
//!
//! *One thing is taken for granted*: that the system reckons with the present. A server that was stopped, and
//! goes on, may set the end of a cell before it has looked at its own clock. So an answer that took long
//! proves nothing, and is asked for again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::{drift, locked};
use leasehold_core::{ClaimId, Clock, Error, ErrorKind, Moment, Result};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use crate::cells::{Answer, Cells, Heard, Request, Version};
use crate::text::SESSION;

/// So many sessions are tried that are refused.
const CREATIONS: u32 = 3;

/// How long sessions live.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lives {
    /// The longest lease that a session vouches for at any time.
    pub(crate) lease: Duration,
    /// How often its cell is touched.
    pub(crate) period: Duration,
    /// How long the cell lives untouched.
    pub(crate) cell: Duration,
    /// By how much earlier it may end.
    pub(crate) grain: Duration,
}

impl Lives {
    /// For leases of up to this, on a system of this grain.
    pub(crate) fn of(lease: Duration, grain: Duration) -> Self {
        // A touch must be certain of more than what two clocks may differ by, however short the lease.
        let period = (lease / 5).max(drift(lease + grain) * 2);
        Self { lease, period, cell: lease + period + grain, grain }
    }
}

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    /// What claims refer to.
    pub(crate) id: String,
    key: String,
    state: Mutex<State>,
    /// One touch at a time: the second would be refused.
    touching: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    version: Version,
    /// It lives at least until then.
    certain: Moment,
    is_over: bool,
}

impl Session {
    /// It lives at least until then; an earlier moment if it is over.
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

/// The sessions of this client, one at a time.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) lives: Lives,
    cells: Arc<dyn Cells>,
    clock: Clock,
    current: Mutex<Option<Arc<Session>>>,
    opening: tokio::sync::Mutex<()>,
    opened: Notify,
    heard: UnboundedSender<Heard>,
}

impl Sessions {
    /// What is said to a session of ours comes to `heard`.
    pub(crate) fn new(
        cells: Arc<dyn Cells>,
        lives: Lives,
        clock: Clock,
        heard: UnboundedSender<Heard>,
    ) -> Self {
        let (current, opening, opened) = Default::default();
        Self { lives, cells, clock, current, opening, opened, heard }
    }

    /// The one that is not known to be over.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        locked(&self.current).clone().filter(|session| !session.is_over())
    }

    /// Completes when a session is opened.
    pub(crate) async fn until_opened(&self) {
        self.opened.notified().await;
    }

    /// The one that lives, or a new one.
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
            if let Some(bells) = self.cells.bells() {
                bells.listen(&id, self.heard.clone()).await?;
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

    /// Creates the cell of a new session. `None`: that was refused, and what is there is not this session.
    async fn create(
        &self,
        id: String,
        key: impl Fn(&str) -> String,
    ) -> Result<Option<Arc<Session>>> {
        let key = key(&id);
        let (value, lives) = (SESSION.to_vec(), Some(self.lives.cell));
        let sent = self.clock.now();
        let create = Request::Create { key: key.clone(), value, lives };
        let version = match self.cells.run(vec![create]).await?.pop() {
            Some(Answer::Written(version)) => version,
            // No other client has this ID. A session there is ours: the request was repeated on its way.
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

    /// Until when a cell lives for certain that was touched by what was sent then.
    fn end_of(&self, sent: Moment) -> Moment {
        let Lives { cell, grain, .. } = self.lives;
        sent.plus(cell.saturating_sub(grain).saturating_sub(drift(cell)))
    }

    /// Sees to it that the session lives for as long as this from now. Whether it does.
    ///
    /// # Errors
    /// As the system fails; then nothing is known.
    pub(crate) async fn vouch(&self, session: &Session, lease: Duration) -> Result<bool> {
        let lease = lease.min(self.lives.lease);
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

    /// Makes the session's cell live longer. Whether the session is over afterwards, the session says.
    ///
    /// # Errors
    /// As the system fails; then nothing is known.
    pub(crate) async fn touch(&self, session: &Session) -> Result<()> {
        let _alone = session.touching.lock().await;
        let (key, lives) = (session.key.clone(), self.lives.cell);
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

    /// It was touched by what was sent then.
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

    /// It is not what we know of it.
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

    /// Ends the session's cell: its claims are free at once. What is asked for later opens another.
    pub(crate) async fn close(&self) {
        self.close_if(|| true).await;
    }

    /// The same, if this is so while no call can get the session.
    pub(crate) async fn close_if(&self, is_so: impl FnOnce() -> bool) {
        let taken = {
            let mut current = locked(&self.current);
            if is_so() { current.take() } else { None }
        };
        let Some(session) = taken else { return };
        session.end();
        let (key, version) = (session.key.clone(), locked(&session.state).version.clone());
        // A courtesy.
        let _ = self.cells.run(vec![Request::Remove { key, version }]).await;
    }
}
