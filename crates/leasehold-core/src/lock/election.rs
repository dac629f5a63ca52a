//! Election: of many candidates one leads, and when it is gone another takes over.
//!
//! # The argument
//! A term is a hold of a mutex, and its number is the hold's token: greater than that of every term before. The
//! candidates are the mutex's queue.
//! - *Who is deposed stops*: the work is a future that is dropped as soon as the hold is lost, and the clock is
//!   looked at before each of its steps. What is under way elsewhere is not stopped by that: two may lead for
//!   a moment, and the later term is the one to obey.
//! - *An outage ends no candidate*: an error that may be over later is followed by another try, with growing
//!   pauses, for as long as it takes. So is a term that was lost, and the pause grows while terms are lost as
//!   soon as they begin.
//! - *The future is dropped*: the work first, then the hold or the place in the queue, as with any lock.

use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use futures_core::Stream;

use crate::base::clock::Moment;
use crate::base::locked::locked;
use crate::client::background::Background;
use crate::client::lease::State;
use crate::lock::acquire::LockHandle;
use crate::lock::guard::{Guard, Watch};
use crate::lock::looks::Looks;
use crate::lock::options::option_methods;
use crate::lock::stream::Asked;
use crate::lock::wait::Wait;
use crate::store::Queues;
use crate::words::answer::ClaimInfo;
use crate::words::error::{Error, LostReason, Result};
use crate::words::token::Token;

/// How long a candidate pauses before it stands again, at first and at most.
const PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];
/// How often an observer asks where nobody tells it when to.
const LOOK: Duration = Duration::from_secs(1);

type OnPause = Arc<dyn Fn(&Error, Duration) + Send + Sync>;

/// One of many leads: [`Leasehold::election`](crate::Leasehold::election) makes it, with the options of a
/// mutex. Cheap to clone; nothing is sent until somebody stands.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::ops::ControlFlow;
/// # let locks = leasehold::connect("memory:").await?;
/// let term = locks
///     .election("leader")
///     .lead(|guard| async move {
///         // Whoever gets an order of ours obeys the greatest term that it has seen.
///         println!("leading, term {}", guard.token());
///         ControlFlow::Break(guard.token()) // done for good; `Continue` would stand again
///     })
///     .await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
#[must_use = "nobody stands until `lead` is called"]
pub struct Election {
    handle: LockHandle,
    prudent: bool,
    on_pause: Option<OnPause>,
    /// The term whose work goes on now: the greatest, where clones of one candidate lead.
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

    /// Stops leading as soon as the hold is [at risk](State::AtRisk), and not only when it is lost: for work
    /// that must not go on while nobody knows whether it may. It costs terms that a late renewal would
    /// have saved.
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

    /// Called before each pause, with what ended the term or the waiting: by
    /// [`Lost`](crate::ErrorKind::Lost), who led is deposed; by [`AtRisk`](crate::ErrorKind::AtRisk), it
    /// stopped; by anything else, the store is away.
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

    /// Stands in the queue of candidates, leads while `work` runs, and stands again when it is
    /// deposed: until `work` says [`Break`](ControlFlow::Break), or this future is dropped.
    ///
    /// `work` is called once for each term, with the hold: its token is the term. When the term ends from
    /// outside, its future is dropped at its next await. With [`Continue`](ControlFlow::Continue) it resigns,
    /// and this candidate is the last in the queue again.
    ///
    /// Standing costs what waiting for a mutex costs. An outage, however long, is waited for, with pauses
    /// from 0.1 to 10 s.
    ///
    /// # Cancel safety
    /// Dropped, it drops the future of `work` where that awaits, and gives back the hold or the place in the
    /// queue, in the background.
    ///
    /// # Errors
    /// What [no waiting mends](crate::Error::is_retryable): [`Denied`](crate::ErrorKind::Denied),
    /// [`Config`](crate::ErrorKind::Config), [`Closed`](crate::ErrorKind::Closed) and their like.
    pub async fn lead<T, F>(&self, mut work: impl FnMut(Guard) -> F) -> Result<T>
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

    /// Whether a term in this state has ended from outside.
    fn is_over(&self, state: State) -> bool {
        match state {
            State::Lost(_) | State::Released => true,
            State::AtRisk(_) => self.prudent,
            State::Held => false,
        }
    }

    /// Works for one term, until that is over. An error: from outside.
    async fn term<F: Future>(
        &self,
        guard: Guard,
        work: impl FnOnce(Guard) -> F,
    ) -> Result<F::Output> {
        let is_over = |state| self.is_over(state);
        let done = {
            let _leads = Leads::begin(&self.term, guard.watch());
            let mut work = pin!(work(Guard::share(guard.hold().clone())));
            let mut watch = guard.watch();
            let mut over = pin!(async { while !is_over(watch.changed().await) {} });
            std::future::poll_fn(|cx| {
                // The clock is looked at before each step: who was stopped for long takes none.
                if is_over(guard.state()) || over.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Err(guard.ensure(Duration::MAX)));
                }
                work.as_mut().poll(cx).map(Ok)
            })
            .await
        };
        // Whatever is not told now is told in the background; and what was done is done.
        let _ = guard.release().await;
        done.map_err(|why| why.err().unwrap_or_else(|| Error::lost(LostReason::Gone)))
    }

    /// The term that this candidate, or a clone of it, leads now, if it does: for a page that says which of many
    /// leads. No I/O. It ends with the term's work, or with the hold, by the clock, if that work does not stop in
    /// time; and it says nothing of other candidates: for that, see [`leader`](Self::leader).
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
    pub fn leads(&self) -> Option<Token> {
        let term = locked(&self.term);
        term.as_ref().filter(|term| !self.is_over(term.state())).map(Watch::token)
    }

    pub(crate) fn background(&self) -> &Background {
        &self.handle.core.background
    }

    fn now(&self) -> Moment {
        self.handle.core.clock.now()
    }

    /// Who leads now, as the store knows it; a moment later it may be another. One round trip.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert!(locks.election("leader").leader().await?.is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// It only reads: dropped, nothing is left of it.
    ///
    /// # Errors
    /// As [`Leasehold::read`](crate::Leasehold::read).
    pub async fn leader(&self) -> Result<Option<ClaimInfo>> {
        let lock = self.handle.read().await?;
        Ok(lock.and_then(|lock| lock.holders().next().cloned()))
    }

    /// Follows who leads, for those who do not stand themselves.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use std::ops::ControlFlow;
    /// let election = locks.election("leader");
    /// let mut observer = election.observe();
    /// assert!(observer.changed().await?.is_none()); // at first, what is there
    /// election
    ///     .lead(|guard| {
    ///         let mut observer = observer.clone();
    ///         async move {
    ///             let leader = observer.changed().await.unwrap().expect("somebody leads");
    ///             assert_eq!(leader.token, Some(guard.token()));
    ///             ControlFlow::Break(())
    ///         }
    ///     })
    ///     .await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn observe(&self) -> Observer {
        let queue = self.handle.name.as_ref().ok().cloned().map(Queues::Of);
        let looks = Looks::new(&self.handle.core, queue, LOOK);
        Observer { election: self.clone(), looks, seen: None }
    }
}

/// One term, until it is dropped.
struct Leads<'a> {
    now: &'a Mutex<Option<Watch>>,
    term: Token,
}

impl<'a> Leads<'a> {
    /// A clone of the candidate may lead a later term by now, or an earlier one that it has lost and not left.
    fn begin(now: &'a Mutex<Option<Watch>>, begins: Watch) -> Self {
        let term = begins.token();
        let mut led = locked(now);
        if led.as_ref().is_none_or(|led| led.token() < term) {
            *led = Some(begins);
        }
        Self { now, term }
    }
}

impl Drop for Leads<'_> {
    fn drop(&mut self) {
        let mut led = locked(self.now);
        led.take_if(|led| led.token() == self.term);
    }
}

/// Follows who leads: see [`Election::observe`].
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// let election = locks.election("leader");
/// let mut observer = election.observe();
/// assert!(observer.changed().await?.is_none()); // the first time, how it is now
/// let _leads = locks.mutex("leader").label("us").lock().await?;
/// let leader = observer.changed().await?.expect("somebody");
/// println!("{} leads, term {:?}", leader.holder, leader.token);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Observer {
    election: Election,
    looks: Looks,
    /// The term that was told last.
    seen: Option<Option<Token>>,
}

impl Observer {
    /// Who leads: at once the first time, and then when it is another one, or nobody any more. It asks as soon as
    /// the store [tells of a change](crate::store::Guarantees::followed), and where it does not, once a second; so a
    /// term that is shorter may be missed.
    ///
    /// # Cancel safety
    /// May be dropped and called again: no change is missed.
    ///
    /// # Errors
    /// As [`Leasehold::read`](crate::Leasehold::read). It may be called again after an error.
    pub async fn changed(&mut self) -> Result<Option<ClaimInfo>> {
        loop {
            self.looks.time().await;
            let leader = self.election.leader().await;
            self.looks.looked(leader.is_ok());
            let leader = leader?;
            let term = leader.as_ref().and_then(|leader| leader.token);
            if self.seen != Some(term) {
                self.seen = Some(term);
                return Ok(leader);
            }
        }
    }

    /// The same as a stream, which has no end: an error is an item as well, and what comes after it goes on.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use futures_util::StreamExt; // or whichever crate you take streams from
    ///
    /// # let locks = leasehold::connect("memory:").await?;
    /// let mut leaders = locks.election("leader").observe().stream();
    /// assert!(leaders.next().await.expect("it has no end")?.is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn stream(self) -> impl Stream<Item = Result<Option<ClaimInfo>>> + Send + Unpin + 'static {
        Asked::of(self, |mut observer| async move {
            let changed = observer.changed().await;
            (observer, changed)
        })
    }
}
