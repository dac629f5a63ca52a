//! One session with the servers, and how long it is certain to live.
//!
//! # What is certain
//! The leader ends a session if it receives no sign of life from the session for the session's
//! timeout. But clients seldom contact the leader. They send requests to a member, which answers
//! reads and pings on its own, and reports the active sessions to the leader every half tick. So a
//! reply alone proves little: the member may be cut off from the leader, or crash before its
//! report. leasehold relies on two facts:
//!
//! - A *write* is answered only after a majority has stored it. So the reply proves that the member
//!   and the leader were connected while the write was in progress.
//! - Requests that the member received at least half a tick before the write was sent were reported
//!   to the leader before the write, over the same connection.
//!
//! Consider a write that was sent at `w` and answered, and the last request that was answered
//! before `w − margin`. The leader has received a sign of life at or after the time at which that
//! request was *sent*. From that time on, the session lives at least for its whole timeout.
//!
//! **The margin** is a tenth of the timeout. If that would be too short for half a tick, the margin
//! is a quarter of the timeout, up to 1.5 s, which is half of ZooKeeper's default tick (3 s). The
//! shortest session that the servers grant reveals a longer tick, because that session is two ticks
//! unless it is configured otherwise. So the margin is never less than a quarter of the shortest
//! session. If the servers granted a longer session than requested, the granted session is the
//! shortest. Otherwise the client finds out the shortest session at the first pulse (`ticks.rs`).
//! Until then the margin is a quarter of the client's own session, which cannot be shorter than the
//! shortest.
//!
//! **Pulses.** A proof is only as recent as the last such request. So the client sends a *pulse*,
//! one cheap read, once per margin. Pulses also keep the session alive, instead of the driver's own
//! pings. A session that has written nothing for its whole timeout has no proof to keep fresh,
//! because it has no holds, only waiters or nothing. Then a pulse is sent only if no other request
//! was answered for a fifth of the timeout. Before the client relies on the first grant after that,
//! it sends a write.
//!
//! **One assumption remains.** A member reports active sessions only when the leader pings it,
//! which the leader does every half tick. Assume that the leader was paused for longer than the
//! margin (a long garbage collection, a suspended machine), or that only its pings were delayed. It
//! may then answer a write just before it pings the member again. In that case the leader's last
//! sign of life is from before the pause. The leader then ends the session earlier than calculated
//! here, by at most the length of the pause. But the leader does so only if it receives no sign of
//! life before that, although it pings within half a tick. So the leader must be paused for nearly
//! the whole timeout, and then receive no reply from the member. No client can detect that.
//! Checking tokens at the resource, or `zookeeper_node`, prevents such a holder from doing harm.
//!
//! The lifetime of a new session is counted from before the session was requested. Moving the
//! session to another member goes through the leader. So the leader's sign of life is later than
//! anything that was answered before the move.

use leasehold_core::kit::{Password, locked};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
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

/// Time limit for connecting.
const CONNECT: Duration = Duration::from_secs(10);
/// Maximum interval of pulses while a claim waits for a notification from the member.
const WATCHED: Duration = Duration::from_millis(500);

/// The result of a ZooKeeper request.
pub(super) type Answer<T> = std::result::Result<T, Fault>;

#[derive(Debug)]
pub(super) struct Session {
    client: Client,
    /// The tunnel through which the client connects.
    tunnel: Tunnel,
    /// The session's timeout, as the servers granted it.
    timeout: Duration,
    contact: Mutex<Contact>,
    clock: Clock,
    pulse: AbortHandle,
    watched: Arc<Watched>,
    login: Login,
}

/// The user and the password of the session.
///
/// ZooKeeper accepts every password. The pair is an identity, which a node's ACL may name. So a
/// changed password shows as a denied request. If the file contains another password by then, the
/// session gets that identity as well, and the request is sent again.
#[derive(Debug)]
struct Login {
    credentials: Option<(String, Password)>,
    /// The session's current `user:password`.
    digest: tokio::sync::Mutex<Option<String>>,
    /// Number of times that the digest was changed.
    changes: AtomicU64,
}

impl Login {
    fn new(credentials: Option<(String, Password)>, digest: Option<String>) -> Self {
        Self { credentials, digest: tokio::sync::Mutex::new(digest), changes: AtomicU64::new(0) }
    }

    /// Returns whether the session's password was changed after the first `changes` changes. If it
    /// was not, reads the password again, and gives a new one to the session.
    async fn has_changed_since(&self, changes: u64, client: &Client) -> bool {
        let mut digest = self.digest.lock().await;
        if self.changes.load(Relaxed) != changes {
            return true;
        }
        let now = digest_of(self.credentials.as_ref());
        let Some(new) = now.as_deref().filter(|new| Some(*new) != digest.as_deref()) else {
            return false;
        };
        if client.auth("digest", new.as_bytes()).await.is_err() {
            return false;
        }
        *digest = now;
        self.changes.fetch_add(1, Relaxed);
        true
    }
}

fn digest_of(credentials: Option<&(String, Password)>) -> Option<String> {
    credentials.map(|(user, password)| format!("{user}:{}", password.now()))
}

/// Sends pulses until the session ends. Pulses are more frequent while a claim waits for a
/// notification from this member that another member could send.
async fn beat(session: Weak<Session>, margin: Duration, watched: Arc<Watched>) {
    // The attempts to find out the shortest session become rarer, but do not end.
    let (mut pulses, mut next_try) = (0_u64, 1_u64);
    loop {
        let Some(pause) = session.upgrade().map(|session| session.pause(margin)) else { return };
        if watched.by.load(Relaxed) == 0 {
            // The pause ends early when a claim begins to wait, because shorter pauses apply from
            // then on.
            let _ = tokio::time::timeout(pause, watched.begun.notified()).await;
        } else {
            tokio::time::sleep(margin.min(WATCHED)).await;
        }
        let Some(session) = session.upgrade() else { return };
        if watched.by.load(Relaxed) == 0 && session.is_in_contact() {
            continue;
        }
        // Checking whether the root node exists needs no permission. A failed pulse is repeated
        // after the next pause. While a pulse has no reply, no other one is sent.
        let beat = session.read(|c| c.check_stat("/"));
        if beat.await.is_err_and(|fault| ends_session(&fault)) {
            return;
        }
        if session.contact().is_settled {
            continue;
        }
        pulses += 1;
        if pulses < next_try {
            continue;
        }
        next_try = pulses * 2;
        if let Ok(shortest) = shortest_session(&session.tunnel.members).await {
            session.contact().settle(margin.max(shortest / 4));
        }
    }
}

/// The claims that wait for a notification from the member.
#[derive(Debug, Default)]
struct Watched {
    by: AtomicUsize,
    begun: Notify,
}

/// The registration of a claim that waits for a notification. Dropping this value removes the
/// registration.
#[derive(Debug)]
pub(super) struct Watching(Option<Arc<Watched>>);

impl Drop for Watching {
    fn drop(&mut self) {
        if let Some(watched) = &self.0 {
            watched.by.fetch_sub(1, Relaxed);
        }
    }
}

/// What is known about the leader's last sign of life of this session.
#[derive(Debug)]
struct Contact {
    margin: Duration,
    /// Whether the margin is final.
    is_settled: bool,
    /// The leader has certainly received a sign of life at or after this time.
    certain: Moment,
    /// The times at which requests were sent and answered, for requests that are not yet known to
    /// have been reported to the leader.
    answered: VecDeque<(Moment, Moment)>,
    /// The time of the last reply to any request.
    last: Moment,
    /// The time of the last reply to a write.
    last_write: Moment,
}

impl Contact {
    fn new(margin: Duration, is_settled: bool, opened: Moment) -> Self {
        let (certain, answered) = (opened, VecDeque::new());
        Self { margin, is_settled, certain, answered, last: opened, last_write: opened }
    }

    /// Sets the final margin. Earlier proofs stay valid, and later proofs use the new margin.
    fn settle(&mut self, margin: Duration) {
        (self.margin, self.is_settled) = (margin, true);
    }

    fn read(&mut self, sent: Moment, answered: Moment) {
        self.last = self.last.max(answered);
        // A few requests for each margin are enough.
        let fresh =
            self.answered.back().is_none_or(|(last, _)| sent.since(*last) > self.margin / 8);
        if fresh {
            self.answered.push_back((sent, answered));
        }
        // Without writes there are no proofs, and the oldest requests are no longer useful.
        if self.answered.len() > 64 {
            self.answered.pop_front();
        }
    }

    fn written(&mut self, sent: Moment, answered: Moment) {
        while let Some(&(earlier, answered_at)) = self.answered.front() {
            if answered_at.plus(self.margin) > sent {
                break;
            }
            self.certain = self.certain.max(earlier);
            self.answered.pop_front();
        }
        self.last_write = self.last_write.max(answered);
        self.read(sent, answered);
    }
}

/// Returns how long before a write a request must have been answered, so that the leader certainly
/// knows of the request.
fn margin(session: Duration) -> Duration {
    (session / 10).max((session / 4).min(Duration::from_millis(1_500)))
}

/// Returns the initial margin, and whether that margin is known to be enough. A granted session
/// that is longer than requested is the shortest one, so it is at least two ticks long.
fn first_margin(asked: Duration, given: Duration) -> (Duration, bool) {
    let safe = margin(given).max(given / 4);
    (safe, given > asked || safe == margin(given))
}

impl Session {
    /// Opens a new session, whose tasks run on `runtime`.
    pub(super) async fn open(url: &ZooKeeperUrl, runtime: &Handle) -> Result<Arc<Self>> {
        let clock = Clock::default();
        let opened = clock.now();
        let tunnel = Tunnel::open(url, runtime).await?;
        let digest = digest_of(url.credentials.as_ref());
        let client = connect(url, digest.as_deref(), &tunnel, runtime).await?;
        let login = Login::new(url.credentials.clone(), digest);
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
                contact: Mutex::new(Contact::new(safe, is_settled, opened)),
                clock,
                pulse,
                watched,
                login,
            }
        }))
    }

    pub(super) fn id(&self) -> i64 {
        self.client.session_id().0
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the longest lease that can be certain: what is left of the timeout when the last
    /// proof is as old as it can be without faults.
    pub(super) fn longest_lease(&self) -> Duration {
        let contact = self.contact();
        let margin = if contact.is_settled { contact.margin } else { margin(self.timeout) };
        self.timeout.saturating_sub(margin * 5 / 2)
    }

    /// Returns whether the session is terminated, so that no request can succeed any more.
    pub(super) fn is_over(&self) -> bool {
        self.client.state().is_terminated()
    }

    /// Returns the number of the driver's connection that serves the session, or served it last.
    /// Each reconnection gets another number.
    pub(super) fn connection(&self) -> Option<u64> {
        self.tunnel.connection()
    }

    /// Registers a claim that waits for a notification from the serving member, until the result is
    /// dropped. Pulses are then more frequent, so that a silent member is soon replaced by another.
    /// If there is only one member, nothing is registered.
    pub(super) fn watching(&self) -> Watching {
        let several = self.tunnel.members.are_several();
        if several && self.watched.by.fetch_add(1, Relaxed) == 0 {
            self.watched.begun.notify_one();
        }
        Watching(several.then(|| self.watched.clone()))
    }

    /// Returns the time until the next pulse.
    fn pause(&self, margin: Duration) -> Duration {
        let (now, contact) = (self.clock.now(), self.contact());
        match now.since(contact.last_write) > self.timeout {
            true => (self.timeout / 5).saturating_sub(now.since(contact.last)).max(margin / 4),
            false => margin,
        }
    }

    /// Returns whether no pulse is due: there is nothing to prove, and a member has replied
    /// recently.
    fn is_in_contact(&self) -> bool {
        let (now, contact) = (self.clock.now(), self.contact());
        now.since(contact.last_write) > self.timeout && now.since(contact.last) < self.timeout / 5
    }

    fn contact(&self) -> MutexGuard<'_, Contact> {
        // No code that can panic runs between two consistent states.
        locked(&self.contact)
    }

    /// Returns the time until which the session certainly lives. Relies only on the rates of
    /// clocks.
    pub(super) fn certain_until(&self) -> Moment {
        let certain = self.contact().certain;
        certain.plus(self.timeout)
    }

    /// Sends requests that only read.
    pub(super) async fn read<'a, T, F>(&'a self, send: impl Fn(&'a Client) -> F) -> Answer<T>
    where
        F: Future<Output = Answer<T>>,
    {
        self.send(send, Contact::read).await
    }

    /// Sends requests of which at least one is a write.
    pub(super) async fn write<'a, T, E: Blames, F>(
        &'a self,
        send: impl Fn(&'a Client) -> F,
    ) -> std::result::Result<T, E>
    where
        F: Future<Output = std::result::Result<T, E>>,
    {
        self.send(send, Contact::written).await
    }

    /// Sends requests, and reports the times of sending and of the reply to `answered`. A denied
    /// request was not executed, so it is sent again if the password has changed.
    async fn send<'a, T, E: Blames, F>(
        &'a self,
        send: impl Fn(&'a Client) -> F,
        answered: fn(&mut Contact, Moment, Moment),
    ) -> std::result::Result<T, E>
    where
        F: Future<Output = std::result::Result<T, E>>,
    {
        loop {
            let changes = self.login.changes.load(Relaxed);
            let sent = self.clock.now();
            let answer = send(&self.client).await;
            match &answer {
                Ok(_) => answered(&mut self.contact(), sent, self.clock.now()),
                Err(fault) if fault.fault() == Some(&Fault::NoAuth) => {
                    if self.login.has_changed_since(changes, &self.client).await {
                        continue;
                    }
                }
                Err(fault) => self.blame(fault),
            }
            return answer;
        }
    }
}

impl Session {
    /// Reconnects if the session has moved. Such a session is alive, but the leader considers it to
    /// be at another member, because an older request to move the session there arrived late.
    /// Reconnecting moves the session back. Otherwise this member would reject every write
    /// indefinitely.
    fn blame(&self, error: &impl Blames) {
        if error.fault() == Some(&Fault::SessionMoved) {
            self.tunnel.begin_anew();
        }
    }
}

/// An error that may be caused by a fault that the driver reported.
pub(super) trait Blames {
    fn fault(&self) -> Option<&Fault>;
}

impl Blames for Fault {
    fn fault(&self) -> Option<&Fault> {
        Some(self)
    }
}

impl Blames for (Fault, Option<Fault>) {
    /// Returns the second fault, which is the cause of the first, or the first if there is no
    /// second.
    fn fault(&self) -> Option<&Fault> {
        Some(self.1.as_ref().unwrap_or(&self.0))
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
async fn connect(
    url: &ZooKeeperUrl,
    digest: Option<&str>,
    tunnel: &Tunnel,
    runtime: &Handle,
) -> Result<Client> {
    let mut connector = Client::connector().with_session_timeout(url.session);
    if let Some(digest) = digest {
        connector = connector.with_auth("digest", digest.as_bytes());
    }
    // The tunnel itself leaves a silent member, so this limit is for all members together. The
    // driver pings after 3/8 of this limit, so our pulses come first.
    connector = connector.with_connection_timeout(url.session * 3 / 5);
    let host = tunnel.host.clone();
    // The driver spawns its task on the runtime on which it is called.
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
            let what = "no ZooKeeper server accepted the session";
            let hint = format!(
                "check the hosts and ports in the URL, and check that a majority of the ensemble \
                 is running{over_tls}"
            );
            let error = Error::new(ErrorKind::Unreachable, what).with_hint(hint);
            // The driver only notices that its connection to the tunnel has ended.
            match (tunnel.members.fault(), fault) {
                (Some(why), _) => error.with_source(why),
                (None, Some(fault)) => error.with_source(fault),
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

    // S72
    #[test]
    fn session_is_certain_only_from_requests_proven_by_a_write() {
        let mut contact = Contact::new(Duration::from_millis(1_000), true, at(0));
        // Any number of replies to reads proves nothing.
        for beat in 1..=9 {
            contact.read(at(beat * 1_000), at(beat * 1_000 + 5));
        }
        assert_eq!(contact.certain, at(0));
        // A write proves the requests that were answered a margin before it was sent, but not
        // itself.
        contact.written(at(9_500), at(9_600));
        assert_eq!(contact.certain, at(8_000));
        contact.written(at(10_590), at(10_595));
        assert_eq!(
            contact.certain,
            at(9_000),
            "requests answered less than a margin earlier are not proven"
        );
        contact.written(at(10_600), at(10_700));
        assert_eq!(contact.certain, at(9_500));
    }

    // S72
    #[test]
    fn write_after_a_pause_does_not_prove_the_session() {
        let mut contact = Contact::new(Duration::from_millis(1_000), true, at(0));
        contact.read(at(1_000), at(1_001));
        // The client is paused for nearly the whole session, and then a write succeeds.
        contact.written(at(14_000), at(14_001));
        assert_eq!(contact.certain, at(1_000));
    }

    #[test]
    fn the_margin_is_a_tenth_and_never_below_half_a_tick() {
        let second = Duration::from_secs(1);
        assert_eq!(margin(second * 60), second * 6);
        assert_eq!(margin(second * 15), second * 3 / 2);
        // The shortest sessions with ticks of 2 s and of 3 s.
        assert_eq!(margin(second * 4), second);
        assert_eq!(margin(second * 6), second * 3 / 2);
    }

    // F48
    #[test]
    fn possibly_long_tick_makes_the_margin_long() {
        let second = Duration::from_secs(1);
        // It is only known that two ticks are not longer than the session.
        assert_eq!(first_margin(second * 15, second * 15), (second * 15 / 4, false));
        // The granted session is the shortest one.
        assert_eq!(first_margin(second * 15, second * 20), (second * 5, true));
        assert_eq!(first_margin(second * 2, second * 4), (second, true));
        assert_eq!(first_margin(second * 4, second * 4), (second, true));
        // A server that shortens a session does not reveal its shortest one.
        assert_eq!(first_margin(second * 60, second * 40), (second * 10, false));
    }

    #[test]
    fn number_of_recorded_replies_is_bounded() {
        let mut contact = Contact::new(Duration::from_millis(1_000), true, at(0));
        for n in 0..10_000 {
            contact.read(at(n * 500), at(n * 500 + 1));
            contact.read(at(n * 500 + 10), at(n * 500 + 11));
        }
        assert!(contact.answered.len() <= 65);
    }
}
