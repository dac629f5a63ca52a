//! `s3://bucket/folder`: objects in Amazon S3, or in what speaks its protocol.
//!
//! - *What is atomic*: a write that names what it replaces (`If-Match`) or that it replaces nothing
//!   (`If-None-Match`). Of several at once one is done; 412 and 409 tell the others that they were late. Each
//!   object begins with a random line, so that no version comes again. An endpoint that
//!   does not know these headers is found out before anything is locked (`proof.rs`).
//! - *Whose clock*: nothing ends by itself here. Each session says how long it lives since it was written
//!   last, and whoever looks judges ([`lasting`](crate::lasting)): by our own clock since we first saw what
//!   is there, or by the stamps of the servers, between `Last-Modified` and `Date` (`dates.rs`). A single
//!   look is enough; and no wall clock of any client comes into it. A client believes in its session for less
//!   than that, by what the servers' clocks may be apart.
//! - *What a look shows* is what was written last: so says S3 of itself, and others of themselves. It is taken on trust
//!   where nothing follows from it. Who finds a session over writes in its place, if it is still what was seen:
//!   if that was an old state, it is refused, and nobody is taken for dead.
//! - *A write whose answer is lost*: the driver repeats nothing; a look tells (`shared.rs`). One that a proxy or the store
//!   repeats is recognized by its digits in what is there (`lasting.rs`).
//! - *Many requests at once* have lanes (`lanes.rs`): a client has a bounded number of them under way, and renewals never
//!   wait behind anything else, nor behind an object that hangs.
//! - *What is left*: a lock's object stays, for it remembers its last token. What a client leaves that died (its
//!   session, and marks) is not removed by anybody, but by a lifecycle rule where there is one: see
//!   docs/stores/s3.md.
//! - *What it costs*: a request each for a look and for a write. A pair is two writes, where nobody came in between;
//!   three requests otherwise. A client that holds or waits writes its session once in a fifth of it.

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

/// How long it may take until it is known that a bucket can keep locks.
const PROOF: Duration = Duration::from_secs(10);
/// How long an answer may take, at least and at most: as long as a session waits for its next touch.
const ANSWER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
/// The least time that a look of a renewal is given, however short the lease.
const LOOK: Duration = Duration::from_millis(50);
/// How long the list of all keys may take.
const LISTING: Duration = Duration::from_secs(60);
/// The largest value: some thousand claims.
const LARGEST: usize = 1_000_000;
/// The longest key behind its folder, as elsewhere.
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

/// Opens the store of a URL. Its connections and tasks run on `runtime`. It costs one request, or
/// eleven when a folder is first used from an endpoint.
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

/// The locks in these objects.
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
        let limit = (url.session / 5).clamp(ANSWER[0], ANSWER[1]);
        let lanes = Arc::<Lanes>::default();
        let link = Link::new(store, url.clone(), LARGEST, lanes.clone(), limit);
        let longest_key = url.prefix.len() + LONGEST_KEY;
        let lasting = Arc::new(Lasting::new(link, longest_key, LARGEST, dates::SKEW));
        Self { url, lasting, lanes, limit, round_trips: AtomicU64::new(0), runtime }
    }

    /// On our runtime, since the caller's may have neither timers nor I/O, and for so long at most.
    async fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        asked: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // The timer is made there too: it belongs to the runtime in which it was made.
        let asking = self.runtime.spawn(async move { timeout(limit, asked).await });
        // Dropped, what has not been sent is not sent any more.
        let _ends = Ends::new(&asking);
        match asking.await {
            Ok(Ok(told)) => told,
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
        // Each request has its own limit, from when its turn comes (`lanes.rs`); a create may be three of them.
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
                        Err(_) => Err(fault::unreachable(url, "no answer in time")),
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
        let careless = self.ask(PROOF, async move { proof::told(&lasting, &url).await }).await?;
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
    // The stamps are of whole seconds, and one more look shows it.
    promised.recovery += Duration::from_secs(2) + options.poll;
    promised.notes = std::iter::once(durability(cloud)).chain(NOTES.iter().cloned()).collect();
    promised
}

/// What the endpoint keeps over a crash, as far as the cloud documents it.
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
