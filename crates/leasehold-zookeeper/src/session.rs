//! One session with the servers, and for how long it is certain to live.
//!
//! # What is certain
//! The leader ends a session when it has not heard of it for the session's time. Clients seldom talk
//! to the leader, though: they talk to a member, which answers reads and pings by itself and tells
//! the leader every half tick whom it has heard. So an answer alone proves little: the member may be
//! cut off from the leader, or die before it tells. This is what we rely on:
//!
//! - A *write* is answered only after a majority has it, so its answer proves that member and leader
//!   were connected while it was under way.
//! - What the member had heard at least half a tick before the write was sent went to the leader
//!   over the same connection before the write did.
//!
//! So an answered write, sent at `w`, proves that the leader has heard of us at or after the
//! *sending* of the last request that was answered before `w − margin`, and the session lives at
//! least its whole time from then. The margin is a tenth of the session; but where that would be
//! short for half a tick, a quarter, up to 1.5 s, which is half of the longest tick by default. A longer
//! tick shows in the shortest session that the servers give, which is two ticks unless they are told
//! otherwise: the margin is never less than a quarter of that. Where we are given more than we asked
//! for, that is it; else it is asked for at the first pulse (`ticks.rs`), and until it is known the margin
//! is a quarter of our session, which can be no shorter. For the proof to be fresh there must have been
//! such a request: a *pulse*, one cheap read for each margin, also keeps the session alive, instead of
//! the driver's own pings.
//!
//! *One thing is taken for granted*: a member tells the leader whom it has heard only when the leader
//! pings it, which the leader does every half tick. A leader that stood still for longer than the margin
//! (a long garbage collection, a suspended machine), or whose pings alone were held up, may answer a
//! write just before it asks again; then the leader heard of us last when it stood still, and ends the
//! session earlier than is reckoned here, by as long as it stood still at most. It must then hear nothing
//! of us before that, though it asks within half a tick: so it takes a leader that stands still for
//! nearly the whole session and no answer of the member's in the moment after. No client can see that;
//! a checked token or `zookeeper_node` keeps such a holder from harm.
//!
//! Creating the session counts from before it was asked for. Being moved to another member goes
//! through the leader, and is later than anything that was answered before it.

use leasehold_core::kit::locked;
use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use zookeeper_client::{Client, Error as Fault, MultiWriteError};

use super::fault::{ends_session, explain, shut_down};
use super::ticks::shortest_session;
use super::tunnel::Tunnel;
use super::url::ZooKeeperUrl;
use leasehold_core::{Clock, Error, ErrorKind, Moment, Result};

/// How long connecting may take before we give up.
const CONNECT: Duration = Duration::from_secs(10);
/// How often it is asked how long a tick can be.
const TICK_TRIES: u32 = 5;
/// How often a member is asked for a sign of life while somebody waits to be told by it.
const WATCHED: Duration = Duration::from_millis(500);

/// Answers of ZooKeeper's.
pub(super) type Answer<T> = std::result::Result<T, Fault>;

#[derive(Debug)]
pub(super) struct Session {
    client: Client,
    /// What the client's connections go through.
    tunnel: Tunnel,
    /// As the servers gave it.
    timeout: Duration,
    heard: Mutex<Heard>,
    clock: Clock,
    pulse: AbortHandle,
    watched: Arc<Watched>,
}

/// Asks for a sign of life again and again: once for each margin; and more often where somebody waits to
/// be told by this member and could be told by another.
async fn beat(session: Weak<Session>, margin: Duration, watched: Arc<Watched>) {
    let mut tries = TICK_TRIES;
    loop {
        if watched.by.load(Relaxed) == 0 {
            // Whoever begins to wait has just heard from the member.
            let _ = tokio::time::timeout(margin, watched.begun.notified()).await;
        } else {
            tokio::time::sleep(margin.min(WATCHED)).await;
        }
        let Some(session) = session.upgrade() else { return };
        // Nobody needs a permission to ask whether the top is there. What fails is tried again at the
        // next beat; what hangs is one request.
        let beat = session.read(|c| c.check_stat("/"));
        if beat.await.is_err_and(|fault| ends_session(&fault)) {
            return;
        }
        if session.heard().is_settled {
            continue;
        }
        tries -= 1;
        match shortest_session(&session.tunnel.members).await {
            Ok(shortest) => session.heard().settle(margin.max(shortest / 4)),
            Err(_) if tries == 0 => session.heard().is_settled = true,
            Err(_) => {}
        }
    }
}

/// Who waits to be told something.
#[derive(Debug, Default)]
struct Watched {
    by: AtomicUsize,
    begun: Notify,
}

/// One that waits to be told something, for as long as this lives.
#[derive(Debug)]
pub(super) struct Watching(Option<Arc<Watched>>);

impl Drop for Watching {
    fn drop(&mut self) {
        if let Some(watched) = &self.0 {
            watched.by.fetch_sub(1, Relaxed);
        }
    }
}

/// When the leader has heard of us.
#[derive(Debug)]
struct Heard {
    margin: Duration,
    /// Whether the margin is what it will be.
    is_settled: bool,
    /// At or after this, for certain.
    certain: Moment,
    /// Requests that were answered: sent when, answered when. Not yet known to have been told.
    answered: VecDeque<(Moment, Moment)>,
}

impl Heard {
    fn new(margin: Duration, is_settled: bool, opened: Moment) -> Self {
        Self { margin, is_settled, certain: opened, answered: VecDeque::new() }
    }

    /// Nothing that was proved is less true by it: what is yet to be is proved with the new margin.
    fn settle(&mut self, margin: Duration) {
        (self.margin, self.is_settled) = (margin, true);
    }

    fn read(&mut self, sent: Moment, answered: Moment) {
        // A few for each margin are enough.
        let fresh =
            self.answered.back().is_none_or(|(last, _)| sent.since(*last) > self.margin / 8);
        if fresh {
            self.answered.push_back((sent, answered));
        }
        // Without writes nothing is proved, and the old ones are as good as none.
        if self.answered.len() > 64 {
            self.answered.pop_front();
        }
    }

    fn written(&mut self, sent: Moment, answered: Moment) {
        while let Some(&(earlier, told)) = self.answered.front() {
            if told.plus(self.margin) > sent {
                break;
            }
            self.certain = self.certain.max(earlier);
            self.answered.pop_front();
        }
        self.read(sent, answered);
    }
}

/// How long before a write a request must have been answered to be known to the leader.
fn margin(session: Duration) -> Duration {
    (session / 10).max((session / 4).min(Duration::from_millis(1_500)))
}

/// The margin to begin with, and whether it is known to be enough: of a session that is longer than was
/// asked for, two ticks are known to be no longer.
fn first_margin(asked: Duration, given: Duration) -> (Duration, bool) {
    let safe = margin(given).max(given / 4);
    (safe, given > asked || safe == margin(given))
}

impl Session {
    /// Opens a new session; its tasks run on `runtime`.
    pub(super) async fn open(url: &ZooKeeperUrl, runtime: &Handle) -> Result<Arc<Self>> {
        let clock = Clock::default();
        let opened = clock.now();
        let tunnel = Tunnel::open(url, runtime).await?;
        let client = connect(url, &tunnel, runtime).await?;
        tunnel.belongs_to(client.session_id().0);
        let timeout = client.session_timeout();
        let margin = margin(timeout);
        let (safe, is_settled) = first_margin(url.session, timeout);
        let watched = Arc::<Watched>::default();
        Ok(Arc::new_cyclic(|weak: &Weak<Self>| {
            let pulse = runtime.spawn(beat(weak.clone(), margin, watched.clone())).abort_handle();
            Self {
                client,
                tunnel,
                timeout,
                heard: Mutex::new(Heard::new(safe, is_settled, opened)),
                clock,
                pulse,
                watched,
            }
        }))
    }

    pub(super) fn id(&self) -> i64 {
        self.client.session_id().0
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// For how long a lease can be certain: what is left of the session when the last proof is as old
    /// as it ever is while all goes well.
    pub(super) fn longest_lease(&self) -> Duration {
        let heard = self.heard();
        let margin = if heard.is_settled { heard.margin } else { margin(self.timeout) };
        self.timeout.saturating_sub(margin * 5 / 2)
    }

    /// Whether nothing will ever be done on it any more.
    pub(super) fn is_over(&self) -> bool {
        self.client.state().is_terminated()
    }

    /// Which connection of the driver's serves the session, or did last: another one after each
    /// break.
    pub(super) fn connection(&self) -> Option<u64> {
        self.tunnel.connection()
    }

    /// From now on somebody waits to be told something by the member that serves: it must not be silent
    /// for long unnoticed, where another could tell it.
    pub(super) fn watching(&self) -> Watching {
        let several = self.tunnel.members.are_several();
        if several && self.watched.by.fetch_add(1, Relaxed) == 0 {
            self.watched.begun.notify_one();
        }
        Watching(several.then(|| self.watched.clone()))
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        // No code that can panic runs between two consistent states.
        locked(&self.heard)
    }

    /// Until when the session certainly lives, with nobody's clock trusted to more than its rate.
    pub(super) fn certain_until(&self) -> Moment {
        let certain = self.heard().certain;
        certain.plus(self.timeout)
    }

    /// Sends requests that only read.
    pub(super) async fn read<'a, T, F>(&'a self, send: impl FnOnce(&'a Client) -> F) -> Answer<T>
    where
        F: Future<Output = Answer<T>>,
    {
        let sent = self.clock.now();
        let answer = send(&self.client).await;
        match &answer {
            Ok(_) => self.heard().read(sent, self.clock.now()),
            Err(fault) => self.blame(fault),
        }
        answer
    }

    /// Sends requests of which at least one is a write.
    pub(super) async fn write<'a, T, E: Blames, F>(
        &'a self,
        send: impl FnOnce(&'a Client) -> F,
    ) -> std::result::Result<T, E>
    where
        F: Future<Output = std::result::Result<T, E>>,
    {
        let sent = self.clock.now();
        let answer = send(&self.client).await;
        match &answer {
            Ok(_) => self.heard().written(sent, self.clock.now()),
            Err(fault) => self.blame(fault),
        }
        answer
    }
}

impl Session {
    /// The session lives, but the leader takes it to be at another member: where an older request of ours
    /// to be moved there has come late (that member was stopped, or the network). Connecting anew moves
    /// it back; without that, this member refuses every write for ever.
    fn blame(&self, error: &impl Blames) {
        if error.fault() == Some(&Fault::SessionMoved) {
            self.tunnel.begin_anew();
        }
    }
}

/// An error that a fault of the driver's is at the bottom of.
pub(super) trait Blames {
    fn fault(&self) -> Option<&Fault>;
}

impl Blames for Fault {
    fn fault(&self) -> Option<&Fault> {
        Some(self)
    }
}

impl Blames for (Fault, Option<Fault>) {
    fn fault(&self) -> Option<&Fault> {
        Some(&self.0)
    }
}

impl Blames for MultiWriteError {
    fn fault(&self) -> Option<&Fault> {
        match self {
            Self::RequestFailed { source } | Self::OperationFailed { source, .. } => Some(source),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.pulse.abort();
    }
}

/// Opens a session through the tunnel.
async fn connect(url: &ZooKeeperUrl, tunnel: &Tunnel, runtime: &Handle) -> Result<Client> {
    let mut connector = Client::connector().with_session_timeout(url.session);
    if let Some(credentials) = &url.credentials {
        connector = connector.with_auth("digest", credentials.as_bytes());
    }
    // Who is silent is left by the tunnel, so this is for all members together. The driver's pings,
    // which come with 3/8 of this, stay behind our pulse.
    connector = connector.with_connection_timeout(url.session * 3 / 5);
    let host = tunnel.host.clone();
    // The driver spawns its task where it is called.
    let connecting =
        runtime.spawn(async move { tokio::time::timeout(CONNECT, connector.connect(&host)).await });
    match connecting.await {
        Ok(Ok(Ok(client))) => Ok(client),
        Ok(Ok(Err(fault))) => Err(refused(Some(fault), tunnel, url.tls.is_some())),
        Ok(Err(_)) => Err(refused(None, tunnel, url.tls.is_some())),
        Err(_) => Err(shut_down()),
    }
}

fn refused(fault: Option<Fault>, tunnel: &Tunnel, tls: bool) -> Error {
    match fault {
        Some(fault @ (Fault::AuthFailed | Fault::Unimplemented)) => explain(fault, "/"),
        fault => {
            let over_tls = match tls {
                true => {
                    "; if the servers require client certificates, set cert= and key= in the URL, \
                     signed by an authority that they trust"
                }
                false => "",
            };
            let what = "no ZooKeeper server accepts a session";
            let hint = format!(
                "check hosts and ports in the URL, and that a majority of the ensemble is \
                 running{over_tls}"
            );
            let error = Error::new(ErrorKind::Unreachable, what).with_hint(hint);
            // Behind the tunnel, the driver sees no more than that its connection ended.
            match (tunnel.members.fault(), fault) {
                (Some(why), _) => error.because(why),
                (None, Some(fault)) => error.because(fault),
                (None, None) => error,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn s72_a_session_is_certain_only_from_what_the_leader_must_have_heard() {
        let mut heard = Heard::new(Duration::from_millis(1_000), true, at(0));
        // A member's answers prove nothing, however many.
        for beat in 1..=9 {
            heard.read(at(beat * 1_000), at(beat * 1_000 + 5));
        }
        assert_eq!(heard.certain, at(0));
        // A write proves what was answered a margin before it was sent, and not itself.
        heard.written(at(9_500), at(9_600));
        assert_eq!(heard.certain, at(8_000));
        heard.written(at(10_590), at(10_595));
        assert_eq!(heard.certain, at(9_000), "answered less than a margin before");
        heard.written(at(10_600), at(10_700));
        assert_eq!(heard.certain, at(9_500));
    }

    #[test]
    fn s72_a_client_that_was_stopped_must_be_heard_again_first() {
        let mut heard = Heard::new(Duration::from_millis(1_000), true, at(0));
        heard.read(at(1_000), at(1_001));
        // Stopped for nearly the whole session; then a write gets through.
        heard.written(at(14_000), at(14_001));
        assert_eq!(heard.certain, at(1_000));
    }

    #[test]
    fn the_margin_is_a_tenth_and_never_below_half_a_tick() {
        let second = Duration::from_secs(1);
        assert_eq!(margin(second * 60), second * 6);
        assert_eq!(margin(second * 15), second * 3 / 2);
        // The shortest session of ticks of 2 s, and of 3 s.
        assert_eq!(margin(second * 4), second);
        assert_eq!(margin(second * 6), second * 3 / 2);
    }

    #[test]
    fn f48_a_tick_that_may_be_long_makes_the_margin_long() {
        let second = Duration::from_secs(1);
        // Nothing is known of the tick but that two are no longer than the session.
        assert_eq!(first_margin(second * 15, second * 15), (second * 15 / 4, false));
        // The shortest session is what we have.
        assert_eq!(first_margin(second * 15, second * 20), (second * 5, true));
        assert_eq!(first_margin(second * 2, second * 4), (second, true));
        assert_eq!(first_margin(second * 4, second * 4), (second, true));
        // What the server cuts tells nothing of its shortest.
        assert_eq!(first_margin(second * 60, second * 40), (second * 10, false));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut heard = Heard::new(Duration::from_millis(1_000), true, at(0));
        for n in 0..10_000 {
            heard.read(at(n * 500), at(n * 500 + 1));
            heard.read(at(n * 500 + 10), at(n * 500 + 11));
        }
        assert!(heard.answered.len() <= 65);
    }
}
