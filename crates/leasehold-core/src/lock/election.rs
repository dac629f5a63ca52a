//! Leader election: one of many candidates leads, and another one takes over when the leader is
//! gone.
//!
//! # The argument
//! A term is a hold of a mutex, and its number is the token of the hold. So each term has a larger
//! number than all earlier terms. The candidates form the queue of the mutex.
//! - *A candidate that loses leadership stops.* The work is a future that is dropped as soon as the
//!   hold is lost, and the clock is checked before each of its steps. Requests that were already
//!   sent are not stopped. So two candidates may lead for a moment, and receivers must reject
//!   requests of the earlier term.
//! - *Candidates survive outages of any length.* After a retryable error, the candidate tries
//!   again, with growing pauses and without limit. It also does so after a lost term, and the pause
//!   grows while terms are lost as soon as they begin.
//! - *If the future is dropped*, the work is dropped first, then the hold is released or the queue
//!   position given up, as with any lock.

use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use futures_core::Stream;

use crate::client::background::Background;
use crate::client::lease::State;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::MutexGuard;
use crate::lock::hold::Hold;
use crate::lock::options::option_methods;
use crate::lock::poll_schedule::PollSchedule;
use crate::lock::stream::RequestStream;
use crate::lock::wait::Wait;
use crate::lock::watch::Watch;
use crate::store::Queues;
use crate::types::answer::ClaimInfo;
use crate::types::error::{Error, LostReason, Result};
use crate::types::token::{FencingToken, Token};
use crate::util::clock::Moment;
use crate::util::locked::locked;

/// The initial and the maximum pause before a candidate waits for leadership again.
const PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];
/// The pause between two polls of an observer if the store does not report changes.
const POLL_PAUSE: Duration = Duration::from_secs(1);

type OnPause = Arc<dyn Fn(&Error, Duration) + Send + Sync>;

/// A leader election, in which one of many candidates leads.
///
/// An election is created by [`Client::election`](crate::Client::election), and has the options of
/// a mutex. Cheap to clone. No request is sent until [`lead`](Self::lead) is called.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::ops::ControlFlow;
/// # let locks = leasehold::connect("memory:").await?;
/// let term = locks
///     .election("leader")
///     .lead(|guard| async move {
///         // Receivers of our requests reject terms smaller than the largest one seen.
///         println!("leading, term {}", guard.token());
///         ControlFlow::Break(guard.token()) // done; `Continue` would wait for leadership again
///     })
///     .await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
#[must_use = "an election does nothing until `lead` is called"]
pub struct Election {
    handle: LockHandle,
    prudent: bool,
    on_pause: Option<OnPause>,
    /// The term that is currently running. If several clones of this candidate are leading, the
    /// latest of their terms.
    term: Arc<Mutex<Option<Watch>>>,
}

impl std::fmt::Debug for Election {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "election by {:?}", self.handle)
    }
}

impl Election {
    pub(crate) fn new(handle: LockHandle) -> Self {
        Self { handle, prudent: false, on_pause: None, term: Arc::default() }
    }

    option_methods!();

    /// Ends a term as soon as the hold is [at risk](State::AtRisk), not only when it is lost.
    ///
    /// Use it for work that must stop while leadership is uncertain. This ends some terms that a
    /// late renewal would have saved.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let election = locks.election("leader").stop_at_risk();
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn stop_at_risk(mut self) -> Self {
        self.prudent = true;
        self
    }

    /// Sets a function that is called before each pause, with the error that ended the term or the
    /// wait.
    ///
    /// [`Lost`](crate::ErrorKind::Lost): leadership was lost. [`AtRisk`](crate::ErrorKind::AtRisk):
    /// the term was ended because the hold was at risk. Other kinds: the candidate could not wait
    /// for leadership, for example because the store is unreachable.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let election = locks
    ///     .election("leader")
    ///     .on_pause(|why, pause| eprintln!("{why}; standing again in {pause:?}"));
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn on_pause(mut self, tell: impl Fn(&Error, Duration) + Send + Sync + 'static) -> Self {
        self.on_pause = Some(Arc::new(tell));
        self
    }

    /// Waits for leadership, runs `work` while this candidate leads, and waits again when
    /// leadership is lost. The call returns once `work` returns [`Break`](ControlFlow::Break).
    ///
    /// `work` is called once per term, with the hold. The token of the hold is the term number.
    /// When leadership is lost, the future of `work` is dropped at its next await. When `work`
    /// returns [`Continue`](ControlFlow::Continue), this candidate resigns and goes to the back of
    /// the queue.
    ///
    /// Waiting costs the same as waiting for a mutex. Candidates survive outages of any length:
    /// they retry with pauses of 0.1 s to 10 s.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background. The future of `work`
    /// is dropped at its current await.
    ///
    /// # Errors
    /// Only errors that [retries cannot fix](crate::Error::is_retryable), such as:
    /// - [`Denied`](crate::ErrorKind::Denied): the store rejects the candidate.
    /// - [`Config`](crate::ErrorKind::Config): an option is invalid.
    /// - [`Closed`](crate::ErrorKind::Closed): the client was closed.
    pub async fn lead<T, F>(&self, mut work: impl FnMut(MutexGuard) -> F) -> Result<T>
    where
        F: Future<Output = ControlFlow<T>>,
    {
        let [first, longest] = PAUSE;
        let mut pause = first;
        loop {
            let began = self.now();
            let error = match self.handle.acquire("lead", 1, Wait::Forever).await {
                Ok(guard) => match self.term(guard, &mut work).await {
                    Ok(ControlFlow::Break(done)) => return Ok(done),
                    Ok(ControlFlow::Continue(())) => continue,
                    Err(deposed) => deposed,
                },
                Err(error) if error.is_retryable() => error,
                Err(error) => return Err(error),
            };
            if self.now().since(began) >= longest {
                pause = first;
            }
            if let Some(tell) = &self.on_pause {
                tell(&error, pause);
            }
            self.handle.core.background.sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Returns whether a hold in this state ends the term, although the work is not done.
    fn is_over(&self, state: State) -> bool {
        match state {
            State::Lost(_) | State::Released => true,
            State::AtRisk(_) => self.prudent,
            State::Held => false,
        }
    }

    /// Runs the work of one term, until the work is done or the term is over. In the second case,
    /// it returns an error.
    async fn term<F: Future>(
        &self,
        hold: Hold,
        work: impl FnOnce(MutexGuard) -> F,
    ) -> Result<F::Output> {
        let is_over = |state| self.is_over(state);
        let done = {
            let _leads = Leads::begin(&self.term, hold.watch());
            let mut work = pin!(work(MutexGuard::new(hold.share())));
            let mut watch = hold.watch();
            let mut over = pin!(async { while !is_over(watch.changed().await) {} });
            std::future::poll_fn(|cx| {
                // The clock is checked before each step, so a process that was paused for longer
                // than its lease takes no further step.
                if is_over(hold.state()) || over.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Err(hold.ensure(Duration::MAX)));
                }
                work.as_mut().poll(cx).map(Ok)
            })
            .await
        };
        // The result is ignored, because the work is done. A release that fails here is retried in
        // the background.
        let _ = hold.release().await;
        done.map_err(|why| why.err().unwrap_or_else(|| Error::lost(LostReason::Gone)))
    }

    /// Returns the term in which this candidate, or a clone of it, leads now. No I/O.
    ///
    /// Use it for a status page that shows which replica leads. The term ends with its work, or
    /// when the lease expires if the work does not stop in time. For other candidates, use
    /// [`leader`](Self::leader).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use std::ops::ControlFlow;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let election = locks.election("leader");
    /// assert_eq!(election.leads(), None);
    /// let led = election
    ///     .lead(|guard| {
    ///         let candidate = election.clone();
    ///         async move {
    ///             assert_eq!(candidate.leads(), Some(guard.token()));
    ///             ControlFlow::Break(())
    ///         }
    ///     })
    ///     .await?;
    /// assert_eq!(election.leads(), None);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn leads(&self) -> Option<FencingToken> {
        let term = locked(&self.term);
        term.as_ref().filter(|term| !self.is_over(term.state())).and_then(Watch::fencing_token)
    }

    pub(crate) fn background(&self) -> &Background {
        &self.handle.core.background
    }

    fn now(&self) -> Moment {
        self.handle.core.clock.now()
    }

    /// Returns the current leader according to the store. One round trip. The leader may change a
    /// moment later.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert!(locks.election("leader").leader().await?.is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// The same as [`Client::inspect`](crate::Client::inspect).
    pub async fn leader(&self) -> Result<Option<ClaimInfo>> {
        let lock = self.handle.holders().await?;
        Ok(lock.and_then(|lock| lock.holders().next().cloned()))
    }

    /// Returns an observer of the leader, for programs that are not candidates.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use std::ops::ControlFlow;
    /// let election = locks.election("leader");
    /// let mut observer = election.observe();
    /// assert!(observer.changed().await?.is_none()); // the first call returns the current state
    /// election
    ///     .lead(|guard| {
    ///         let mut observer = observer.clone();
    ///         async move {
    ///             let leader = observer.changed().await.unwrap().expect("a leader");
    ///             assert_eq!(leader.token, Some(guard.grant()));
    ///             ControlFlow::Break(())
    ///         }
    ///     })
    ///     .await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn observe(&self) -> Observer {
        let queue = self.handle.name.as_ref().ok().cloned().map(Queues::Of);
        let schedule = PollSchedule::new(&self.handle.core, queue, POLL_PAUSE);
        Observer { election: self.clone(), schedule, seen: None }
    }
}

/// The registration of a running term. Dropping this value removes the registration.
struct Leads<'a> {
    now: &'a Mutex<Option<Watch>>,
    term: Token,
}

impl<'a> Leads<'a> {
    /// Registers a term, unless a clone of the candidate already leads a later one.
    ///
    /// A registered earlier term is replaced. It has been lost, but its work has not ended yet.
    fn begin(now: &'a Mutex<Option<Watch>>, begins: Watch) -> Self {
        let term = begins.grant();
        let mut led = locked(now);
        if led.as_ref().is_none_or(|led| led.grant() < term) {
            *led = Some(begins);
        }
        Self { now, term }
    }
}

impl Drop for Leads<'_> {
    fn drop(&mut self) {
        let mut led = locked(self.now);
        led.take_if(|led| led.grant() == self.term);
    }
}

/// Reports changes of leadership; see [`Election::observe`].
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let election = locks.election("leader");
/// let mut observer = election.observe();
/// assert!(observer.changed().await?.is_none()); // the first call returns the current state
/// let _leads = locks.mutex("leader").label("us").lock().await?;
/// let leader = observer.changed().await?.expect("a leader");
/// println!("{} leads, term {:?}", leader.holder, leader.token);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Observer {
    election: Election,
    schedule: PollSchedule,
    /// The term that was returned last, or `None` before the first call.
    seen: Option<Option<Token>>,
}

impl Observer {
    /// Waits until the leader changes, and returns the new leader, or `None` if there is none. The
    /// first call returns immediately.
    ///
    /// The observer polls when the store [reports a change](crate::store::Guarantees::followed), or
    /// once per second if the store cannot report changes. So short terms may be missed.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. The next call returns the change
    /// that this one did not return.
    ///
    /// # Errors
    /// The same as [`Client::inspect`](crate::Client::inspect). Call it again after an error.
    pub async fn changed(&mut self) -> Result<Option<ClaimInfo>> {
        loop {
            self.schedule.until_due().await;
            let leader = self.election.leader().await;
            self.schedule.polled(leader.is_ok());
            let leader = leader?;
            let term = leader.as_ref().and_then(|leader| leader.token);
            if self.seen != Some(term) {
                self.seen = Some(term);
                return Ok(leader);
            }
        }
    }

    /// Converts the value into a stream without an end. An error is an item too, and the stream
    /// continues after it.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use futures_util::StreamExt; // or another crate with stream methods
    ///
    /// # let locks = leasehold::connect("memory:").await?;
    /// let mut leaders = locks.election("leader").observe().stream();
    /// assert!(leaders.next().await.expect("it has no end")?.is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn stream(self) -> impl Stream<Item = Result<Option<ClaimInfo>>> + Send + Unpin + 'static {
        RequestStream::of(self, |mut observer| async move {
            let changed = observer.changed().await;
            (observer, changed)
        })
    }
}
