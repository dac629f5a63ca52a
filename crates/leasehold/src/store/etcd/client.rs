//! A small client of etcd's: one connection to one member at a time, and the next member when that
//! one does not answer.
//!
//! Every request that we send may be sent again to another member: what it does is decided by the
//! keys that it names. [`Answered::repeated`] tells that an earlier sending may have been done, too.
//!
//! A member that has lost its leader says so at once, since every request demands a leader. A member
//! that was stopped says nothing: a request that is not answered within [`ANSWER`] condemns the
//! connection, and so does one that its caller gave up after [`SUSPECT`] where there is another member
//! to go to. The only member is left for a new connection to it, if it has answered nothing at all for
//! [`SUSPECT_ALONE`]: the network may have lost the old one without a word, and a member that is merely
//! slow must not be made slower. The streams of a condemned connection end with it.
//!
//! Not the crate `etcd-client`: it builds its messages with `protoc`, which would have to be installed
//! wherever leasehold is built; it says nothing of a member that is silent; and its keep-alive is to be
//! watched from outside. The few messages that we send are written down in [`proto`](super::proto).
//!
//! Requests are polled by the caller; timers and connections live on the client's own runtime.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prost::Message;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use super::fault::{Failure, unreachable};
use super::proto::{AuthenticateRequest, AuthenticateResponse, StatusRequest, StatusResponse};
use super::url::{Credentials, EtcdUrl, Tls};
use crate::error::{Error, ErrorKind, Result};

/// How long one member may take to answer where there is another.
const ANSWER: Duration = Duration::from_millis(1_500);
/// How long the only member may.
const ANSWER_ALONE: Duration = Duration::from_secs(5);
/// A request that was given up after less than this says nothing about the member.
const SUSPECT: Duration = Duration::from_millis(100);
/// For how long the only member answers nothing before a request that was given up says something.
const SUSPECT_ALONE: Duration = Duration::from_secs(1);

/// What a member tells of itself.
const STATUS: &str = "/etcdserverpb.Maintenance/Status";

/// Requests to a cluster.
pub(super) struct Client {
    endpoints: Vec<Endpoint>,
    credentials: Option<Credentials>,
    runtime: Handle,
    current: Mutex<Current>,
    /// The generation of the current connection, for those who live on it.
    moved: watch::Sender<u64>,
    /// One authenticates for all: it costs etcd a tenth of a second.
    authenticating: tokio::sync::Mutex<()>,
    sent: AtomicU64,
    quiet: Mutex<Quiet>,
}

/// Since when the current member says nothing.
struct Quiet {
    /// It last answered something.
    heard: Instant,
    /// Since then, it was first asked something.
    asked: Option<Instant>,
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
    pub(super) fn new(url: &EtcdUrl, runtime: &Handle) -> Result<Self> {
        let endpoints = url.endpoints.iter().map(|e| endpoint(e, url.tls.as_ref()));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        // Not all clients of one URL to the same member.
        let dice = crate::claim::ClaimId::random()?.as_u128();
        let at = usize::try_from(dice % endpoints.len().max(1) as u128).unwrap_or(0);
        let Some(first) = endpoints.get(at) else {
            return Err(Error::new(ErrorKind::Config, "the URL names no member"));
        };
        let channel = connect(first, runtime);
        let current = Current { generation: 0, at, channel, token: None, no_users: false };
        Ok(Self {
            endpoints,
            credentials: url.credentials.clone(),
            runtime: runtime.clone(),
            current: Mutex::new(current),
            moved: watch::Sender::new(0),
            authenticating: tokio::sync::Mutex::new(()),
            sent: AtomicU64::new(0),
            quiet: Mutex::new(Quiet { heard: Instant::now(), asked: None }),
        })
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
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
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
            Failure::Token(Error::new(ErrorKind::Denied, "the token of our user does not last"))
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
            Err(Failure::Final(error)) if error.to_string().contains("not enabled") => {
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
            Failure::Final(Error::new(ErrorKind::Corrupt, "etcd's token is not text: report this"))
        })?;
        self.current().token = Some(token);
        Ok(())
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
                    let tried = self.once(&connection, path, request.clone()).await;
                    if matches!(tried, Err(Failure::Passing(_))) {
                        repeated = true;
                        self.condemn(connection.generation);
                    }
                    tried
                }
                Err(failure) => Err(failure),
            };
            match tried {
                Ok(answer) => return Ok(Answered { answer, repeated }),
                Err(Failure::Passing(_)) if left > 0 => {}
                Err(Failure::Token(_)) if left > 0 => self.forget_token(),
                Err(failure) => return Err(failure),
            }
        }
    }

    /// What the member that we talk to runs, if it tells us.
    pub(super) async fn version(&self) -> Option<String> {
        let status = self.call::<_, StatusResponse>(STATUS, StatusRequest {}).await.ok()?;
        Some(status.answer.version)
    }

    /// The members of the URL that do not answer, or say that they have no leader: each is asked for
    /// itself, all at once, on a connection of its own.
    pub(super) async fn silent(&self) -> Vec<String> {
        let token = self.connection().await.ok().and_then(|connection| connection.token);
        let ask = |endpoint: &Endpoint| {
            let channel = connect(endpoint, &self.runtime);
            let connection = Connection { generation: 0, channel, token: token.clone() };
            let asked = async move {
                let mut grpc = Grpc::new(connection.channel.clone());
                grpc.ready().await.map_err(|e| Failure::Passing(unreachable(cause(&e))))?;
                let request = connection.with_metadata(StatusRequest {});
                let path = PathAndQuery::from_static(STATUS);
                let codec = ProstCodec::<StatusRequest, StatusResponse>::default();
                grpc.unary(request, path, codec).await.map_err(Failure::from).map(drop)
            };
            let answered = self.runtime.spawn(async move {
                let answer = tokio::time::timeout(ANSWER, asked).await;
                !matches!(answer, Err(_) | Ok(Err(Failure::Passing(_))))
            });
            (endpoint.uri().authority().map(ToString::to_string).unwrap_or_default(), answered)
        };
        let asked: Vec<_> = self.endpoints.iter().map(ask).collect();
        let mut silent = Vec::new();
        for (member, answered) in asked {
            if !answered.await.unwrap_or(false) {
                silent.push(member);
            }
        }
        silent
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
        let mut grpc = Grpc::new(connection.channel.clone()).max_decoding_message_size(usize::MAX);
        let request = connection.with_metadata(request);
        let answered = async {
            grpc.ready().await.map_err(|e| Failure::Passing(unreachable(cause(&e))))?;
            let path = PathAndQuery::from_static(path);
            let answer = grpc.unary(request, path, ProstCodec::<Q, A>::default()).await;
            Ok(answer?.into_inner())
        };
        self.in_time(connection.generation, answered).await
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
        let (limit, suspect) = match self.endpoints.len() {
            1 => (ANSWER_ALONE, SUSPECT_ALONE),
            _ => (ANSWER, SUSPECT),
        };
        let mut since = Instant::now();
        self.quiet().asked.get_or_insert(since);
        let mut asked = Asked { client: self, generation, since, heard, suspect, given_up: true };
        let mut work = pin!(work);
        let answer = loop {
            let sleep = {
                let _context = self.runtime.enter();
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
            if heard() <= since {
                self.condemn(generation);
                let what = format!("no answer within {limit:?}");
                break Err(Failure::Passing(unreachable(what)));
            }
            since = heard();
        };
        asked.given_up = false;
        answer
    }

    /// The current member has answered something.
    pub(super) fn has_answered(&self) {
        *self.quiet() = Quiet { heard: Instant::now(), asked: None };
    }

    fn quiet(&self) -> MutexGuard<'_, Quiet> {
        // No code that can panic runs between two consistent states.
        self.quiet.lock().unwrap_or_else(PoisonError::into_inner)
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
    since: Instant,
    heard: &'a (dyn Fn() -> Instant + Sync),
    suspect: Duration,
    given_up: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut silent_since = (self.heard)().max(self.since);
        if self.client.endpoints.len() == 1 {
            let quiet = self.client.quiet();
            silent_since = quiet.asked.unwrap_or(silent_since.max(quiet.heard));
        }
        if self.given_up && silent_since.elapsed() > self.suspect {
            self.client.condemn(self.generation);
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
        .map_err(|e| config(format!("{url} is no address of a member")).because(cause(&e)))?
        .connect_timeout(ANSWER)
        .tcp_nodelay(true);
    let Some(tls) = tls else { return Ok(endpoint) };
    let read = |what: &str, path: &str| {
        std::fs::read(path).map_err(|e| config(format!("cannot read {what}={path:?}")).because(e))
    };
    let mut options = ClientTlsConfig::new();
    options = match &tls.ca {
        Some(path) => options.ca_certificate(Certificate::from_pem(read("ca", path)?)),
        None => options.with_native_roots(),
    };
    if let (Some(cert), Some(key)) = (&tls.cert, &tls.key) {
        options = options.identity(Identity::from_pem(read("cert", cert)?, read("key", key)?));
    }
    endpoint.tls_config(options).map_err(|e| {
        config("the certificates of the URL cannot be used: PEM files are needed".into())
            .because(cause(&e))
    })
}

/// The deepest cause, on one line.
fn cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string().chars().filter(|c| !c.is_control()).take(200).collect()
}
