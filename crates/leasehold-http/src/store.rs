//! The stores `http:`, `https:` and `http+unix:`: the locks of a `leasehold serve`.
//!
//! A server forwards each call to the store behind it, and keeps no state of its own. The client
//! sends the whole claim with each call, so any replica of the server can execute it. The requests
//! and answers are listed in [`wire`].
//!
//! # The argument
//! - **What is atomic.** Each call is one request, which the server executes as one call of its
//!   store. The store behind the server makes it atomic.
//! - **Which clock.** Leases expire by the clock of the store behind the server. Answers contain
//!   durations, measured from when the answer was written. The client counts a lease from before it
//!   sent the request, as with every store. So a slow network makes the client assume a shorter
//!   lease than the store has granted, never a longer one.
//! - **A lost reply.** The claim ID determines the effect of a call, so the client sends the
//!   request again, to the next replica if there is one (`replicas`). A join is the exception. Some
//!   stores recognize a waiting claim only if it comes from the same client, and each replica is
//!   another client. So before a join is sent again, a renewal finds out whether the claim is in
//!   the queue. If the first copy is executed after that renewal, the claim has two queue positions
//!   for a moment. Only one of them is renewed, so the other one expires within a lease, as after a
//!   late request. A release that was sent more than once is reported as a release, because an
//!   earlier copy may have removed the claim. The eviction of all holders is not determined by an
//!   ID, so it is sent only once.
//! - **A repeated request.** A proxy may execute a request twice. The second copy of a join finds
//!   the claim, and the second copy of a renewal or of a release by the same ID changes nothing. A
//!   proxy that repeats a release after it lost the reply returns the second answer, "was not in
//!   the queue". The client then reports a loss, which is a false alarm. The opposite cannot
//!   happen.
//! - **A late request.** A join that a network delivers after its claim was released creates a
//!   claim that no client renews. It expires within its lease, as with every store. A late renewal
//!   never joins.
//! - **A late reply.** The answer to a request that the client has given up is dropped with its
//!   connection. HTTP/1.1 does not use a connection for the next request before the answer was
//!   read.
//! - **A crash or restart of a replica.** It loses nothing, since a replica has no state. Requests
//!   fail and are sent again, and the client polls for its waiters through another replica. If the
//!   store behind the server exists only in its process (`memory:`), the locks are lost with it, as
//!   the [guarantees](super::store::HttpStore) of that store state.
//! - **Servers over different stores.** They would grant one lock twice. The client checks the
//!   identity of the store before it uses another replica.
//! - **Notifications.** A waiter is notified by a long poll (`polls`), whose answer is the state of
//!   its claim. A grant is accepted only with the token of the queue position, and its lease is
//!   counted from the last heartbeat, so a late or repeated grant is harmless. Evictions and
//!   changes of queues arrive by streams of events (`events`), which are hints. The heartbeat finds
//!   whatever was missed.
//! - **The future is dropped.** The connection of that request is closed. The request was executed
//!   or it was not. The client sends a release in the background, as with every store.

mod connect;
mod events;
mod fault;
mod polls;
mod replicas;
mod url;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::Method;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Ends, Waiters, locked, namespaced, redacted};
use leasehold_core::store::{
    Converted, Evict, EvictionListener, EvictionListeners, Follow, Guarantees, Joined, LockInfo,
    Mode, Queues, Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Opening, Result, Token};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;

use self::events::Events;
use self::polls::Poll;
use self::replicas::{Replicas, Request, parsed, query};
use self::url::HttpUrl;
use crate::wire::{
    self, ClaimBody, ClaimResponse, ConvertResponse, DoctorResponse, EventsQuery, EvictRequest,
    EvictResponse, FindingView, HoldersQuery, JoinRequest, LeaveQuery, LeaveResponse, ListQuery,
    LockList, LockResponse, MAX_BODY_BYTES, MAX_RENEWALS, RenewClaim, RenewRequest, RenewResponse,
    ServiceEvent, Status, claim_path, lock_path,
};

/// The version of the API that this client speaks.
const API: u32 = 1;

/// The locks of a `leasehold serve`, accessed over HTTP.
pub struct HttpStore {
    info: StoreInfo,
    longest_lease: Duration,
    replicas: Arc<Replicas>,
    waiters: Arc<Waiters<Poll>>,
    claims: Arc<Claims>,
    listeners: Arc<EvictionListeners>,
    /// The task that receives evictions. It starts with the first claim.
    hearing: OnceLock<Ends>,
}

/// What the server has reported about the claims of this client.
type Claims = Mutex<HashMap<ClaimId, Known>>;

#[derive(Debug)]
struct Known {
    /// The claim's name in events.
    handle: String,
    confirmed: Option<u32>,
}

impl fmt::Debug for HttpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpStore").field("url", &self.info.url).finish_non_exhaustive()
    }
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move {
        let parts = HttpUrl::parse(&url)?;
        let prefix = parts.prefix.clone();
        let store = HttpStore::connect(&url, parts, &runtime).await?;
        namespaced(Arc::new(store), prefix)
    })
}

impl HttpStore {
    async fn connect(url: &str, parts: HttpUrl, runtime: &Handle) -> Result<Self> {
        let (prefix, servers) = (parts.prefix.clone(), parts.servers.len());
        let replicas = Arc::new(Replicas::new(parts, runtime)?);
        let view = replicas.store().await?;
        if view.api != API {
            let what = format!("the server speaks version {} of the API", view.api);
            let hint = "use a client and a server of the same version";
            return Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint));
        }
        if servers > 1 && !view.replicas {
            let what =
                "the URL names several servers, but each keeps its claims in its own process";
            let hint = "name one server, or start all of them over a store that they can share";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        // Clients with a prefix have other names for the same locks.
        let identity = match prefix.as_str() {
            "" => view.identity,
            prefix => format!("{}/{prefix}", view.identity),
        };
        let mut info = StoreInfo::new(redacted(url), Guarantees::from(view.guarantees));
        info = info.identified(identity);
        info = info.confirming(Duration::from_millis(view.replication_timeout_ms));
        let (waiters, claims, listeners) = Default::default();
        let longest_lease = Duration::from_millis(view.longest_lease_ms);
        let hearing = OnceLock::new();
        Ok(Self { info, longest_lease, replicas, waiters, claims, listeners, hearing })
    }

    async fn call<T: DeserializeOwned>(&self, request: Request) -> Result<T> {
        parsed(&self.replicas.send(&request).await?)
    }

    /// Keeps what the server has reported about a claim. Returns the status.
    fn note(&self, claim: &Claim, state: ClaimResponse) -> Status {
        match &state.status {
            Status::Held { confirmed, .. } => {
                self.waiters.dismiss(claim.id);
                self.know(claim.id, state.handle, *confirmed);
            }
            Status::Waiting { .. } => self.know(claim.id, state.handle, None),
            Status::Lost => self.forget(claim.id),
            Status::Unknown { .. } => {}
        }
        state.status
    }

    fn know(&self, id: ClaimId, handle: String, confirmed: Option<u32>) {
        let mut claims = locked(&self.claims);
        let known = claims.entry(id).or_insert(Known { handle: String::new(), confirmed });
        known.handle = handle;
        known.confirmed = confirmed.or(known.confirmed);
        drop(claims);
        self.hearing.get_or_init(|| self.receive_evictions());
    }

    fn forget(&self, id: ClaimId) {
        self.waiters.dismiss(id);
        locked(&self.claims).remove(&id);
    }

    /// Starts the task that receives evictions.
    fn receive_evictions(&self) -> Ends {
        let (claims, listeners) = (self.claims.clone(), self.listeners.clone());
        let on_event = move |event: ServiceEvent| {
            let concerns = |known: &Known| match &event {
                // Evictions before the subscription were not reported.
                ServiceEvent::Ready => true,
                ServiceEvent::Ask { handle } => known.handle == *handle,
                _ => false,
            };
            let evicted: Vec<ClaimId> = {
                let claims = locked(&claims);
                claims.iter().filter(|(_, known)| concerns(known)).map(|(id, _)| *id).collect()
            };
            evicted.into_iter().for_each(|id| listeners.ask(id));
        };
        let receiving = events::receive(self.replicas.clone(), events::request(""), None, on_event);
        Ends::new(&self.replicas.runtime().spawn(receiving))
    }

    /// Sends a join that is executed at most once.
    async fn join_once(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        // Registered before the request is sent, so that the waiter is known whatever the answer
        // is.
        self.waiters.enlist(claim.id, Poll::default);
        let body = JoinRequest { id: claim.id, mode: mode.into(), claim: ClaimBody::from(claim) };
        let request = post("/v1/claims".to_owned(), &body)?;
        let request = Request { repeatable: false, ..request };
        match self.call::<ClaimResponse>(request).await {
            Ok(state) => self.note(claim, state).joined().ok_or_else(|| {
                let what = "the server returned neither a grant nor a queue position";
                Error::new(ErrorKind::Corrupt, what)
            }),
            Err(error) if error.kind() == ErrorKind::Contended => {
                self.forget(claim.id);
                Ok(Joined::Busy { holders: error.holders().to_vec() })
            }
            Err(error) => {
                // After an outage, the claim may be in the queue.
                if !error.is_transient() {
                    self.forget(claim.id);
                }
                Err(error)
            }
        }
    }

    /// Joins with a claim that may already be in the queue. If it is, a renewal finds it by its ID.
    async fn join_again(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let renew = Renew { claim: claim.clone(), lease: claim.lease };
        let renewed = self.renew_some(std::slice::from_ref(&renew)).await?.pop();
        match renewed.map(Renewal::known).transpose()? {
            Some(Renewal::Holding { token, remaining }) => Ok(Joined::Holding { token, remaining }),
            Some(Renewal::Waiting(place)) => Ok(Joined::Waiting(place)),
            _ => self.join_once(claim, mode).await,
        }
    }

    /// Renews claims with one request.
    async fn renew_some(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let claim = |renew: &Renew| {
            let lease_ms = wire::to_ms(renew.lease);
            let claim = ClaimBody { lease_ms, ..ClaimBody::from(&renew.claim) };
            RenewClaim { id: renew.claim.id, claim }
        };
        let body = RenewRequest { claims: renewals.iter().map(claim).collect() };
        let response: RenewResponse =
            self.call(post("/v1/claims/renew".to_owned(), &body)?).await?;
        if response.claims.len() != renewals.len() {
            let what = "the server returned a wrong number of renewal results";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let states = renewals.iter().zip(response.claims);
        Ok(states.map(|(renew, state)| self.note(&renew.claim, state).renewal()).collect())
    }

    async fn show(&self, path: String) -> Result<Option<LockInfo>> {
        let response: LockResponse = self.call(get(path)).await?;
        Ok(response.lock.map(LockInfo::from))
    }
}

#[async_trait]
impl Store for HttpStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let mut joined = match self.waiters.has(claim.id) {
            true => self.join_again(claim, mode).await,
            false => self.join_once(claim, mode).await,
        };
        for _ in 0..self.replicas.count() {
            match joined {
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    joined = self.join_again(claim, mode).await;
                }
                _ => break,
            }
        }
        joined.map_err(|e| e.with_lock(&claim.name))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let batches = batches(renewals);
        if let [all] = batches[..] {
            return self.renew_some(all).await;
        }
        let mut results = Vec::with_capacity(renewals.len());
        for batch in batches {
            match self.renew_some(batch).await {
                Ok(renewed) => results.extend(renewed),
                Err(error) => results.resize(results.len() + batch.len(), Renewal::unknown(&error)),
            }
        }
        Ok(results)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.forget(claim.id);
        let keep = LeaveQuery { keep_ms: keep.map(wire::to_ms) };
        let (path, body) = (claim_path(claim.id), ClaimBody::from(claim));
        let path = format!("{path}?{}&{}", query(&body), query(&keep));
        let request = Request { method: Method::DELETE, ..get(path) };
        let reply = self.replicas.send(&request).await.map_err(|e| e.with_lock(&claim.name))?;
        let response: LeaveResponse = parsed(&reply)?;
        Ok(response.left || reply.repeated)
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let path = format!("{}/weight", claim_path(claim.id));
        let converted: Result<ConvertResponse> =
            self.call(post(path, &ClaimBody::from(claim))?).await;
        converted.map(Converted::from).map_err(|e| e.with_lock(&claim.name))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        if let Some(poll) = self.waiters.waiting(claim.id) {
            polls::start(&poll, claim, &self.waiters, &self.replicas);
        }
        Ok(self.waiters.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.show(lock_path(name.as_str())).await
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let (path, query) = (lock_path(name.as_str()), query(&HoldersQuery { token }));
        self.show(format!("{path}/holders?{query}")).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let query = query(&ListQuery { prefix: prefix.to_owned() });
        let list: LockList = self.call(get(format!("/v1/locks?{query}"))).await?;
        Ok(list.locks.into_iter().map(LockInfo::from).collect())
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let token = match which {
            Evict::Token(token) => Some(token),
            Evict::Holders => None,
        };
        let request = post(format!("{}/evict", lock_path(name.as_str())), &EvictRequest { token })?;
        // A second copy would evict the next holders.
        let request = Request { repeatable: token.is_some(), ..request };
        let response: EvictResponse = self.call(request).await?;
        Ok(response.evicted)
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.listeners.add(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        let (name, prefix) = match queues {
            Queues::Of(name) => (Some(name.clone()), None),
            Queues::All(prefix) => (None, Some(prefix.clone())),
        };
        let request = events::request(&query(&EventsQuery { name, prefix }));
        let (replicas, first) = (self.replicas.clone(), request.clone());
        // This runs on the client's runtime, because the caller's runtime may have no timer.
        let opening = self.replicas.runtime().spawn(async move {
            let mut events = Events::open(&replicas, &first).await?;
            while events.next(&replicas).await? != ServiceEvent::Ready {}
            Ok(events)
        });
        let opened = opening.await;
        let ended = |_| Error::new(ErrorKind::Closed, "the client's runtime has ended");
        let events = opened.map_err(ended).flatten()?;
        let (follow, notifier) = Follow::new();
        let on_event = move |event| {
            if matches!(event, ServiceEvent::Ready | ServiceEvent::Changed) {
                notifier.notify();
            }
        };
        let receiving = events::receive(self.replicas.clone(), request, Some(events), on_event);
        Ok(Some(follow.keeping(Ends::new(&self.replicas.runtime().spawn(receiving)))))
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let response: DoctorResponse = self.call(get("/v1/doctor".to_owned())).await?;
        Ok(response.findings.into_iter().map(finding).collect())
    }

    fn longest_lease(&self) -> Duration {
        self.longest_lease
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        locked(&self.claims).get(&claim.id)?.confirmed
    }
}

/// Splits renewals, so that no body is longer than a server accepts.
fn batches(renewals: &[Renew]) -> Vec<&[Renew]> {
    // JSON escapes a byte with at most 6 bytes. The other fields are short.
    let size = |renew: &Renew| {
        let Claim { name, holder, .. } = &renew.claim;
        512 + 6 * (name.as_str().len() + holder.host.len() + holder.label.len())
    };
    let mut batches = Vec::new();
    let mut rest = renewals;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |renew: &&Renew| {
            bytes += size(renew);
            bytes < MAX_BODY_BYTES
        };
        let count = rest.iter().take(MAX_RENEWALS).take_while(fits).count().max(1);
        let (batch, others) = rest.split_at(count);
        batches.push(batch);
        rest = others;
    }
    batches
}

fn get(path: String) -> Request {
    Request { method: Method::GET, path, body: Bytes::new(), repeatable: true }
}

fn post(path: String, body: &impl Serialize) -> Result<Request> {
    let body = serde_json::to_vec(body)
        .map_err(|why| Error::new(ErrorKind::Config, "cannot encode a request").with_source(why))?;
    Ok(Request { method: Method::POST, path, body: body.into(), repeatable: true })
}

/// The maximum number of finding IDs from servers that this program keeps.
const FOREIGN_FINDINGS: usize = 256;

/// Converts a finding that a server sent. Its ID is kept until the program ends, so the number of
/// IDs is limited.
fn finding(view: FindingView) -> Finding {
    static IDS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let id = {
        let mut ids = locked(&IDS);
        match ids.get(view.id.as_str()) {
            Some(id) => id,
            None if ids.len() < FOREIGN_FINDINGS => {
                let id: &'static str = view.id.leak();
                ids.insert(id);
                id
            }
            None => "server",
        }
    };
    let mut finding = Finding::note(id, view.what, view.why);
    (finding.severity, finding.fix) = (view.severity, view.fix.into());
    finding
}
