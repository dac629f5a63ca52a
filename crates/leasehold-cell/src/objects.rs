//! `s3://bucket/folder`: locks in objects of Amazon S3, or of a server with the same protocol.
//!
//! - *Atomicity.* A write is atomic, and conditional on the version that it replaces (`If-Match`)
//!   or on the absence of an object (`If-None-Match`). One of several concurrent writes is done,
//!   and the others get 412 or 409. Each object begins with a random line, so no version is reused.
//!   An endpoint that ignores these headers is detected before a lock is granted (`proof.rs`).
//! - *Clock.* Nothing expires on its own. Each session contains its lifetime since its last write,
//!   and each client decides whether it has expired ([`lasting`](crate::lasting)). It uses the time
//!   since it first saw the session, by its own clock, or the servers' timestamps `Last-Modified`
//!   and `Date` (`dates.rs`). With timestamps one read is enough, and no client's wall clock
//!   matters. The time for which a client relies on its session is shorter than that lifetime by
//!   the possible difference between the servers' clocks.
//! - *Reads* return the latest write, according to S3 and other providers. Leasehold relies on this
//!   only where a stale result is harmless. A client that considers a session dead replaces it only
//!   if it has not changed. After a stale read this write is refused, and the session counts as
//!   alive.
//! - *Lost replies.* The driver repeats nothing, and the next read shows what was done
//!   (`shared.rs`). A write that a proxy or the store repeats is recognized by the digits in the
//!   object (`lasting.rs`).
//! - *Concurrent requests* are divided into lanes (`lanes.rs`). Each lane has a limited number of
//!   requests, and renewals never wait for other requests or for an object that hangs.
//! - *Left-over objects.* A lock's object stays, because it contains the last token. The session
//!   and the markers of a crashed client stay too, unless a lifecycle rule deletes them. See
//!   docs/stores/s3.md.
//! - *Costs.* Each read and each write is a request. Acquiring and releasing a lock takes two
//!   writes if no other client has written since this client's last write, and three requests
//!   otherwise. A client that holds or waits renews its session five times per `session_ms`.

mod bucket;
mod dates;
mod fault;
pub mod fence;
mod lanes;
mod link;
mod proof;
mod url;

#[doc(no_inline)]
pub use object_store;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Ends, redacted};
use leasehold_core::store::{ClockModel, Durability, Guarantees, Store, StoreInfo, Survival};
use leasehold_core::{Error, Opening, Result};
use object_store::ObjectStore;
use tokio::runtime::Handle;
use tokio::time::timeout;

use self::lanes::{LANE, Lane, Lanes};
use self::link::Link;
use self::url::{Cloud, ObjectsUrl};
use crate::cells::{Answer, Cells, Request, System};
use crate::lasting::Lasting;
use crate::store::{CellStore, Options, promises};

/// Time limit for the check that a bucket can store locks. Some servers take seconds for concurrent
/// writes of one object.
const PROOF: Duration = Duration::from_secs(10);
/// Minimum time for each read of a renewal, however short the lease.
const LOOK: Duration = Duration::from_millis(50);
/// Time limit for listing all keys.
const LISTING: Duration = Duration::from_secs(60);
/// Maximum size of a value. There is room for several thousand claims.
const LARGEST: usize = 1_000_000;
/// Maximum length of a key after its folder.
const LONGEST_KEY: usize = 250;

/// The cells of one folder of a bucket.
#[derive(Debug)]
struct Objects {
    url: ObjectsUrl,
    lasting: Arc<Lasting<Link>>,
    lanes: Arc<Lanes>,
    limit: Duration,
    round_trips: AtomicU64,
    runtime: Handle,
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(Arc::new(connect(&url, &runtime).await?) as Arc<dyn Store>) })
}

/// Opens the store of a URL. Its connections and tasks run on `runtime`. Costs one request, or
/// eleven when a folder is first used through an endpoint.
///
/// # Cancel safety
/// Cancel safe: dropping the future leaves only small objects that record the test of the endpoint.
///
/// # Errors
/// - [`ErrorKind::Config`](leasehold_core::ErrorKind::Config): the URL is invalid, or the bucket or
///   endpoint cannot store locks.
/// - [`ErrorKind::Denied`](leasehold_core::ErrorKind::Denied): the credentials lack a permission.
/// - [`ErrorKind::Unreachable`](leasehold_core::ErrorKind::Unreachable): no response within 10 s.
pub async fn connect(url: &str, runtime: &Handle) -> Result<CellStore> {
    let mut parsed = ObjectsUrl::parse(url)?;
    let store = bucket::of(&mut parsed)?;
    on(store, parsed, redacted(url), runtime).await
}

/// Returns the store on this object store.
async fn on(
    store: Arc<dyn ObjectStore>,
    url: ObjectsUrl,
    shown: String,
    runtime: &Handle,
) -> Result<CellStore> {
    let objects = Objects::new(store, url, runtime.clone());
    let (lasting, url) = (objects.lasting.clone(), objects.url.clone());
    objects.ask(PROOF, async move { proof::once(&lasting, &url).await }).await?;
    let url = &objects.url;
    let options = Options {
        prefix: url.prefix.clone(),
        session: url.session,
        poll: url.poll,
        ..Options::default()
    };
    let promised = guarantees(&url.cloud, objects.system(), &options);
    let identity = format!("{}/{}", url.place(), url.prefix);
    let info = StoreInfo::new(shown, promised).identified(identity);
    Ok(CellStore::new(Arc::new(objects), options, info, runtime))
}

impl Objects {
    fn new(store: Arc<dyn ObjectStore>, url: ObjectsUrl, runtime: Handle) -> Self {
        let limit = url.limit();
        let lanes = Arc::<Lanes>::default();
        let link = Link::new(store, url.clone(), LARGEST, lanes.clone(), limit);
        let longest_key = url.prefix.len() + LONGEST_KEY;
        let lasting = Arc::new(Lasting::new(link, longest_key, LARGEST, dates::SKEW));
        Self { url, lasting, lanes, limit, round_trips: AtomicU64::new(0), runtime }
    }

    /// Runs the call on our runtime with a time limit, because the caller's runtime may have
    /// neither timers nor I/O.
    async fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        asked: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // The timer is created on our runtime too, because a timer belongs to the runtime in which
        // it was created.
        let asking = self.runtime.spawn(async move { timeout(limit, asked).await });
        // If the call is dropped, requests that were not sent yet are not sent any more.
        let _ends = Ends::new(&asking);
        match asking.await {
            Ok(Ok(reply)) => reply,
            Ok(Err(_)) => Err(fault::unreachable(&self.url, "no reply in time")),
            Err(_) => Err(fault::unreachable(&self.url, "the runtime was shut down")),
        }
    }
}

#[async_trait]
impl Cells for Objects {
    fn system(&self) -> &System {
        self.lasting.system()
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        self.round_trips.fetch_add(1, Relaxed);
        let lasting = self.lasting.clone();
        let lane = match requests[..] {
            [Request::Touch { .. }] => Lane::Free,
            _ => Lane::Ordinary,
        };
        // Each request has its own time limit, which starts at its turn (`lanes.rs`). A create may
        // take three requests.
        let all = LANE.scope(lane, async move { lasting.run(requests).await });
        self.ask(self.limit * 8, all).await
    }

    async fn looks(&self, keys: Vec<String>, limit: Duration) -> Vec<Result<Answer>> {
        self.round_trips.fetch_add(1, Relaxed);
        let count = keys.len();
        let (lasting, lanes, url) = (self.lasting.clone(), self.lanes.clone(), self.url.clone());
        let limit = limit.min(self.limit).max(LOOK);
        let looks = async move {
            let mut keys: Vec<(usize, String)> = keys.into_iter().enumerate().collect();
            fastrand::shuffle(&mut keys);
            let looks = keys.into_iter().map(|(at, key)| {
                let (lasting, lanes, url) = (&lasting, &lanes, &url);
                async move {
                    let lane = lanes.of(&key);
                    let get = lasting.run(vec![Request::Get { key: key.clone() }]);
                    let looked = timeout(limit, LANE.scope(lane, get)).await;
                    lanes.note(&key, looked.is_err());
                    let answer = match looked {
                        Ok(Ok(mut answers)) => Ok(answers.pop().unwrap_or(Answer::Absent)),
                        Ok(Err(error)) => Err(error),
                        Err(_) => Err(fault::unreachable(url, "no reply in time")),
                    };
                    (at, answer)
                }
            });
            let mut answers = join_all(looks).await;
            answers.sort_unstable_by_key(|(at, _)| *at);
            Ok(answers.into_iter().map(|(_, answer)| answer).collect::<Vec<_>>())
        };
        match self.ask(limit * 2, looks).await {
            Ok(answers) => answers,
            Err(error) => {
                (0..count).map(|_| Err(Error::new(error.kind(), error.reason()))).collect()
            }
        }
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let (lasting, prefix) = (self.lasting.clone(), prefix.to_owned());
        self.ask(LISTING, async move { lasting.keys(&prefix).await }).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let (lasting, url) = (self.lasting.clone(), self.url.clone());
        let finding = async move { proof::finding(&lasting, &url, PROOF).await };
        let careless = self.ask(PROOF * (proof::ROUNDS + 1), finding).await?;
        let careless = careless.map(|what| {
            let why = "each lock is an object that is written conditionally, so two clients could \
                       hold the same lock";
            Finding::broken("conditions", what, why, fault::CONDITIONAL)
        });
        let mut found: Vec<Finding> = careless.into_iter().collect();
        found.push(Finding::note(
            "lifecycle",
            format!(
                "leasehold cannot check whether a lifecycle rule deletes objects under {}",
                self.url.prefix
            ),
            "such a rule frees a lock that is held for longer than the rule's age; a rule for the \
             objects that crashed clients leave behind is useful",
        ));
        Ok(found)
    }

    fn round_trips(&self) -> u64 {
        self.round_trips.load(Relaxed)
    }
}

fn guarantees(cloud: &Cloud, system: &System, options: &Options) -> Guarantees {
    let mut promised = promises(system, options);
    promised.clock = ClockModel::Wall;
    promised.on_clock_step = Survival::Fenced;
    (promised.grant, promised.token) = (Durability::Machine, Durability::Machine);
    promised.on_store_crash = Survival::Exclusive;
    promised.on_failover = Survival::Unsafe;
    promised.on_partition = Survival::Exclusive;
    // The timestamps have whole seconds, and one more poll is needed to see the change.
    promised.recovery += Duration::from_secs(2) + options.poll;
    promised.notes = std::iter::once(durability(cloud)).chain(NOTES.iter().cloned()).collect();
    promised
}

/// Returns what is documented about the endpoint's durability.
fn durability(cloud: &Cloud) -> Cow<'static, str> {
    Cow::Borrowed(match cloud.scheme() {
        "s3" => {
            "Durability depends on the endpoint. Amazon S3 replies once an object is stored in several places. A \
             server of your own may reply before it writes to disk."
        }
        _ => {
            "Durability depends on the endpoint. An emulator or a server of your own may reply before it writes to \
             disk."
        }
    })
}

const NOTES: &[Cow<'static, str>] = &[
    Cow::Borrowed(
        "UNSAFE across copies: replication to another bucket, region or cluster is delayed, and each copy checks \
         write conditions on its own. All clients must use the same bucket and endpoint.",
    ),
    Cow::Borrowed(
        "Clients detect a dead client by the servers' timestamps, which must agree within 2 s. If a server clock is set \
         forward, a session can expire early. Two clients may then hold until the first one's next renewal. Check \
         tokens.",
    ),
    Cow::Borrowed(
        "A lifecycle rule that removes the object of a held lock frees the lock. Its tokens then restart from the \
         clients' clocks. Versioning is harmless but keeps every change.",
    ),
    Cow::Borrowed(
        "While a client lives, its claims end with their leases. If the client dies, they end with its \
         session, whatever lease was requested.",
    ),
    Cow::Borrowed(
        "Each poll and each change is a billed request. Changes of a contended lock are retried when another client \
         was faster. Anyone with write access to the folder can change and remove all locks.",
    ),
];
