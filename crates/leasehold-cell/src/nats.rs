//! `nats://a,b,c/bucket`: locks in a key-value bucket of NATS JetStream, which is a stream that
//! keeps one message per subject.
//!
//! - *Atomicity.* The stream accepts a message only if the last message of its subject has the
//!   expected sequence number. With several replicas, a majority has stored the message before the
//!   reply is sent. Each message gets a higher number, so no number is reused unless the stream
//!   loses acknowledged messages.
//! - *Clock.* The servers' wall clocks decide when a session's message expires. A leader uses its
//!   own clock, so the clocks of all servers must agree within one second (`grain`).
//! - *Stale reads.* A leader that was paused or partitioned and then replaced answers reads until
//!   it notices this. It may have expired sessions by its own clock that are alive on the other
//!   servers. So a session is considered dead only after a majority has accepted a marker in its
//!   place (`session.rs`). A reply that is older than what this client knows is discarded
//!   (`link.rs`).
//! - *Repeated writes.* Servers that reconnect can pass on a request twice. While the first one is
//!   being processed, the second one is refused, and the client may get only the reply to the
//!   second one. So such a refusal leaves the write [in doubt](Answer::InDoubt) (`fault.rs`).
//! - *Notification.* The client that grants a lock notifies the new holder (`messenger.rs`). If the
//!   message is lost, the new holder finds out at its next poll.
//! - *Loss of data.* Servers that are killed and restarted with their disks lose nothing. A power
//!   cut can lose the last two minutes of acknowledged writes, unless the servers sync each write
//!   (`sync_interval: always`). Two clients may then hold the same lock, and new tokens continue
//!   from the wall clock.
//! - *A full bucket* (`max_bytes`) also refuses the renewal of sessions, so all holds would be
//!   lost. So the last fifth of the bucket is reserved for existing holders and waiters. Beyond
//!   four fifths, new names and new clients get an error.
//! - *Old queues.* An empty queue expires after one day, and one with only dead claims after a
//!   week. If the bucket writes markers for expired keys (`nats kv add --marker-ttl`), queues are
//!   kept permanently. The server writes such a marker unconditionally, so the marker could replace
//!   a value that was written at that moment. Sessions are safe, because clients stop renewing a
//!   session shortly before it expires.

mod bucket;
mod doctor;
mod fault;
pub mod fence;
mod link;
mod messenger;
mod url;

#[doc(no_inline)]
pub use async_nats;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_nats::jetstream::stream::Info;
use async_nats::jetstream::{self, Context};
use async_nats::{Auth, Client, ConnectOptions};
use async_trait::async_trait;
use futures_util::future::try_join_all;
use futures_util::{StreamExt, stream};
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Host, redacted};
use leasehold_core::store::{
    ClockModel, Durability, Guarantees, Store, StoreInfo, Survival, Wakeup,
};
use leasehold_core::{Error, ErrorKind, Opening, Result};
use tokio::runtime::Handle;
use tokio::time::timeout;

use self::bucket::Missing;
use self::link::Link;
use self::messenger::{NatsMessenger, News};
use self::url::{Login, NatsUrl};
use crate::cells::{Answer, CROWD, Cells, IDLE, Messenger, Request, SLOW, System};
use crate::store::{CellStore, Options, promises};

/// Time limit for each of the first requests.
const CONNECT: Duration = Duration::from_secs(3);
/// Minimum and maximum of the time limit for connecting to one address, including TLS and the
/// login, which take five round trips. A client that reconnects has the time until its session's
/// next renewal.
const ADDRESS: [Duration; 2] = [Duration::from_millis(1_500), Duration::from_secs(3)];
/// Minimum and maximum of the time limit for a reply, which depends on the interval between
/// renewals of the session.
const ANSWER: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(3)];
/// Minimum time for each read of a renewal, however short the lease.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum number of concurrent reads.
const AT_ONCE: usize = 256;
/// Time limit for listing all keys.
const LISTING: Duration = Duration::from_secs(20);
/// Interval of pings. The client switches to another server if three of them get no reply.
const PING: Duration = Duration::from_secs(1);
/// The longest pause between two attempts to reconnect.
const AGAIN: Duration = Duration::from_millis(500);
/// Maximum difference between the servers' clocks. A message may expire early by this time.
const GRAIN: Duration = Duration::from_secs(1);
/// Maximum delay of an expiry. Lifetimes have whole seconds, and are checked about once per second.
const LATE: Duration = Duration::from_secs(3);
/// Maximum time until a new leader is elected.
const ELECTION: Duration = Duration::from_secs(10);
/// The longest pause between two polls, with and without notifications.
const POLL: [Duration; 2] = [Duration::from_secs(2), Duration::from_millis(100)];
/// Maximum size of a value, and of the message's headers.
const LARGEST: usize = 1_000_000;
const HEADERS: usize = 1_024;

/// The cells of one bucket.
struct Nats {
    system: System,
    url: NatsUrl,
    client: Client,
    context: Context,
    link: Arc<Link>,
    news: Arc<News>,
    messenger: Option<NatsMessenger>,
    limit: Duration,
    round_trips: AtomicU64,
    runtime: Handle,
}

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nats").field("url", &self.url).finish_non_exhaustive()
    }
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(Arc::new(connect(&url, &runtime).await?) as Arc<dyn Store>) })
}

/// Opens the store of a URL. Its connection and tasks run on `runtime`. Creates a missing bucket,
/// unless the URL contains `create=no`.
///
/// # Cancel safety
/// Cancel safe: dropping the future leaves at most a new bucket.
///
/// # Errors
/// - [`ErrorKind::Config`]: the URL is invalid, or the server or bucket cannot store locks.
/// - [`ErrorKind::Denied`]: the user lacks a permission.
/// - [`ErrorKind::Unreachable`]: no response within 6 s for each host of the URL.
pub async fn connect(url: &str, runtime: &Handle) -> Result<CellStore> {
    let (parsed, shown) = (NatsUrl::parse(url)?, redacted(url));
    let servers = parsed.servers();
    let home = runtime.clone();
    // The caller's runtime may have no I/O.
    let opened = runtime.spawn(async move { Nats::open(parsed, home).await }).await;
    let (nats, info) =
        opened.map_err(|_| fault::unreachable(&servers, "the runtime was shut down"))??;
    let is_notified = nats.messenger.is_some();
    let options = Options {
        prefix: nats.url.prefix.clone(),
        session: nats.url.session,
        poll: nats.url.poll.unwrap_or(if is_notified { POLL[0] } else { POLL[1] }),
        ..Options::default()
    };
    let promised = guarantees(&nats.system, &options, info.config.num_replicas, is_notified);
    // A bucket of the same name that is created later is a different store.
    let identity = format!("nats:{}/{}/{}", info.created, nats.url.bucket, options.prefix);
    let info = StoreInfo::new(shown, promised).identified(identity);
    Ok(CellStore::new(Arc::new(nats), options, info, runtime))
}

impl Nats {
    async fn open(url: NatsUrl, runtime: Handle) -> Result<(Self, Info)> {
        let servers = url.servers();
        let news = Arc::new(News::default());
        let client = greeted(&url, &news).await?;
        let server = client.server_info();
        if doctor::version(&server.version).is_none_or(|version| version < doctor::LEAST) {
            let what = format!(
                "NATS at {servers} has version {}, which does not support keys with a time to live",
                server.version
            );
            let hint = "upgrade to NATS 2.11 or later, preferably 2.12.2 or later";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        let limit = (url.session / 5).clamp(ANSWER[0], ANSWER[1]);
        let mut context = match &url.domain {
            None => jetstream::new(client.clone()),
            Some(domain) => jetstream::with_domain(client.clone(), domain),
        };
        context.set_timeout(CONNECT);
        let found = match bucket::find(&url, &context).await {
            Ok(None) => bucket::make(&url, &context, server.cluster.is_some()).await.map(Some),
            found => found,
        };
        let info = match found {
            Ok(Some(info)) => info,
            Ok(None) => return Err(fault::unreachable(&servers, bucket::GONE_AGAIN)),
            Err(Missing::Failed(error)) => return Err(error),
            Err(Missing::Silent(why)) => {
                return Err(match news.take_violation(CONNECT * 2) {
                    Some(violation) => fault::denied(&url.bucket, &violation),
                    None => fault::unreachable(&servers, why),
                });
            }
        };
        bucket::check(&url, &info.config)?;
        context.set_timeout(limit);
        let (name, subjects) = (bucket::stream(&url.bucket), bucket::subjects(&url.bucket));
        let handle = context.get_stream_no_info(name).await;
        let handle = handle.map_err(|why| fault::unreachable(&servers, why))?;
        let link =
            Arc::new(Link::new(context.clone(), handle, subjects, servers, info.config.max_bytes));
        let messenger =
            NatsMessenger::new(client.clone(), news.clone(), &url.bucket, runtime.clone());
        let messenger = messenger.are_delivered().await?.then_some(messenger);
        // A permission violation by the test message is already handled, and must not be taken for
        // the cause of a later error.
        news.take_violation(CONNECT);
        let system = system(server.max_payload, &info);
        let round_trips = AtomicU64::new(0);
        let nats = Self {
            system,
            url,
            client,
            context,
            link,
            news,
            messenger,
            limit,
            round_trips,
            runtime,
        };
        Ok((nats, info))
    }

    /// Runs the call on our runtime with a time limit, because the caller's runtime may have no
    /// timers.
    async fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        asked: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // The timer is created on our runtime too, because a timer belongs to the runtime in which
        // it was created.
        let asked = self.runtime.spawn(async move { timeout(limit, asked).await }).await;
        let error = match asked {
            Ok(Ok(Err(error))) if error.kind() == ErrorKind::Unreachable => error,
            Ok(Ok(reply)) => return reply,
            Ok(Err(_)) => fault::unreachable(&self.url.servers(), "no reply in time"),
            Err(_) => fault::unreachable(&self.url.servers(), "the runtime was shut down"),
        };
        // NATS reports a missing permission in a separate message instead of a reply.
        Err(match self.news.take_violation(limit * 2) {
            Some(violation) => fault::denied(&self.url.bucket, &violation),
            None => error,
        })
    }
}

/// Connects and logs in. Connects only to the servers in the URL, and not to others that they
/// announce.
async fn greeted(url: &NatsUrl, news: &Arc<News>) -> Result<Client> {
    let servers = url.servers();
    let limit = (url.session / 5).clamp(ADDRESS[0], ADDRESS[1]);
    let (news, login) = (news.clone(), url.login.clone());
    // Each new connection reads the login again, because the password file may have changed.
    let login = move |_| std::future::ready(Ok(auth(&login)));
    let mut options = ConnectOptions::with_auth_callback(login)
        .name("leasehold")
        .connection_timeout(limit)
        .ping_interval(PING)
        .max_reconnects(None)
        .reconnect_delay_callback(|tries| {
            let tries = u32::try_from(tries).unwrap_or(u32::MAX);
            AGAIN.min(Duration::from_millis(20).saturating_mul(tries))
        })
        .ignore_discovered_servers()
        .event_callback(move |event| {
            news.send(event);
            std::future::ready(())
        });
    if let Some(tls) = &url.tls {
        options = options.require_tls(true);
        if let Some(ca) = tls.ca()? {
            options = options.add_root_certificates(ca.path().into());
        }
        if let Some((cert, key)) = tls.identity()? {
            options = options.add_client_certificate(cert.path().into(), key.path().into());
        }
    }
    let all: Vec<String> = url.hosts.iter().map(address).collect();
    // A host name usually has one or two addresses.
    let all_limit = 2 * limit * u32::try_from(all.len()).unwrap_or(1);
    let connected = timeout(all_limit, options.connect(all)).await;
    let connected = connected.map_err(|_| fault::unreachable(&servers, "no reply in time"))?;
    connected.map_err(|error| fault::connecting(&servers, &error))
}

/// Returns the credentials for a server.
fn auth(login: &Login) -> Auth {
    let mut auth = Auth::new();
    match login {
        Login::Nobody => {}
        Login::User(user, password) => {
            (auth.username, auth.password) = (Some(user.clone()), Some(password.now()));
        }
        Login::Token(token) => auth.token = Some(token.now()),
    }
    auth
}

fn address(host: &Host) -> String {
    format!("nats://{host}")
}

fn system(max_payload: usize, info: &Info) -> System {
    let most = usize::try_from(info.config.max_message_size).ok().filter(|most| *most > 0);
    let most = most.unwrap_or(max_payload).min(max_payload);
    let has_markers = info.config.subject_delete_marker_ttl.is_some_and(|ttl| !ttl.is_zero());
    System {
        longest_key: 250,
        largest_value: most.saturating_sub(HEADERS).min(LARGEST),
        crowd: CROWD,
        slow: SLOW,
        grain: GRAIN,
        forgets: false,
        looks_behind: true,
        idle: if has_markers { None } else { Some(IDLE) },
    }
}

#[async_trait]
impl Cells for Nats {
    fn system(&self) -> &System {
        &self.system
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        self.round_trips.fetch_add(1, Relaxed);
        let link = self.link.clone();
        let all = async move {
            try_join_all(requests.into_iter().map(|request| link.one(request))).await
        };
        self.ask(self.limit, all).await
    }

    async fn looks(&self, keys: Vec<String>, limit: Duration) -> Vec<Result<Answer>> {
        self.round_trips.fetch_add(1, Relaxed);
        let (link, servers, count) = (self.link.clone(), self.url.servers(), keys.len());
        let limit = limit.min(self.limit).max(LOOK);
        let looks = async move {
            let looks = keys.into_iter().map(|key| {
                let (link, servers) = (&link, &servers);
                async move {
                    let looked = timeout(limit, link.one(Request::Get { key })).await;
                    looked.unwrap_or_else(|_| Err(fault::unreachable(servers, "no reply in time")))
                }
            });
            Ok(stream::iter(looks).buffered(AT_ONCE).collect::<Vec<_>>().await)
        };
        match self.ask(limit * 2, looks).await {
            Ok(answers) => answers,
            Err(error) => {
                (0..count).map(|_| Err(Error::new(error.kind(), error.reason()))).collect()
            }
        }
    }

    fn messenger(&self) -> Option<&dyn Messenger> {
        self.messenger.as_ref().map(|messenger| messenger as &dyn Messenger)
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let (link, prefix) = (self.link.clone(), prefix.to_owned());
        self.ask(LISTING, async move { link.keys(&prefix).await }).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let (url, context) = (self.url.clone(), self.context.clone());
        let found = async move {
            match bucket::find(&url, &context).await {
                Ok(Some(info)) => Ok(info),
                Ok(None) => Err(fault::unreachable(&url.servers(), "the bucket was deleted")),
                Err(Missing::Silent(why)) => Err(fault::unreachable(&url.servers(), why)),
                Err(Missing::Failed(error)) => Err(error),
            }
        };
        let info = self.ask(CONNECT, found).await?;
        let server = self.client.server_info().version;
        Ok(doctor::judge(&self.url.bucket, &server, &info, self.messenger.is_some()))
    }

    fn round_trips(&self) -> u64 {
        self.round_trips.load(Relaxed)
    }
}

fn guarantees(system: &System, options: &Options, copies: usize, is_notified: bool) -> Guarantees {
    let mut promised = promises(system, options);
    promised.wakeup = if is_notified { Wakeup::Push } else { Wakeup::Poll };
    promised.evicted = promised.wakeup;
    promised.clock = ClockModel::Wall;
    promised.on_clock_step = Survival::Fenced;
    (promised.grant, promised.token) = (Durability::Machine, Durability::Machine);
    promised.on_store_crash = Survival::Exclusive;
    promised.recovery += LATE;
    if copies > 1 {
        promised.on_failover = Survival::Fenced;
        promised.recovery += ELECTION;
    } else {
        promised.on_failover = Survival::NotApplicable;
    }
    promised.on_partition = Survival::Exclusive;
    promised.notes = Cow::Borrowed(NOTES);
    promised
}

const NOTES: &[Cow<'static, str>] = &[
    Cow::Borrowed(
        "NATS replies before it writes to disk, and syncs every two minutes unless every server sets \
         sync_interval: always. A power cut can undo acknowledged grants, so two clients may hold. One server is \
         enough if others were stopped or partitioned.",
    ),
    Cow::Borrowed(
        "Sessions expire by the leading server's wall clock. All servers' clocks must agree within one second. \
         Otherwise, or if a clock is set, a change of leader can end a session early. Check tokens then.",
    ),
    Cow::Borrowed(
        "Jepsen found lost acknowledged messages in NATS 2.12.1 when files of a minority were damaged, and when one \
         machine crashed while others were slow: https://jepsen.io/analyses/nats-2.12.1.",
    ),
    Cow::Borrowed(
        "Tokens increase while the bucket keeps the lock's value, which is at least one day after its last use. After \
         that they restart from the clients' clocks, which must not be a day behind the last token.",
    ),
    Cow::Borrowed(
        "While a client lives, its claims end with their leases. If the client dies, they end with its \
         session, whatever lease was requested.",
    ),
    Cow::Borrowed(
        "Each poll and each change reads the whole queue, which holds a few thousand claims at most. Anyone with \
         write access to the bucket can change and remove all locks.",
    ),
];
