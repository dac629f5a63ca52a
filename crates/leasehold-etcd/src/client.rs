//! A small client of etcd's: one connection to one member at a time, and the next member when that
//! one does not answer.
//!
//! Every request that we send may be sent again to another member: what it does is decided by the
//! keys that it names. [`Answered::repeated`] tells that an earlier sending may have been done, too.
//!
//! A member that has lost its leader says so at once, since every request demands a leader. A member
//! that was stopped says nothing: a request that is not answered within [`ANSWER`] condemns the
//! connection, whose streams end with it, and the keep-alives that are under way on them.
//!
//! So what a caller gave up sooner proves nothing: it may have been impatient, and a cluster may be slow.
//! But nothing may be left of a silent connection because everybody is impatient. Where nothing at all
//! was answered for [`DOUBT`], the connection is *asked*, by one small reading that needs a majority and
//! that nobody gives up: if neither that nor anything else is answered until the silence is [`SILENCE`]
//! long, it is condemned. The only member is left for a new connection to it: the network may have lost
//! the old one without a word.
//!
//! Not the crate `etcd-client`: it builds its messages with `protoc`, which would have to be installed
//! wherever leasehold is built; it says nothing of a member that is silent; and its keep-alive is to be
//! watched from outside. The few messages that we send are written down in [`proto`](super::proto).
//!
//! Requests are polled by the caller; timers and connections live on the client's own runtime.

use leasehold_core::kit::locked;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use prost::Message;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use super::ask;
use super::fault::{Failure, cause, unreachable};
use super::proto::{
    AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse, StatusRequest,
    StatusResponse,
};
use super::url::{Credentials, EtcdUrl};
use leasehold_core::kit::Tls;
use leasehold_core::{Error, ErrorKind, Result};

/// How long one member may take to answer where there is another.
pub(super) const ANSWER: Duration = Duration::from_millis(1_500);
/// How long the only member may.
const ANSWER_ALONE: Duration = Duration::from_secs(5);
/// For how long nothing was answered before the connection is asked whether it is still there.
const DOUBT: Duration = Duration::from_millis(250);
/// For how long nothing was answered when it is given up.
const SILENCE: Duration = Duration::from_secs(1);
/// How long it has at least to answer that it is there.
const PROOF: Duration = Duration::from_millis(500);

/// What a member tells of itself.
const STATUS: &str = "/etcdserverpb.Maintenance/Status";

/// Requests to a cluster.
pub(super) struct Client {
    endpoints: Vec<Endpoint>,
    /// The key that is read to see whether somebody answers.
    probed: Vec<u8>,
    credentials: Option<Credentials>,
    runtime: Handle,
    current: Mutex<Current>,
    /// The generation of the current connection, for those who live on it.
    moved: watch::Sender<u64>,
    /// One authenticates for all: it costs etcd a tenth of a second.
    authenticating: tokio::sync::Mutex<()>,
    sent: AtomicU64,
    quiet: Mutex<Quiet>,
    /// What the tasks have of us that ask a connection.
    me: Weak<Self>,
}

/// Since when the current member says nothing.
struct Quiet {
    /// It last answered something.
    heard: Instant,
    /// Since then, it was first asked something.
    asked: Option<Instant>,
    /// A task asks whether it is there.
    doubted: bool,
}

struct Current {
    generation: u64,
    at: usize,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    /// The cluster has no users, whatever the URL says.
    no_users: bool,
}

/// One connection to one member.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) generation: u64,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answered<A> {
    pub(super) answer: A,
    /// An earlier sending of the same request was not answered, and may yet be done.
    pub(super) repeated: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("members", &self.endpoints.len()).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects with the first request.
    pub(super) fn new(url: &EtcdUrl, runtime: &Handle) -> Result<Arc<Self>> {
        let endpoints = url.endpoints.iter().map(|e| endpoint(e, url.tls.as_ref()));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        // Not all clients of one URL to the same member.
        let dice = leasehold_core::ClaimId::random()?.as_u128();
        let at = usize::try_from(dice % endpoints.len().max(1) as u128).unwrap_or(0);
        let Some(first) = endpoints.get(at) else {
            return Err(Error::new(ErrorKind::Config, "the URL names no etcd member"));
        };
        let channel = connect(first, runtime);
        let current = Current { generation: 0, at, channel, token: None, no_users: false };
        let probed = format!("{}leasehold", url.namespace).into_bytes();
        Ok(Arc::new_cyclic(|me| Self {
            endpoints,
            probed,
            credentials: url.credentials.clone(),
            runtime: runtime.clone(),
            current: Mutex::new(current),
            moved: watch::Sender::new(0),
            authenticating: tokio::sync::Mutex::new(()),
            sent: AtomicU64::new(0),
            quiet: Mutex::new(Quiet { heard: Instant::now(), asked: None, doubted: false }),
            me: me.clone(),
        }))
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// How many requests were sent, those on streams included.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(super) fn count_sent(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        // No code that can panic runs between two consistent states.
        locked(&self.current)
    }

    /// The generation of the connection in use, and which member of the URL it is to.
    pub(super) fn place(&self) -> (u64, usize) {
        let current = self.current();
        (current.generation, current.at)
    }

    /// The connection in use, with our user's token.
    pub(super) async fn connection(&self) -> Result<Connection, Failure> {
        let ready = |current: &Current| {
            let known = self.credentials.is_none() || current.token.is_some() || current.no_users;
            known.then(|| Connection {
                generation: current.generation,
                channel: current.channel.clone(),
                token: current.token.clone(),
            })
        };
        if let Some(connection) = ready(&self.current()) {
            return Ok(connection);
        }
        let _one = self.authenticating.lock().await;
        if let Some(connection) = ready(&self.current()) {
            return Ok(connection);
        }
        self.authenticate().await?;
        ready(&self.current()).ok_or_else(|| {
            let what = "etcd rejected an auth token right after issuing it";
            let hint = "check --auth-token and the clocks of the cluster's members";
            Failure::Token(Error::new(ErrorKind::Denied, what).with_hint(hint))
        })
    }

    async fn authenticate(&self) -> Result<(), Failure> {
        let Some(Credentials { user, password }) = &self.credentials else { return Ok(()) };
        let request = AuthenticateRequest { name: user.clone(), password: password.clone() };
        let connection = {
            let current = self.current();
            let (generation, channel) = (current.generation, current.channel.clone());
            Connection { generation, channel, token: None }
        };
        let path = "/etcdserverpb.Auth/Authenticate";
        let answer: AuthenticateResponse = match self.once(&connection, path, request).await {
            Ok(answer) => answer,
            Err(Failure::Final(error)) if error.reason().contains("not enabled") => {
                self.current().no_users = true;
                return Ok(());
            }
            Err(failure) => {
                if matches!(failure, Failure::Passing(_)) {
                    self.condemn(connection.generation);
                }
                return Err(failure);
            }
        };
        let token = answer.token.parse().map_err(|_| {
            let what = "etcd issued an invalid auth token";
            Failure::Final(Error::new(ErrorKind::Corrupt, what).with_hint("report this as a bug"))
        })?;
        self.current().token = Some(token);
        Ok(())
    }

    /// Whether the cluster has users now, the next request finds out.
    pub(super) fn forget_no_users(&self) {
        self.current().no_users = false;
    }

    /// Forgets our user's token, so that the next request gets a new one.
    pub(super) fn forget_token(&self) {
        let mut current = self.current();
        current.token = None;
        current.no_users = false;
    }

    /// Leaves a connection that is no good for the next member.
    pub(super) fn condemn(&self, generation: u64) {
        let mut current = self.current();
        if current.generation != generation {
            return;
        }
        current.generation += 1;
        current.at = (current.at + 1) % self.endpoints.len().max(1);
        if let Some(endpoint) = self.endpoints.get(current.at) {
            current.channel = connect(endpoint, &self.runtime);
        }
        let now = current.generation;
        drop(current);
        self.has_answered();
        self.moved.send_replace(now);
    }

    /// Resolves when this connection is not the current one any more.
    pub(super) async fn condemned(&self, generation: u64) {
        let mut moved = self.moved.subscribe();
        // The sender is ours.
        let _ = moved.wait_for(|now| *now != generation).await;
    }

    /// Sends a request until a member answers it; each member is asked once, and one whose
    /// connection or token had gone stale once more.
    pub(super) async fn call<Q, A>(
        &self,
        path: &'static str,
        request: Q,
    ) -> Result<Answered<A>, Failure>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let mut left = self.endpoints.len() + 1;
        let mut repeated = false;
        loop {
            left -= 1;
            let tried = match self.connection().await {
                Ok(connection) => {
                    match self.once(&connection, path, request.clone()).await {
                        // Another member may be faster; the only one is no faster on a new connection.
                        Err(Failure::Slow(error)) if self.endpoints.len() > 1 => {
                            Err(Failure::Passing(error))
                        }
                        tried => tried,
                    }
                    .inspect_err(|failure| {
                        if matches!(failure, Failure::Passing(_)) {
                            repeated = true;
                            self.condemn(connection.generation);
                        }
                    })
                }
                Err(failure) => Err(failure),
            };
            match tried {
                Ok(answer) => return Ok(Answered { answer, repeated }),
                Err(Failure::Passing(_)) if left > 0 => {}
                // Who has no user has no other token to come with.
                Err(Failure::Token(_)) if left > 0 && self.credentials.is_some() => {
                    self.forget_token();
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// What each member of the URL says of itself, asked all at once, each on its own connection;
    /// `None` for one that says nothing in time, or that it has no leader.
    pub(super) async fn each(&self, limit: Duration) -> Vec<(String, Option<StatusResponse>)> {
        let token = self.connection().await.ok().and_then(|connection| connection.token);
        let (at, ours) = {
            let current = self.current();
            (current.at, current.channel.clone())
        };
        let ask = |(n, endpoint): (usize, &Endpoint)| {
            let channel = if n == at { ours.clone() } else { connect(endpoint, &self.runtime) };
            let connection = Connection { generation: 0, channel, token: token.clone() };
            let answered = self.runtime.spawn(async move {
                let asked = connection.unary::<_, StatusResponse>(STATUS, StatusRequest {});
                match tokio::time::timeout(limit, asked).await {
                    Ok(Ok(status)) => Some(status),
                    Err(_) | Ok(Err(Failure::Passing(_))) => None,
                    // It is there, and does not tell everybody.
                    Ok(Err(_)) => Some(StatusResponse::default()),
                }
            });
            (endpoint.uri().authority().map(ToString::to_string).unwrap_or_default(), answered)
        };
        let asked: Vec<_> = self.endpoints.iter().enumerate().map(ask).collect();
        let mut told = Vec::with_capacity(asked.len());
        for (member, answered) in asked {
            told.push((member, answered.await.unwrap_or_default()));
        }
        told
    }

    /// One request on one connection.
    async fn once<Q, A>(
        &self,
        connection: &Connection,
        path: &'static str,
        request: Q,
    ) -> Result<A, Failure>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.count_sent();
        self.in_time(connection.generation, connection.unary(path, request)).await
    }

    /// What is not answered in time condemns its connection.
    pub(super) async fn in_time<T>(
        &self,
        generation: u64,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let since = Instant::now();
        self.while_heard(generation, &|| since, work).await
    }

    /// The same for one of many that are answered one after the other: silence counts from when any
    /// of them was `heard`.
    pub(super) async fn while_heard<T>(
        &self,
        generation: u64,
        heard: &(dyn Fn() -> Instant + Sync),
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let mut since = Instant::now();
        self.quiet().asked.get_or_insert(since);
        let mut asked = Asked { client: self, generation, given_up: true };
        let mut work = pin!(work);
        // The only member may take its time as long as nobody gives up.
        let alone = self.endpoints.len() == 1;
        let limit = if alone { ANSWER_ALONE } else { ANSWER };
        let mut doubted = alone;
        let answer = loop {
            let sleep = {
                let _context = self.runtime.enter();
                let limit = if doubted { limit } else { PROOF };
                tokio::time::sleep(limit.saturating_sub(since.elapsed()))
            };
            tokio::select! {
                biased;
                answer = &mut work => {
                    if !matches!(answer, Err(Failure::Passing(_))) {
                        self.has_answered();
                    }
                    break answer;
                }
                () = sleep => {}
            }
            if heard() <= since && !std::mem::replace(&mut doubted, true) {
                self.doubt(generation);
            } else if heard() <= since {
                self.condemn(generation);
                let what = format!("no response within {limit:?}");
                break Err(Failure::Passing(unreachable(what)));
            } else {
                (since, doubted) = (heard(), alone);
            }
        };
        asked.given_up = false;
        answer
    }

    /// The current member has answered something.
    pub(super) fn has_answered(&self) {
        let mut quiet = self.quiet();
        (quiet.heard, quiet.asked) = (Instant::now(), None);
    }

    /// Somebody gave up waiting for this connection. If it has answered nothing for some time, it is
    /// asked whether it is there, by one for all.
    fn doubt(&self, generation: u64) {
        let connection = {
            let current = self.current();
            if current.generation != generation {
                return;
            }
            let (channel, token) = (current.channel.clone(), current.token.clone());
            Connection { generation, channel, token }
        };
        let silent = {
            let mut quiet = self.quiet();
            let silent = quiet.asked.map_or(Duration::ZERO, |asked| asked.elapsed());
            if silent < DOUBT || std::mem::replace(&mut quiet.doubted, true) {
                return;
            }
            silent
        };
        let (me, limit) = (self.me.clone(), SILENCE.saturating_sub(silent).max(PROOF));
        let read = RangeRequest { keys_only: true, ..ask::get(self.probed.clone()) };
        self.count_sent();
        self.runtime.spawn(async move {
            let begun = Instant::now();
            let proof = connection.unary::<_, RangeResponse>("/etcdserverpb.KV/Range", read);
            let proof = tokio::time::timeout(limit, proof).await;
            let Some(client) = me.upgrade() else { return };
            let heard = {
                let mut quiet = client.quiet();
                quiet.doubted = false;
                quiet.heard > begun
            };
            match proof {
                Err(_) if heard => {}
                Err(_) | Ok(Err(Failure::Passing(_))) => client.condemn(generation),
                // Refused is answered, too.
                Ok(_) if client.current().generation == generation => client.has_answered(),
                Ok(_) => {}
            }
        });
    }

    fn quiet(&self) -> MutexGuard<'_, Quiet> {
        // No code that can panic runs between two consistent states.
        locked(&self.quiet)
    }

    /// Opens a stream of requests and answers. It is open once something was answered.
    pub(super) async fn stream<Q, A>(
        &self,
        connection: &Connection,
        path: &'static str,
        requests: mpsc::UnboundedReceiver<Q>,
    ) -> Result<Streaming<A>, Failure>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(connection.channel.clone()).max_decoding_message_size(usize::MAX);
        grpc.ready().await.map_err(|e| Failure::Passing(unreachable(cause(&e))))?;
        let requests = connection.with_metadata(UnboundedReceiverStream::new(requests));
        let path = PathAndQuery::from_static(path);
        let opened = grpc.streaming(requests, path, ProstCodec::<Q, A>::default()).await;
        Ok(opened?.into_inner())
    }
}

impl Connection {
    /// Sends a request, and gives its answer whenever it comes.
    async fn unary<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Failure>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        let request = self.with_metadata(request);
        grpc.ready().await.map_err(|e| Failure::Passing(unreachable(cause(&e))))?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(request, path, ProstCodec::<Q, A>::default()).await;
        Ok(answer?.into_inner())
    }

    fn with_metadata<Q>(&self, request: Q) -> Request<Q> {
        let mut request = Request::new(request);
        let metadata = request.metadata_mut();
        // A member without a leader must say so, and not let us wait.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            metadata.insert("token", token.clone());
        }
        request
    }
}

/// A request under way. Dropped, its caller has given it up.
struct Asked<'a> {
    client: &'a Client,
    generation: u64,
    given_up: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if self.given_up {
            self.client.doubt(self.generation);
        }
    }
}

fn connect(endpoint: &Endpoint, runtime: &Handle) -> Channel {
    let _context = runtime.enter();
    endpoint.connect_lazy()
}

fn endpoint(url: &str, tls: Option<&Tls>) -> Result<Endpoint> {
    let config = |why: String| Error::new(ErrorKind::Config, why);
    let endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|e| config(format!("invalid member address {url:?}")).because(cause(&e)))?
        .connect_timeout(ANSWER)
        .tcp_nodelay(true);
    match tls {
        None => Ok(endpoint),
        #[cfg(feature = "tls")]
        Some(tls) => super::tls::encrypted(endpoint, tls),
        #[cfg(not(feature = "tls"))]
        Some(_) => Err(leasehold_core::kit::no_tls()),
    }
}
