//! A small client for etcd. It has one connection to one member at a time, and changes to the next
//! member if this one does not respond.
//!
//! **Requests can be repeated.** Every request may be sent again to another member, because its
//! effect depends only on the keys that it names. [`Answered::repeated`] is set if an earlier
//! attempt may have been executed as well.
//!
//! **Unreachable members.** A member that has lost its leader returns an error immediately, because
//! every request demands a leader. A paused member does not respond. If a request is not answered
//! within [`ANSWER`], the client condemns the connection. The streams of the connection end with
//! it, and so do the keep-alives under way on them.
//!
//! **Callers that give up early.** A request that its caller dropped sooner proves nothing, because
//! the caller may be impatient or the cluster slow. But a silent connection must not stay in use
//! because all callers are impatient. If nothing was answered for [`DOUBT`], the client *probes*
//! the connection by a small read that needs a majority and that no caller can drop. The connection
//! is condemned if neither the probe nor anything else is answered until the silence is [`SILENCE`]
//! long. If the URL has only one member, the client opens a new connection to it, because the
//! network may have lost the old one without an error.
//!
//! **Why not the crate `etcd-client`.** It builds its messages with `protoc`, which would have to
//! be installed wherever leasehold is built. It does not report a member that does not respond, and
//! its keep-alives must be supervised by the caller. [`proto`](super::proto) defines the few
//! messages that leasehold uses.
//!
//! Requests are polled by the caller. Timers and connections live on the client's own runtime.

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

use super::fault::{Failure, cause, unreachable};
use super::proto::{
    AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse, StatusRequest,
    StatusResponse,
};
use super::requests;
use super::url::{Credentials, EtcdUrl};
use leasehold_core::kit::Tls;
use leasehold_core::{Error, ErrorKind, Result};

/// Time limit for a reply if the URL has other members.
pub(super) const ANSWER: Duration = Duration::from_millis(1_500);
/// Time limit for a reply if the URL has a single member.
const ANSWER_ALONE: Duration = Duration::from_secs(5);
/// Time without any reply after which the connection is probed.
const DOUBT: Duration = Duration::from_millis(250);
/// Time without any reply after which the connection is condemned.
const SILENCE: Duration = Duration::from_secs(1);
/// Minimum time limit for the reply to a probe. A request that is not answered within this time
/// starts a probe.
const PROOF: Duration = Duration::from_millis(500);

/// The method that returns the status of a member.
const STATUS: &str = "/etcdserverpb.Maintenance/Status";

/// A client that sends requests to an etcd cluster.
pub(super) struct Client {
    endpoints: Vec<Endpoint>,
    /// The key that a probe reads.
    probed: Vec<u8>,
    credentials: Option<Credentials>,
    runtime: Handle,
    current: Mutex<Current>,
    /// The generation of the current connection. Streams on a connection watch it.
    moved: watch::Sender<u64>,
    /// Lets one task authenticate for all, because authentication costs etcd a tenth of a second.
    authenticating: tokio::sync::Mutex<()>,
    sent: AtomicU64,
    quiet: Mutex<Quiet>,
    /// Handle for the tasks that probe a connection.
    me: Weak<Self>,
}

/// Since when the current member has not responded.
struct Quiet {
    /// Time of the last reply.
    last_reply: Instant,
    /// Time of the first request since the last reply.
    asked: Option<Instant>,
    /// Whether a task is probing the connection.
    doubted: bool,
}

struct Current {
    generation: u64,
    at: usize,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    /// Whether the cluster has authentication disabled, even if the URL names a user.
    no_users: bool,
}

/// One connection to one member.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) generation: u64,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

/// A reply.
#[derive(Debug)]
pub(super) struct Answered<A> {
    pub(super) answer: A,
    /// Whether the same request was sent before without a reply. The earlier one may still be
    /// executed.
    pub(super) repeated: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("members", &self.endpoints.len()).finish_non_exhaustive()
    }
}

impl Client {
    /// Creates a client. It connects at the first request.
    pub(super) fn new(url: &EtcdUrl, runtime: &Handle) -> Result<Arc<Self>> {
        let endpoints = url.endpoints.iter().map(|e| endpoint(e, url.tls.as_ref()));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        // The clients of one URL should not all use the same member.
        let random = leasehold_core::ClaimId::random()?.as_u128();
        let at = usize::try_from(random % endpoints.len().max(1) as u128).unwrap_or(0);
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
            quiet: Mutex::new(Quiet { last_reply: Instant::now(), asked: None, doubted: false }),
            me: me.clone(),
        }))
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Returns how many requests were sent, including those on streams.
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

    /// Returns the generation of the current connection, and the index of its member in the URL.
    pub(super) fn place(&self) -> (u64, usize) {
        let current = self.current();
        (current.generation, current.at)
    }

    /// Returns the current connection, with the auth token of the user.
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
        let request = AuthenticateRequest { name: user.clone(), password: password.now() };
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
            // The password is being changed, and the file will soon contain the new one.
            Err(Failure::Final(error))
                if error.kind() == ErrorKind::Denied && password.is_changeable() =>
            {
                return Err(Failure::Slow(password.rejected("etcd", error)));
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
        password.accepted();
        self.current().token = Some(token);
        Ok(())
    }

    /// Makes the next request check again whether the cluster has users.
    pub(super) fn forget_no_users(&self) {
        self.current().no_users = false;
    }

    /// Forgets the user's auth token, so that the next request gets a new one.
    pub(super) fn forget_token(&self) {
        let mut current = self.current();
        current.token = None;
        current.no_users = false;
    }

    /// Abandons a connection that does not work, and changes to the next member.
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

    /// Waits until another connection is the current one.
    pub(super) async fn condemned(&self, generation: u64) {
        let mut moved = self.moved.subscribe();
        // `self` owns the sender, so the channel cannot close.
        let _ = moved.wait_for(|now| *now != generation).await;
    }

    /// Sends a request until a member answers it, and changes to another member if one does not
    /// respond. Makes at most one attempt more than there are members.
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
                        // Another member may be faster. A single member is not faster on a new
                        // connection.
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
                // Without a user, no other token can be requested.
                Err(Failure::Token(_)) if left > 0 && self.credentials.is_some() => {
                    self.forget_token();
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Returns the status of each member in the URL. Queries all members at the same time, each on
    /// its own connection. The status is `None` if a member does not respond in time or has no
    /// leader.
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
                    // The member is reachable, but refuses to report its status to this user.
                    Ok(Err(_)) => Some(StatusResponse::default()),
                }
            });
            (endpoint.uri().authority().map(ToString::to_string).unwrap_or_default(), answered)
        };
        let asked: Vec<_> = self.endpoints.iter().enumerate().map(ask).collect();
        let mut answers = Vec::with_capacity(asked.len());
        for (member, answered) in asked {
            answers.push((member, answered.await.unwrap_or_default()));
        }
        answers
    }

    /// Sends one request on one connection.
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

    /// Limits the time of a request. If it is not answered in time, its connection is condemned.
    pub(super) async fn in_time<T>(
        &self,
        generation: u64,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let since = Instant::now();
        self.while_replying(generation, &|| since, work).await
    }

    /// Limits the time of one of many requests that are answered one after the other. Silence is
    /// measured from the last reply to any of them, whose time `last_reply` returns.
    pub(super) async fn while_replying<T>(
        &self,
        generation: u64,
        last_reply: &(dyn Fn() -> Instant + Sync),
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let mut since = Instant::now();
        self.quiet().asked.get_or_insert(since);
        let mut in_flight = InFlight { client: self, generation, given_up: true };
        let mut work = pin!(work);
        // A single member gets its full time, as long as no caller gives up.
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
            if last_reply() <= since && !std::mem::replace(&mut doubted, true) {
                self.doubt(generation);
            } else if last_reply() <= since {
                self.condemn(generation);
                let what = format!("no response within {limit:?}");
                break Err(Failure::Passing(unreachable(what)));
            } else {
                (since, doubted) = (last_reply(), alone);
            }
        };
        in_flight.given_up = false;
        answer
    }

    /// Records that the current member has answered something.
    pub(super) fn has_answered(&self) {
        let mut quiet = self.quiet();
        (quiet.last_reply, quiet.asked) = (Instant::now(), None);
    }

    /// Probes this connection, because a caller gave up waiting for a reply. Does nothing unless
    /// the member has answered nothing for some time. One task probes for all callers.
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
        let read = RangeRequest { keys_only: true, ..requests::get(self.probed.clone()) };
        self.count_sent();
        self.runtime.spawn(async move {
            let begun = Instant::now();
            let proof = connection.unary::<_, RangeResponse>("/etcdserverpb.KV/Range", read);
            let proof = tokio::time::timeout(limit, proof).await;
            let Some(client) = me.upgrade() else { return };
            let has_replied = {
                let mut quiet = client.quiet();
                quiet.doubted = false;
                quiet.last_reply > begun
            };
            match proof {
                Err(_) if has_replied => {}
                Err(_) | Ok(Err(Failure::Passing(_))) => client.condemn(generation),
                // An error reply also proves that the member is reachable.
                Ok(_) if client.current().generation == generation => client.has_answered(),
                Ok(_) => {}
            }
        });
    }

    fn quiet(&self) -> MutexGuard<'_, Quiet> {
        // No code that can panic runs between two consistent states.
        locked(&self.quiet)
    }

    /// Opens a stream of requests and replies, and returns it when the server begins to reply.
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
    /// Sends a request and returns its reply, without a time limit.
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
        // A member without a leader must return an error instead of blocking the request.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            metadata.insert("token", token.clone());
        }
        request
    }
}

/// A request under way. If this value is dropped before the reply, the caller has given up.
struct InFlight<'a> {
    client: &'a Client,
    generation: u64,
    given_up: bool,
}

impl Drop for InFlight<'_> {
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
        .map_err(|e| config(format!("invalid member address {url:?}")).with_source(cause(&e)))?
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
