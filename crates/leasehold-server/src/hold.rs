//! `POST /v1/locks/{name}/hold`: a lock for as long as a connection is open.
//!
//! The server makes the claim with a client of its own, which renews it. The lock is released when
//! the connection has closed, for any reason. The server notices that when the body of the response
//! is dropped, or when the kernel reports that the client no longer acknowledges data (TCP user
//! timeout). So a crashed client is noticed within that time, and `grace` begins then.
//!
//! **What the client knows may be outdated.** A client that was paused reads a line that was
//! written before. Each line contains how much longer the lease lasted when the line was written. A
//! resource must check the token, as with every store.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use leasehold_core::kit::frozen_label;
use leasehold_core::store::{ClaimState, LockInfo, Place};
use leasehold_core::{DEFAULT_LEASE, Error, ErrorKind, Hold, LostReason, Name, State as HoldState};
use leasehold_http::wire::schema::LockPath;
use leasehold_http::wire::{
    ClaimLine, EVENT_STREAM, HoldEvent, HoldKind, HoldQuery, JSON_LINES, PING_EVERY,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::access::{Caller, Client, Right};
use crate::problem::{Failure, draining, frozen, invalid};
use crate::request::{OfLock, Query, duration};
use crate::service::{Service, drained};
use crate::stream::{Events, Format, stream};
use crate::usage::Streaming;

/// How long the store has to return the holders, for an event.
const ASK: Duration = Duration::from_secs(1);
/// How long the store has to confirm a release.
const RELEASE: Duration = Duration::from_secs(5);

/// A client's request for a hold.
struct Request {
    name: Name,
    kind: HoldKind,
    permits: u32,
    capacity: u32,
    wait: Option<Duration>,
    lease: Duration,
    grace: Duration,
    max_hold: Option<Duration>,
    label: String,
}

impl Request {
    fn new(name: Name, query: &HoldQuery) -> Result<Self, Failure> {
        let kind = query.kind.unwrap_or(HoldKind::Mutex);
        let capacity = match (kind, query.capacity) {
            (HoldKind::Semaphore, Some(capacity)) => capacity,
            (HoldKind::Semaphore, None) => {
                let hint = "add capacity=N to the query";
                return Err(invalid("missing capacity of the semaphore", hint));
            }
            (_, None) => 1,
            (_, Some(_)) => {
                let hint = "add kind=semaphore to the query, or leave the capacity out";
                return Err(invalid("only a semaphore has a capacity", hint));
            }
        };
        Ok(Self {
            name,
            kind,
            permits: query.permits.unwrap_or(1),
            capacity,
            wait: duration("wait", query.wait.as_deref())?,
            lease: duration("lease", query.lease.as_deref())?.unwrap_or(DEFAULT_LEASE),
            grace: duration("grace", query.grace.as_deref())?.unwrap_or_default(),
            max_hold: duration("max_hold", query.max_hold.as_deref())?,
            label: query.label.clone(),
        })
    }

    /// Acquires the lock.
    async fn take(
        &self,
        service: &Service,
        on_waiting: impl Fn(Place) + Send + Sync + 'static,
    ) -> leasehold_core::Result<Hold> {
        let (locks, name) = (service.locks(), self.name.as_str());
        let on_waiting = Arc::new(on_waiting);
        /// Sets the options that every kind of lock has.
        macro_rules! with_options {
            ($lock:expr) => {{
                let callback = on_waiting.clone();
                let mut lock = $lock
                    .lease(self.lease)
                    .label(&self.label)
                    .on_waiting(move |place| callback(place));
                if let Some(longest) = self.max_hold {
                    lock = lock.max_hold(longest);
                }
                lock
            }};
        }
        let wanted = match self.kind {
            HoldKind::Mutex => with_options!(locks.mutex(name)).into(),
            HoldKind::Read => with_options!(locks.rwlock(name)).read_request(),
            HoldKind::Write => with_options!(locks.rwlock(name)).write_request(),
            HoldKind::Semaphore => {
                with_options!(locks.semaphore(name, self.capacity)).permit_request(self.permits)
            }
        };
        let guards = match self.wait {
            Some(Duration::ZERO) => locks.try_lock_all([wanted]).await,
            Some(limit) => locks.lock_all_timeout([wanted], limit).await,
            None => locks.lock_all([wanted]).await,
        };
        let none = || Error::new(ErrorKind::Lost, "the lock was lost while it was acquired");
        guards?.into_iter().next().ok_or_else(none)
    }
}

/// `POST /v1/locks/{name}/hold`.
#[utoipa::path(
    post,
    path = "/v1/locks/{name}/hold",
    operation_id = "hold",
    summary = "Hold a lock while the connection is open",
    params(LockPath, HoldQuery),
    responses((status = 200, description = "A stream with one JSON object per line, or Server-Sent Events. The lock is held while it is open", content((HoldEvent = JSON_LINES), (HoldEvent = EVENT_STREAM)))),
)]
pub(crate) async fn hold(
    State(service): State<Service>,
    caller: Caller,
    client: Option<Extension<Arc<Client>>>,
    OfLock(name): OfLock,
    Query(query): Query<HoldQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    caller.check(Right::Hold, &name)?;
    if query.label.starts_with(&frozen_label("")) {
        caller.check(Right::Freeze, &name)?;
    }
    if service.is_draining() {
        return Err(draining());
    }
    let mut request = Request::new(name, &query)?;
    if request.label.is_empty() {
        // The claim's host and process are those of the server.
        let address = client.as_ref().and_then(|client| client.address.as_deref());
        let at = address.map_or(String::new(), |address| format!(" at {address}"));
        request.label = format!("{}{at}", caller.identity.name);
    }
    let streaming = caller.open_stream()?;
    // The stream's claim counts toward the quota like any other.
    let id = leasehold_core::ClaimId::random()?;
    caller.count_claim(id, &request.name, Duration::from_secs(365 * 86_400))?;
    let counted = Counted { caller: caller.clone(), id, _streaming: streaming };
    let (events, response) = stream(Format::of(&headers));
    if request.wait == Some(Duration::ZERO) {
        // The outcome is known immediately, so the status of the response can report it.
        let held = match request.take(&service, |_| {}).await {
            Ok(held) => held,
            Err(error) => return Err(not_taken(&service, &request.name, error).await),
        };
        tokio::spawn(keep(service, counted, request, events, held));
    } else {
        tokio::spawn(wait(service, counted, request, events));
    }
    Ok(response)
}

/// The share of the identity's quota that the stream uses until this is dropped.
struct Counted {
    caller: Caller,
    id: leasehold_core::ClaimId,
    _streaming: Streaming,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.caller.usage().forget_claim(self.id);
    }
}

async fn not_taken(service: &Service, name: &Name, error: Error) -> Failure {
    if error.kind() != ErrorKind::Contended {
        return error.into();
    }
    let lock = service.read(service.store().holders(name, None)).await.ok().flatten();
    Failure::busy(error, lock.as_ref())
}

/// Waits for the lock and reports the queue position.
async fn wait(service: Service, counted: Counted, request: Request, events: Events) {
    let (sender, places) = unbounded_channel();
    let taking = request.take(&service, move |place| {
        let _ = sender.send(place);
    });
    let mut draining = service.draining();
    let taken = tokio::select! {
        taken = taking => taken,
        () = report(&service, &counted.caller, &request.name, &events, places) => return,
        () = events.closed() => return,
        () = drained(&mut draining) => {
            events.send(&HoldEvent::Draining);
            return;
        }
    };
    match taken {
        Ok(held) => keep(service, counted, request, events, held).await,
        Err(error) => {
            events.send(&failed(&error));
        }
    }
}

/// Reports queue positions until the stream must end.
async fn report(
    service: &Service,
    caller: &Caller,
    name: &Name,
    events: &Events,
    mut places: UnboundedReceiver<Place>,
) {
    let mut pings = pings();
    let mut ahead = None;
    loop {
        tokio::select! {
            Some(place) = places.recv() => {
                // Only the latest position counts.
                let mut place = place;
                while let Ok(later) = places.try_recv() {
                    place = later;
                }
                if ahead.replace(place.ahead) == Some(place.ahead) {
                    continue;
                }
                let reading = service.locks().holders(name);
                let lock = tokio::time::timeout(ASK, reading).await;
                let lock = lock.ok().and_then(Result::ok).flatten();
                if !events.send(&waiting(name, place.ahead, lock.as_ref())) {
                    return;
                }
            }
            _ = pings.tick() => {
                let ping = HoldEvent::Ping { remaining_seconds: None };
                if !service.access().still_accepts(caller) {
                    events.send(&failed(&revoked()));
                    return;
                }
                if !events.send(&ping) {
                    return;
                }
            }
        }
    }
}

/// Returns a timer for pings. Its interval is half the promised time, because a busy server may be
/// late.
fn pings() -> tokio::time::Interval {
    let mut pings = interval(PING_EVERY / 2);
    pings.reset();
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}

fn revoked() -> Error {
    Error::new(ErrorKind::Denied, "the server now rejects the token or certificate of this stream")
        .with_hint("connect with another token or certificate")
}

fn failed(error: &Error) -> HoldEvent {
    use ErrorKind::{Config, Contended, InvalidName, Lost, Mismatch, Timeout, Unsupported};
    let code = match error.kind() {
        Contended | Timeout | Lost => 75,
        InvalidName | Config | Unsupported | Mismatch => 2,
        _ => 69,
    };
    HoldEvent::Failed {
        code,
        kind: error.kind().as_str().to_owned(),
        message: error.reason(),
        hint: error.hint().map(str::to_owned),
    }
}

fn waiting(name: &Name, ahead: usize, lock: Option<&LockInfo>) -> HoldEvent {
    let holders: Vec<ClaimLine> =
        lock.into_iter().flat_map(LockInfo::holders).map(ClaimLine::from).collect();
    let place = lock.map(|_| (ahead + 1).saturating_sub(holders.len()).max(1));
    let held_by = lock.and_then(|lock| match (lock.holders().next(), frozen(lock)) {
        (Some(first), _) => Some(format!("held by {}", first.holder)),
        (None, Some("")) => Some("frozen".to_owned()),
        (None, Some(reason)) => Some(format!("frozen: {}", reason.escape_debug())),
        (None, None) => {
            let mut departed = lock.claims.iter().filter(|c| c.state == ClaimState::Cooldown);
            departed.next().map(|claim| format!("in cooldown; last held by {}", claim.holder))
        }
    });
    HoldEvent::Waiting { name: name.as_str().to_owned(), ahead, place, held_by, holders }
}

/// Holds the lock until the connection closes, and then for the grace period.
async fn keep(service: Service, counted: Counted, request: Request, events: Events, held: Hold) {
    let name = request.name.as_str().to_owned();
    counted.caller.usage().granted(counted.id, held.grant());
    let at_end = held.watch();
    match watch(&service, &counted.caller, &request, &events, &held).await {
        End::Lost(reason) => {
            events.send(&HoldEvent::Lost { name, reason: reason.as_str().to_owned() });
        }
        End::Gone => {
            // Dropping the hold on any path releases the lock.
            let over = Instant::now() + request.grace;
            let mut watch = held.watch();
            let mut draining = service.draining();
            while Instant::now() < over && !matches!(watch.state(), HoldState::Lost(_)) {
                tokio::select! {
                    () = tokio::time::sleep_until(over) => {}
                    _ = watch.changed() => {}
                    () = drained(&mut draining) => break,
                }
            }
            let _ = tokio::time::timeout(RELEASE, held.release()).await;
        }
        End::Release(error) => {
            let token = held.grant().get();
            let released = tokio::time::timeout(RELEASE, held.release()).await;
            let event = match (error, released) {
                (Some(error), _) => failed(&error),
                (None, Ok(Err(error))) if error.kind() == ErrorKind::Lost => {
                    let reason = error.lost_reason().unwrap_or(LostReason::Gone);
                    HoldEvent::Lost { name, reason: reason.as_str().to_owned() }
                }
                (None, released) => {
                    use leasehold_core::Released::{Now, Shared};
                    let answered = matches!(released, Ok(Ok(Now | Shared)));
                    HoldEvent::Released { name, token, answered }
                }
            };
            events.send(&event);
        }
    }
    if let HoldState::Lost(LostReason::Expired | LostReason::Gone) = at_end.state() {
        counted.caller.usage().lost(counted.id);
    }
}

/// How a hold ends.
enum End {
    Lost(LostReason),
    /// The client has disconnected, or reads too slowly.
    Gone,
    /// The server releases the lock, because of this error if there is one.
    Release(Option<Error>),
}

async fn watch(
    service: &Service,
    caller: &Caller,
    request: &Request,
    events: &Events,
    held: &Hold,
) -> End {
    let name = || request.name.as_str().to_owned();
    let mut watch = held.watch();
    let mut draining = service.draining();
    let mut last = None;
    let mut pings = pings();
    let mut at_risk = false;
    let remaining = |left: Duration| (left != Duration::MAX).then_some(left.as_secs_f64());
    let held = HoldEvent::Held {
        name: name(),
        token: held.grant().get(),
        sequencer: held.sequencer().to_string(),
        remaining_seconds: remaining(watch.remaining()),
    };
    if !events.send(&held) {
        return End::Gone;
    }
    loop {
        let left = remaining(watch.remaining());
        let sent = match watch.state() {
            HoldState::Lost(reason) => return End::Lost(reason),
            HoldState::AtRisk(_) if !at_risk => {
                at_risk = true;
                events.send(&HoldEvent::AtRisk { name: name(), remaining_seconds: left })
            }
            HoldState::Held if at_risk => {
                at_risk = false;
                events.send(&HoldEvent::Recovered { name: name(), remaining_seconds: left })
            }
            _ => true,
        };
        if !sent {
            return End::Gone;
        }
        let over = last;
        tokio::select! {
            _ = watch.changed() => {}
            () = events.closed() => return End::Gone,
            _ = pings.tick() => {
                if !service.access().still_accepts(caller) {
                    return End::Release(Some(revoked()));
                }
                let remaining_seconds = remaining(watch.remaining());
                if !events.send(&HoldEvent::Ping { remaining_seconds }) {
                    return End::Gone;
                }
            }
            () = drained(&mut draining), if last.is_none() => {
                events.send(&HoldEvent::Draining);
                last = Some(Instant::now() + service.limits().drain);
            }
            () = async { tokio::time::sleep_until(over.unwrap_or_else(Instant::now)).await },
                if over.is_some() => return End::Release(None),
        }
    }
}
