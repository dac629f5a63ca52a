//! Requests to the replicas of a server: to one replica at a time, and to the next one when it does
//! not answer.
//!
//! Any replica can execute any request, and every request may be executed more than once (see the
//! [store](super)). So a request that fails without an answer is sent again to the next replica.
//! Each replica gets it once, and the first one gets it again on a new connection, because a pooled
//! connection may have been closed by a replica that restarted. [`Reply::repeated`] reports that an
//! earlier copy may have been executed too.
//!
//! A replica is replaced by the next one if a connection to it fails, or if it answers no request
//! for [`ANSWER`]. Callers with short leases give up earlier. When such a caller gives up, the next
//! replica is used only if the current one has answered nothing since the caller's request was
//! sent, at least [`DOUBT`] before. A wrong suspicion costs one poll of each waiter. The pooled
//! connections are closed with the replica, because the network may have dropped all of them.
//!
//! Replicas over different stores would grant one lock twice. So before a client uses another
//! replica, it checks that the replica reports the same identity of the store as the first one did.
//!
//! Requests are polled by the caller. Connections and timers belong to the client's own runtime.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioTimer;
use leasehold_core::kit::{Encryption, Escaped, Host, Password, locked};
use leasehold_core::{ClaimId, Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::connect::Connector;
use super::fault::{invalid, refused, unreachable};
use super::url::{HttpUrl, Server};
use crate::wire::{EVENT_STREAM, StoreView};

/// How long a replica may answer nothing while a request waits, if there is another replica.
const ANSWER: Duration = Duration::from_millis(1_500);
/// How long the only replica may answer nothing while a request waits.
const ANSWER_ALONE: Duration = Duration::from_secs(5);
/// How long a replica must have answered nothing when a caller gives up.
const DOUBT: Duration = Duration::from_millis(250);
/// The content type of requests and of their answers.
const JSON: &str = "application/json";
/// How long an unused connection is kept: less than servers and most proxies keep one.
const IDLE: Duration = Duration::from_secs(20);
/// The longest answer, in bytes.
const LONGEST: usize = 256 << 20;

/// The replicas of a server.
pub(super) struct Replicas {
    connectors: Vec<Connector>,
    authorities: Vec<String>,
    base: String,
    token: Option<Password>,
    runtime: Handle,
    current: Mutex<Current>,
    /// The generation of the current replica, which rises when the replica is replaced.
    moved: watch::Sender<u64>,
    /// The identity of the store, from the replica that was used first.
    identity: OnceLock<String>,
}

struct Current {
    generation: u64,
    at: usize,
    pool: Pool,
    /// The time of the replica's last answer.
    last_reply: Instant,
    /// Whether the replica is known to have the same store as the first one.
    is_same_store: bool,
}

type Pool = Client<Connector, Full<Bytes>>;

/// A request that any replica can execute.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) method: Method,
    /// The path and the query, from `/v1` on.
    pub(super) path: String,
    /// The body: JSON, or empty.
    pub(super) body: Bytes,
    /// Whether executing the request twice has the same effect as executing it once.
    pub(super) repeatable: bool,
}

/// The answer to a request.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
    /// Whether an earlier copy of the request was not answered and may have been executed.
    pub(super) repeated: bool,
}

/// A request to one replica, which is sent when `response` is awaited.
struct Sending<F> {
    generation: u64,
    is_same_store: bool,
    response: F,
}

/// Why one attempt has no answer.
struct Lapse {
    error: Error,
    /// Whether nothing was sent.
    unsent: bool,
}

impl fmt::Debug for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicas").field("all", &self.authorities).finish_non_exhaustive()
    }
}

impl Replicas {
    /// Creates the replicas. The first request connects.
    pub(super) fn new(url: HttpUrl, runtime: &Handle) -> Result<Self> {
        let host = |server: &Server| match server {
            Server::Tcp(host) => Some(host.clone()),
            Server::Unix(_) => None,
        };
        let hosts: Vec<Host> = url.servers.iter().filter_map(host).collect();
        let encryption = url.tls.as_ref().map(|tls| Encryption::of(tls, &hosts)).transpose()?;
        let encryption = encryption.map(Arc::new);
        let connector = |server| Connector::new(server, encryption.clone(), runtime.clone());
        let authorities: Vec<String> = url.servers.iter().map(|s| s.authority()).collect();
        let connectors: Vec<Connector> = url.servers.into_iter().map(connector).collect();
        let random = ClaimId::random()?;
        // The clients of one URL are spread over the replicas.
        let at = usize::try_from(random.as_u128() % connectors.len().max(1) as u128).unwrap_or(0);
        let Some(first) = connectors.get(at) else {
            return Err(Error::new(ErrorKind::Config, "the URL names no server"));
        };
        let pool = pool(first.clone(), runtime);
        let last_reply = Instant::now();
        let current = Current { generation: 0, at, pool, last_reply, is_same_store: true };
        Ok(Self {
            connectors,
            authorities,
            base: url.base,
            token: url.token,
            runtime: runtime.clone(),
            current: Mutex::new(current),
            moved: watch::Sender::new(0),
            identity: OnceLock::new(),
        })
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Returns the number of replicas.
    pub(super) fn count(&self) -> usize {
        self.connectors.len()
    }

    /// Requests the description of the store. From then on, every replica must have the same store.
    pub(super) async fn store(&self) -> Result<StoreView> {
        let reply = self.send(&about_store()).await?;
        let view: StoreView = serde_json::from_slice(&reply.body).map_err(|why| invalid(&why))?;
        self.identity.get_or_init(|| view.identity.clone());
        Ok(view)
    }

    /// Checks that the current replica has the expected store.
    async fn check_store(&self) -> Result<(), (u64, Lapse)> {
        let (generation, reply) = self.once(self.begin(&about_store(), JSON)).await?;
        let error = match refused(reply.status, &reply.body) {
            Some(error) => Some(error),
            None => match serde_json::from_slice::<StoreView>(&reply.body) {
                Err(why) => Some(invalid(&why)),
                Ok(view) if self.identity.get().is_none_or(|id| *id == view.identity) => None,
                Ok(_) => {
                    let what = "the servers of the URL have different stores";
                    let hint = "name only servers that were started with the same --store";
                    Some(Error::new(ErrorKind::Config, what).with_hint(hint))
                }
            },
        };
        if let Some(error) = error {
            return Err((generation, Lapse { error, unsent: true }));
        }
        let mut current = locked(&self.current);
        if current.generation == generation {
            current.is_same_store = true;
        }
        Ok(())
    }

    /// Sends a request to one replica after another, until one answers it.
    pub(super) async fn send(&self, request: &Request) -> Result<Reply> {
        let mut left = self.connectors.len();
        let mut repeated = false;
        loop {
            let sending = self.begin(request, JSON);
            let sent = match sending.is_same_store {
                true => self.once(sending).await,
                false => match self.check_store().await {
                    Ok(()) => continue,
                    Err(lapse) => Err(lapse),
                },
            };
            let (generation, lapse) = match sent {
                Ok((generation, reply)) => match refused(reply.status, &reply.body) {
                    None => return Ok(Reply { repeated, ..reply }),
                    // Another replica may reach the store.
                    Some(error) if self.is_outage_of_replica(&error) => {
                        (generation, Lapse { error, unsent: false })
                    }
                    Some(error) => return Err(error),
                },
                Err(lapse) => lapse,
            };
            self.leave(generation);
            repeated |= !lapse.unsent;
            if left == 0 || !(request.repeatable || lapse.unsent) {
                return Err(lapse.error);
            }
            left -= 1;
        }
    }

    /// Sends a request once.
    async fn once<F>(&self, sending: Sending<F>) -> Result<(u64, Reply), (u64, Lapse)>
    where
        F: Future<Output = Result<Response<Incoming>, Failed>>,
    {
        let Sending { generation, response, .. } = sending;
        let mut work = pin!(whole(response));
        let limit = if self.connectors.len() > 1 { ANSWER } else { ANSWER_ALONE };
        let sent = Instant::now();
        let mut doubt = Doubt { replicas: self, generation, sent, given_up: true };
        let mut since = sent;
        let done = loop {
            let sleep = {
                let _context = self.runtime.enter();
                tokio::time::sleep(limit.saturating_sub(since.elapsed()))
            };
            tokio::select! {
                biased;
                done = &mut work => break done,
                () = sleep => {}
            }
            match self.last_reply(generation) {
                Some(last_reply) if last_reply > since => since = last_reply,
                _ => {
                    let error = Error::no_reply(limit);
                    break Err(Lapse { error, unsent: false });
                }
            }
        };
        doubt.given_up = false;
        match done {
            Ok(reply) => {
                self.has_answered(generation);
                Ok((generation, reply))
            }
            Err(lapse) => Err((generation, lapse)),
        }
    }

    /// Sends a request that the replica answers after `wait` at the latest. Fails if the replica is
    /// replaced. Needs a runtime with timers.
    pub(super) async fn wait(&self, request: &Request, wait: Duration) -> Result<Reply> {
        let Sending { generation, response, .. } = self.begin(request, JSON);
        let work = async {
            tokio::select! {
                biased;
                reply = whole(response) => reply.map_err(|lapse| lapse.error),
                () = self.left(generation) => {
                    Err(Error::new(ErrorKind::Unreachable, "the replica was replaced"))
                }
            }
        };
        let limit = wait + ANSWER_ALONE;
        let reply = tokio::time::timeout(limit, work).await;
        let reply = reply.unwrap_or_else(|_| Err(Error::no_reply(limit)));
        let reply = reply.inspect_err(|_| self.leave(generation))?;
        self.has_answered(generation);
        match refused(reply.status, &reply.body) {
            None => Ok(reply),
            Some(error) => {
                if self.is_outage_of_replica(&error) {
                    self.leave(generation);
                }
                Err(error)
            }
        }
    }

    /// Returns whether another replica may execute a call after this answer.
    fn is_outage_of_replica(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::Unreachable && self.connectors.len() > 1
    }

    /// Opens a stream of server-sent events, and returns it with the generation of its replica.
    /// Needs a runtime with timers.
    pub(super) async fn stream(&self, request: &Request) -> Result<(u64, Incoming), (u64, Error)> {
        let Sending { generation, response, .. } = self.begin(request, EVENT_STREAM);
        let opening = async {
            let response = response.await.map_err(|why| lapse(why).error)?;
            if response.status().is_success() {
                return Ok(response.into_body());
            }
            let reply = whole(async { Ok(response) }).await.map_err(|lapse| lapse.error)?;
            let what = "the server did not open an event stream";
            let error = refused(reply.status, &reply.body);
            Err(error.unwrap_or_else(|| Error::new(ErrorKind::Corrupt, what)))
        };
        let limit = tokio::time::timeout(ANSWER_ALONE, opening);
        let opened = limit.await.unwrap_or_else(|_| Err(Error::no_reply(ANSWER_ALONE)));
        match opened {
            Ok(body) => Ok((generation, body)),
            Err(error) => Err((generation, error)),
        }
    }

    /// Prepares a request to the current replica. Nothing is sent before the response is awaited.
    fn begin(
        &self,
        request: &Request,
        accept: &'static str,
    ) -> Sending<impl Future<Output = Result<Response<Incoming>, Failed>> + use<>> {
        let current = locked(&self.current);
        let authority = &self.authorities[current.at];
        let mut built = http::Request::builder()
            .method(request.method.clone())
            .uri(format!("http://{authority}{}{}", self.base, request.path))
            .header(ACCEPT, HeaderValue::from_static(accept));
        if !request.body.is_empty() {
            built = built.header(CONTENT_TYPE, HeaderValue::from_static(JSON));
        }
        if let Some(token) = &self.token {
            let bearer = HeaderValue::try_from(format!("Bearer {}", token.now()));
            if let Ok(mut bearer) = bearer {
                bearer.set_sensitive(true);
                built = built.header(AUTHORIZATION, bearer);
            }
        }
        let sending = built
            .body(Full::new(request.body.clone()))
            .map(|request| current.pool.request(request))
            .map_err(Failed::Invalid);
        Sending {
            generation: current.generation,
            is_same_store: current.is_same_store,
            response: async move { sending?.await.map_err(Failed::Http) },
        }
    }

    /// Stops using a replica that does not answer, and closes its connections.
    pub(super) fn leave(&self, generation: u64) {
        let mut current = locked(&self.current);
        if current.generation != generation {
            return;
        }
        current.generation += 1;
        current.at = (current.at + 1) % self.connectors.len();
        current.pool = pool(self.connectors[current.at].clone(), &self.runtime);
        current.last_reply = Instant::now();
        // A single server is not checked again. It may have restarted with an empty store, which
        // clients find out when they renew their claims.
        current.is_same_store = self.connectors.len() == 1;
        let now = current.generation;
        drop(current);
        self.moved.send_replace(now);
    }

    /// Waits until this generation is not the current one.
    pub(super) async fn left(&self, generation: u64) {
        let mut moved = self.moved.subscribe();
        // The sender exists as long as `self`.
        let _ = moved.wait_for(|now| *now != generation).await;
    }

    /// Records that the replica of this generation has answered, if it is the current one.
    pub(super) fn has_answered(&self, generation: u64) {
        let mut current = locked(&self.current);
        if current.generation == generation {
            current.last_reply = Instant::now();
        }
    }

    fn last_reply(&self, generation: u64) -> Option<Instant> {
        let current = locked(&self.current);
        (current.generation == generation).then_some(current.last_reply)
    }
}

fn about_store() -> Request {
    let (path, body) = ("/v1/store".to_owned(), Bytes::new());
    Request { method: Method::GET, path, body, repeatable: true }
}

/// A request that was sent. If it is dropped unanswered, its caller has given up.
struct Doubt<'a> {
    replicas: &'a Replicas,
    generation: u64,
    sent: Instant,
    given_up: bool,
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        let Self { replicas, generation, sent, given_up } = *self;
        let is_silent =
            || replicas.last_reply(generation).is_some_and(|last_reply| last_reply <= sent);
        if given_up && sent.elapsed() >= DOUBT && is_silent() {
            replicas.leave(generation);
        }
    }
}

/// Why a request has no response.
enum Failed {
    Invalid(http::Error),
    Http(hyper_util::client::legacy::Error),
}

/// Receives a complete answer.
async fn whole(
    response: impl Future<Output = Result<Response<Incoming>, Failed>>,
) -> Result<Reply, Lapse> {
    let (parts, body) = response.await.map_err(lapse)?.into_parts();
    let body = Limited::new(body, LONGEST).collect().await.map_err(|why| Lapse {
        error: unreachable("the connection was lost before the response was complete", &*why),
        unsent: false,
    })?;
    Ok(Reply { status: parts.status, body: body.to_bytes(), repeated: false })
}

fn lapse(why: Failed) -> Lapse {
    match why {
        Failed::Invalid(why) => {
            let error = Error::new(ErrorKind::Config, "cannot send a request").with_source(why);
            Lapse { error, unsent: true }
        }
        Failed::Http(why) => {
            let unsent = why.is_connect();
            let what = match unsent {
                true => "cannot connect to the server",
                false => "the connection to the server was lost",
            };
            Lapse { error: unreachable(what, &why), unsent }
        }
    }
}

/// Parses the body of a reply.
pub(super) fn parsed<T: DeserializeOwned>(reply: &Reply) -> Result<T> {
    serde_json::from_slice(&reply.body).map_err(|why| invalid(&why))
}

/// Returns the fields of a flat value as a query.
pub(super) fn query(fields: &impl Serialize) -> String {
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(fields) else {
        return String::new();
    };
    let pair = |(key, value): (String, serde_json::Value)| match value {
        serde_json::Value::String(text) => format!("{key}={}", Escaped(&text)),
        other => format!("{key}={other}"),
    };
    fields.into_iter().map(pair).collect::<Vec<_>>().join("&")
}

fn pool(connector: Connector, runtime: &Handle) -> Pool {
    Client::builder(OnRuntime(runtime.clone()))
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE)
        .build(connector)
}

/// Runs the tasks of connections on the client's runtime.
#[derive(Clone)]
struct OnRuntime(Handle);

impl<F> hyper::rt::Executor<F> for OnRuntime
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        drop(self.0.spawn(task));
    }
}
