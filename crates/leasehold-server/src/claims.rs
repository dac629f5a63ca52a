//! The calls of claims: the [`Store`](leasehold_core::store::Store) contract over HTTP.
//!
//! Each handler forwards one call. If the client disconnects, the handler is dropped, as the
//! contract allows at any await: the client does not know whether the call took effect, and repeats
//! it.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use leasehold_core::kit::{Escaped, frozen_label, wall_micros};
use leasehold_core::store::{Converted, Joined, Mode, Renew, Renewal};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, HolderInfo, Kind, MAX_LEASE, Token};
use leasehold_http::wire::schema::ClaimPath;
use leasehold_http::wire::{
    ClaimBody, ClaimResponse, ConvertResponse, JoinRequest, LeaveQuery, LeaveResponse,
    MAX_RENEWALS, MAX_WAIT, PROBLEM_JSON, Problem, RenewRequest, RenewResponse, Status, WaitQuery,
};
use tokio::time::{Instant, sleep_until};

use crate::access::{Caller, Right, handle};
use crate::problem::{Failure, draining, frozen, invalid};
use crate::request::{Json, OfClaim, duration, split};
use crate::service::Service;

/// The pause after a signal of a store that sends many signals.
const SIGNAL_PAUSE: Duration = Duration::from_millis(10);

type Answer<T> = Result<axum::Json<T>, Failure>;

/// Returns the claim as it is stored, if the caller may use its lock.
fn stored(caller: &Caller, id: ClaimId, body: &ClaimBody) -> Result<Claim, Failure> {
    caller.check(Right::Hold, &body.name)?;
    // A claim with this label would freeze the lock when it is released.
    if body.label.starts_with(&frozen_label("")) {
        caller.check(Right::Freeze, &body.name)?;
    }
    let mut claim = body.claim(id)?;
    claim.id = caller.stored(id, &body.name);
    // Limits `seen`, so that no client can use up the tokens. Above the limit, almost half of all
    // tokens remain.
    let most = wall_micros().saturating_add(86_400_000_000).saturating_add(Token::MAX / 2);
    claim.seen = claim.seen.min(most);
    Ok(claim)
}

fn state(service: &Service, claim: &Claim, status: Status) -> ClaimResponse {
    let mut status = status;
    if let Status::Held { token, sequencer, confirmed, .. } = &mut status {
        *sequencer = Some(sequencer_of(service, claim, *token));
        *confirmed = service.store().confirmed(claim);
    }
    ClaimResponse { handle: handle(claim.id), status }
}

/// Returns the text form of the hold's [`Sequencer`](leasehold_core::Sequencer).
fn sequencer_of(service: &Service, claim: &Claim, token: Token) -> String {
    let side = match claim.kind {
        Kind::Mutex => "mutex",
        Kind::RwLock if claim.weight == 1 => "read",
        Kind::RwLock => "write",
        Kind::Semaphore => "semaphore",
    };
    let (store, name) = (Escaped(service.locks().identity()), Escaped(claim.name.as_str()));
    format!("lh1:{side}:{token}:{store}:{name}")
}

/// `POST /v1/claims`.
#[utoipa::path(
    post,
    path = "/v1/claims",
    operation_id = "join",
    summary = "Acquire a lock, or join its queue",
    request_body = JoinRequest,
    responses((status = 201, description = "The claim holds the lock", body = ClaimResponse), (status = 202, description = "The claim waits", body = ClaimResponse), (status = 409, description = "The lock is busy", body = Problem, content_type = PROBLEM_JSON), (status = 423, description = "The lock is frozen", body = Problem, content_type = PROBLEM_JSON)),
)]
pub(crate) async fn join(
    State(service): State<Service>,
    caller: Caller,
    Json(request): Json<JoinRequest>,
) -> Result<Response, Failure> {
    let claim = stored(&caller, request.id, &request.claim)?;
    if service.is_draining() {
        return Err(draining());
    }
    let store = service.store();
    if !store.guarantees().keeps(claim.kind) {
        let what = format!("this store does not support locks of the kind {}", claim.kind);
        return Err(Error::new(ErrorKind::Unsupported, what).with_hint("use another store").into());
    }
    if !claim.lock_delay.is_zero() && !store.guarantees().lock_delay {
        let what = "this store does not support lock_delay";
        return Err(Error::new(ErrorKind::Unsupported, what)
            .with_hint("leave lock_delay_ms out, or use another store")
            .into());
    }
    count(&caller, &claim)?;
    let mode = Mode::from(request.mode);
    let joined = service.call(claim.lease, store.join(&claim, mode)).await?;
    let code = match &joined {
        Joined::Holding { token, .. } => {
            caller.usage().granted(claim.id, *token);
            StatusCode::CREATED
        }
        Joined::Waiting(_) => {
            caller.usage().waits(claim.id);
            StatusCode::ACCEPTED
        }
        Joined::Busy { .. } => StatusCode::CONFLICT,
    };
    let status = match (Status::of_joined(&joined), joined) {
        (Some(status), _) => status,
        (None, Joined::Busy { holders }) => {
            caller.usage().lost(claim.id);
            return Err(busy(&service, &claim, holders).await);
        }
        (None, _) => Status::Lost,
    };
    Ok((code, axum::Json(state(&service, &claim, status))).into_response())
}

/// Returns the response to a claim that requested an immediate grant and did not get it.
async fn busy(service: &Service, claim: &Claim, holders: Vec<HolderInfo>) -> Failure {
    // A store may count the claim that freezes a lock among the holders.
    let freezes = |info: &HolderInfo| info.holder.label.starts_with(&frozen_label(""));
    let lock = match holders.iter().all(freezes) {
        true => service.read(service.store().holders(&claim.name, None)).await.ok().flatten(),
        false => None,
    };
    let what = match (holders.first(), lock.as_ref().and_then(frozen)) {
        (_, Some("")) => format!("{} is frozen", claim.name),
        (_, Some(reason)) => format!("{} is frozen: {}", claim.name, reason.escape_debug()),
        (Some(first), None) => format!("{} is held by {first}", claim.name),
        (None, None) => format!("{} is held by another client", claim.name),
    };
    let error = Error::new(ErrorKind::Contended, what)
        .with_hint(r#"retry later, or wait with "mode": "wait""#)
        .held_by(holders);
    Failure::busy(error, lock.as_ref())
}

/// `PUT /v1/claims/{id}`.
#[utoipa::path(
    put,
    path = "/v1/claims/{id}",
    operation_id = "renew",
    summary = "Renew a claim",
    params(ClaimPath),
    request_body = ClaimBody,
    responses((status = 200, description = "The state of the claim", body = ClaimResponse)),
)]
pub(crate) async fn renew(
    State(service): State<Service>,
    caller: Caller,
    OfClaim(id): OfClaim,
    Json(body): Json<ClaimBody>,
) -> Answer<ClaimResponse> {
    let claim = stored(&caller, id, &body)?;
    let status = renew_one(&service, &caller, &claim).await?;
    Ok(axum::Json(state(&service, &claim, status)))
}

async fn renew_one(service: &Service, caller: &Caller, claim: &Claim) -> Result<Status, Failure> {
    let renew = Renew { claim: claim.clone(), lease: claim.lease };
    let renewals = service.store().renew(std::slice::from_ref(&renew));
    let renewal = service.call(claim.lease, renewals).await?.pop();
    let renewal = renewal.unwrap_or_else(missing).known()?;
    note(caller, claim, &renewal);
    Ok(Status::of_renewal(&renewal))
}

fn count(caller: &Caller, claim: &Claim) -> Result<bool, Failure> {
    caller.count_claim(claim.id, &claim.name, claim.lease.max(claim.waiter_lease))
}

/// Updates the count of the identity's claims.
fn note(caller: &Caller, claim: &Claim, renewal: &Renewal) {
    // A claim that another server has counted is counted here too, and never rejected.
    match renewal {
        Renewal::Holding { token, .. } => {
            let is_new = count(caller, claim).unwrap_or(false);
            caller.usage().renewed(claim.id, *token, is_new);
        }
        Renewal::Waiting(_) => {
            let _ = count(caller, claim);
            caller.usage().waits(claim.id);
        }
        Renewal::Lost => caller.usage().lost(claim.id),
        Renewal::Unknown { .. } => {}
    }
}

/// Returns the result for a claim about which the store returned nothing.
fn missing() -> Renewal {
    Renewal::unknown(&Error::new(ErrorKind::Unreachable, "the store returned no result"))
}

/// `POST /v1/claims/renew`.
///
/// Claims of different members of the store are renewed by separate calls, so a member that does
/// not answer does not delay the others.
#[utoipa::path(
    post,
    path = "/v1/claims/renew",
    operation_id = "renew_many",
    summary = "Renew up to 1,000 claims",
    request_body = RenewRequest,
    responses((status = 200, description = "One state per claim, in order", body = RenewResponse)),
)]
pub(crate) async fn renew_many(
    State(service): State<Service>,
    caller: Caller,
    Json(request): Json<RenewRequest>,
) -> Answer<RenewResponse> {
    if request.claims.len() > MAX_RENEWALS {
        let what = format!("{} claims in one request", request.claims.len());
        return Err(invalid(what, &format!("send at most {MAX_RENEWALS}")));
    }
    let claims = request.claims.iter().map(|of| stored(&caller, of.id, &of.claim));
    let claims: Vec<Claim> = claims.collect::<Result<_, _>>()?;
    let mut shards: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (n, claim) in claims.iter().enumerate() {
        shards.entry(service.store().shard(&claim.name)).or_default().push(n);
    }
    let mut tasks = tokio::task::JoinSet::new();
    for places in shards.into_values() {
        let of = |n: &usize| Renew { claim: claims[*n].clone(), lease: claims[*n].lease };
        let renewals: Vec<Renew> = places.iter().map(of).collect();
        let service = service.clone();
        tasks.spawn(async move {
            let shortest = renewals.iter().map(|renew| renew.lease).min().unwrap_or_default();
            (places, service.call(shortest, service.store().renew(&renewals)).await)
        });
    }
    let mut results: Vec<Status> = claims.iter().map(|_| Status::of_renewal(&missing())).collect();
    while let Some(done) = tasks.join_next().await {
        // A panic in the store counts as an error.
        let Ok((places, renewed)) = done else { continue };
        match renewed {
            Ok(renewals) => {
                for (n, renewal) in places.into_iter().zip(renewals) {
                    note(&caller, &claims[n], &renewal);
                    results[n] = Status::of_renewal(&renewal);
                }
            }
            Err(failure) => {
                for n in places {
                    let problem = Box::new(Problem::new(&failure.error));
                    results[n] = Status::Unknown { problem };
                }
            }
        }
    }
    let states = claims.iter().zip(results).map(|(claim, status)| state(&service, claim, status));
    Ok(axum::Json(RenewResponse { claims: states.collect() }))
}

/// `GET /v1/claims/{id}`: waits for a grant.
///
/// The claim is renewed first, and the notification is awaited afterwards, so no grant in between
/// is missed. While the request is open, its client is connected, so the server renews the claim.
#[utoipa::path(
    get,
    path = "/v1/claims/{id}",
    operation_id = "wait",
    summary = "Wait for a grant",
    params(ClaimPath, WaitQuery, ClaimBody),
    responses((status = 200, description = "The state, once the claim no longer waits or the time limit is reached", body = ClaimResponse)),
)]
pub(crate) async fn wait(
    State(service): State<Service>,
    caller: Caller,
    OfClaim(id): OfClaim,
    RawQuery(query): RawQuery,
) -> Answer<ClaimResponse> {
    let query = query.unwrap_or_default();
    let (WaitQuery { wait }, body) = split::<_, ClaimBody>(&query, &["wait"])?;
    let claim = stored(&caller, id, &body)?;
    let wait = duration("wait", wait.as_deref())?.unwrap_or_default().min(MAX_WAIT);
    let until = Instant::now() + wait;
    let _streaming = caller.open_stream()?;
    let mut draining = service.draining();
    let beat = (claim.waiter_lease / 3).max(Duration::from_millis(10));
    let mut signals = 0;
    loop {
        let status = renew_one(&service, &caller, &claim).await?;
        let is_over = Instant::now() >= until || service.is_draining();
        let Status::Waiting { head_remaining_ms, .. } = &status else {
            return Ok(axum::Json(state(&service, &claim, status)));
        };
        if is_over {
            return Ok(axum::Json(state(&service, &claim, status)));
        }
        let head = head_remaining_ms.map_or(beat, |ms| Duration::from_millis(ms.max(10)));
        let next = (Instant::now() + beat.min(head)).min(until);
        tokio::select! {
            signal = service.store().changed(&claim) => {
                signals += 1;
                // Without a pause, a store that always reports a change would keep a processor
                // busy. Even the shortest sleep takes a millisecond, so the handler does not sleep
                // after the first signals.
                match signal {
                    Ok(_) if signals <= 8 => {}
                    Ok(_) => sleep_until(next.min(Instant::now() + SIGNAL_PAUSE)).await,
                    Err(_) => sleep_until(next).await,
                }
            }
            () = sleep_until(next) => {}
            _ = draining.changed() => {}
        }
    }
}

/// `DELETE /v1/claims/{id}`.
#[utoipa::path(
    delete,
    path = "/v1/claims/{id}",
    operation_id = "leave",
    summary = "Release a lock, or leave its queue",
    params(ClaimPath, LeaveQuery, ClaimBody),
    responses((status = 200, description = "The claim is not in the queue any more", body = LeaveResponse)),
)]
pub(crate) async fn leave(
    State(service): State<Service>,
    caller: Caller,
    OfClaim(id): OfClaim,
    RawQuery(query): RawQuery,
) -> Answer<LeaveResponse> {
    let query = query.unwrap_or_default();
    let (LeaveQuery { keep_ms }, body) = split::<_, ClaimBody>(&query, &["keep_ms"])?;
    let claim = stored(&caller, id, &body)?;
    let keep = keep_ms.map(|ms| Duration::from_millis(ms).min(MAX_LEASE * 366));
    if keep.is_some() && !service.store().guarantees().min_hold {
        let what = "this store cannot keep a released lock unavailable";
        let error = Error::new(ErrorKind::Unsupported, what);
        return Err(error.with_hint("leave keep_ms out, or use another store").into());
    }
    let is_repeated = caller.usage().begin_release(claim.id);
    let left = service.call(claim.lease, service.store().leave(&claim, keep)).await?;
    // An earlier call, whose reply was lost, may have released it.
    match left || is_repeated {
        true => caller.usage().forget_claim(claim.id),
        false => caller.usage().lost(claim.id),
    }
    Ok(axum::Json(LeaveResponse { left }))
}

/// `POST /v1/claims/{id}/weight`.
#[utoipa::path(
    post,
    path = "/v1/claims/{id}/weight",
    operation_id = "convert",
    summary = "Change a writer into a reader or back",
    params(ClaimPath),
    request_body = ClaimBody,
    responses((status = 200, description = "Whether the claim has the new weight", body = ConvertResponse)),
)]
pub(crate) async fn convert(
    State(service): State<Service>,
    caller: Caller,
    OfClaim(id): OfClaim,
    Json(body): Json<ClaimBody>,
) -> Answer<ConvertResponse> {
    let claim = stored(&caller, id, &body)?;
    let converted = service.call(claim.lease, service.store().convert(&claim)).await?;
    if matches!(converted, Converted::Lost) {
        caller.usage().lost(claim.id);
    }
    Ok(axum::Json(converted.into()))
}
