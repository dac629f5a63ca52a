//! The calls for people and operators: locks, holders, evictions, and the store itself.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use leasehold_core::kit::frozen_label;
use leasehold_core::store::{Evict, LockInfo};
use leasehold_core::{Error, ErrorKind, Kind, MAX_LEASE, Sequencer, WaitChain};
use leasehold_http::wire::schema::LockPath;
use leasehold_http::wire::{
    CheckQuery, ClaimView, DoctorResponse, EvictRequest, EvictResponse, FindingView, FreezeRequest,
    HistoryResponse, HoldersQuery, ListQuery, LockList, LockResponse, LockView, PROBLEM_JSON,
    Problem, StoreView, WhyResponse,
};

use crate::access::{Caller, Right};
use crate::problem::{Failure, draining, invalid};
use crate::request::{Json, OfLock, Query};
use crate::service::Service;

type Answer<T> = Result<axum::Json<T>, Failure>;

/// The longest reason of a frozen lock, in bytes.
const LONGEST_REASON: usize = 240;
/// How long the store has to answer `GET /readyz`.
const READY: Duration = Duration::from_secs(5);

/// `GET /healthz`: reports that the process is alive.
#[utoipa::path(
    get,
    path = "/healthz",
    operation_id = "healthz",
    security(()),
    summary = "Check that the process is alive",
    responses((status = 200, description = "The process is alive", body = String, content_type = "text/plain")),
)]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// `GET /readyz`: reports whether the store answers and the server accepts claims.
#[utoipa::path(
    get,
    path = "/readyz",
    operation_id = "readyz",
    security(()),
    summary = "Check that the store answers",
    responses((status = 200, description = "The store answers", body = String, content_type = "text/plain")),
)]
pub(crate) async fn readyz(State(service): State<Service>) -> Result<&'static str, Failure> {
    if service.is_draining() {
        return Err(draining());
    }
    service.locks().ping(READY).await?;
    Ok("ok\n")
}

/// `GET /v1/store`.
#[utoipa::path(
    get,
    path = "/v1/store",
    operation_id = "show_store",
    summary = "Describe the store",
    responses((status = 200, description = "The store and what it guarantees", body = StoreView)),
)]
pub(crate) async fn store(State(service): State<Service>, _: Caller) -> axum::Json<StoreView> {
    let store = service.store();
    let mut info = store.info().clone();
    service.locks().identity().clone_into(&mut info.identity);
    axum::Json(StoreView::new(&info, store.longest_lease()))
}

/// `GET /v1/doctor`.
#[utoipa::path(
    get,
    path = "/v1/doctor",
    operation_id = "doctor",
    summary = "List what weakens the guarantees of the store",
    responses((status = 200, description = "What weakens the guarantees of the store", body = DoctorResponse)),
)]
pub(crate) async fn doctor(
    State(service): State<Service>,
    caller: Caller,
) -> Answer<DoctorResponse> {
    caller.check_all(Right::Inspect, "")?;
    let findings = service.read(service.store().diagnose()).await?;
    Ok(axum::Json(DoctorResponse { findings: findings.iter().map(FindingView::from).collect() }))
}

/// `GET /v1/check`.
#[utoipa::path(
    get,
    path = "/v1/check",
    operation_id = "check_hold",
    summary = "Check that a hold is still valid",
    params(CheckQuery),
    responses((status = 200, description = "The hold is valid", body = ClaimView), (status = 410, description = "The hold has ended", body = Problem, content_type = PROBLEM_JSON)),
)]
pub(crate) async fn check(
    State(service): State<Service>,
    caller: Caller,
    Query(query): Query<CheckQuery>,
) -> Answer<ClaimView> {
    let sequencer: Sequencer = query.sequencer.parse()?;
    caller.check(Right::Inspect, sequencer.name())?;
    let claim = service.read(service.locks().check(&sequencer)).await?;
    Ok(axum::Json(ClaimView::from(&claim)))
}

/// Returns all locks with this prefix that the caller may see.
pub(crate) async fn visible(
    service: &Service,
    caller: &Caller,
    prefix: &str,
) -> Result<Vec<LockInfo>, Failure> {
    caller.check_right(Right::Inspect)?;
    let mut all = Vec::new();
    for prefix in caller.prefixes_of(prefix) {
        all.extend(service.read(service.store().list(&prefix)).await?);
    }
    all.sort_by(|a: &LockInfo, b| a.name.cmp(&b.name));
    Ok(all)
}

/// `GET /v1/locks`.
#[utoipa::path(
    get,
    path = "/v1/locks",
    operation_id = "list_locks",
    summary = "List the locks in use",
    params(ListQuery),
    responses((status = 200, description = "The locks in use that the identity may inspect", body = LockList)),
)]
pub(crate) async fn list(
    State(service): State<Service>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Answer<LockList> {
    let locks = visible(&service, &caller, &query.prefix).await?;
    Ok(axum::Json(LockList { locks: locks.iter().map(LockView::from).collect() }))
}

/// `GET /v1/locks/{name}`.
#[utoipa::path(
    get,
    path = "/v1/locks/{name}",
    operation_id = "show_lock",
    summary = "Show a lock and its queue",
    params(LockPath),
    responses((status = 200, description = "The lock", body = LockResponse)),
)]
pub(crate) async fn show(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
) -> Answer<LockResponse> {
    caller.check(Right::Inspect, &name)?;
    let lock = service.read(service.store().read(&name)).await?;
    Ok(axum::Json(LockResponse { lock: lock.as_ref().map(LockView::from) }))
}

/// `GET /v1/locks/{name}/holders`. The right `hold` or `inspect` is needed.
#[utoipa::path(
    get,
    path = "/v1/locks/{name}/holders",
    operation_id = "holders",
    summary = "Show the holders of a lock",
    params(LockPath, HoldersQuery),
    responses((status = 200, description = "The lock with its first holders", body = LockResponse)),
)]
pub(crate) async fn holders(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
    Query(query): Query<HoldersQuery>,
) -> Answer<LockResponse> {
    if caller.check(Right::Hold, &name).is_err() {
        caller.check(Right::Inspect, &name)?;
    }
    let lock = service.read(service.store().holders(&name, query.token)).await?;
    Ok(axum::Json(LockResponse { lock: lock.as_ref().map(LockView::from) }))
}

/// `GET /v1/locks/{name}/why`.
#[utoipa::path(
    get,
    path = "/v1/locks/{name}/why",
    operation_id = "why",
    summary = "Explain why a lock is not available",
    params(LockPath),
    responses((status = 200, description = "The chain of locks for which its holders wait, and a deadlock", body = WhyResponse)),
)]
pub(crate) async fn why(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
) -> Answer<WhyResponse> {
    caller.check(Right::Inspect, &name)?;
    let mut locks = visible(&service, &caller, "").await?;
    locks.retain(|lock| caller.sees(&lock.name));
    Ok(axum::Json(WhyResponse::from(&WaitChain::of(&locks, &name))))
}

/// `GET /v1/locks/{name}/history`. The lock is read first, so the history has its current holders.
#[utoipa::path(
    get,
    path = "/v1/locks/{name}/history",
    operation_id = "history",
    summary = "Show the past holds of a lock",
    params(LockPath),
    responses((status = 200, description = "The holds that this server has observed", body = HistoryResponse)),
)]
pub(crate) async fn history(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
) -> Answer<HistoryResponse> {
    caller.check(Right::Inspect, &name)?;
    // If the store does not answer, the history contains only earlier observations.
    let _ = service.read(service.store().read(&name)).await;
    Ok(axum::Json(service.history().of(&name)))
}

/// `POST /v1/locks/{name}/evict`.
#[utoipa::path(
    post,
    path = "/v1/locks/{name}/evict",
    operation_id = "evict",
    summary = "Evict holders",
    params(LockPath),
    request_body = Option<EvictRequest>,
    responses((status = 200, description = "The matching claims were removed", body = EvictResponse)),
)]
pub(crate) async fn evict(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
    Json(request): Json<EvictRequest>,
) -> Answer<EvictResponse> {
    caller.check(Right::Evict, &name)?;
    let which = request.token.map_or(Evict::Holders, Evict::Token);
    let evicted = service.read(service.store().evict(&name, which)).await?;
    tracing::warn!(
        target: "leasehold_server",
        lock = %name,
        identity = caller.identity.name,
        evicted,
        "evicted"
    );
    Ok(axum::Json(EvictResponse { evicted }))
}

/// `POST /v1/locks/{name}/freeze`: acquires all of the lock, and releases it with a cooldown.
#[utoipa::path(
    post,
    path = "/v1/locks/{name}/freeze",
    operation_id = "freeze",
    summary = "Freeze a lock",
    params(LockPath),
    request_body = FreezeRequest,
    responses((status = 204, description = "The lock is frozen")),
)]
pub(crate) async fn freeze(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
    Json(request): Json<FreezeRequest>,
) -> Result<StatusCode, Failure> {
    caller.check(Right::Freeze, &name)?;
    let FreezeRequest { for_ms, reason, wait_ms, kind, capacity } = request;
    let period = Duration::from_millis(for_ms);
    if period.is_zero() || period > MAX_LEASE * 366 {
        return Err(invalid(format!("invalid for_ms {for_ms}"), "set a time up to a year"));
    }
    if reason.len() > LONGEST_REASON {
        let what = format!("the reason is too long: {} bytes", reason.len());
        return Err(invalid(what, &format!("use at most {LONGEST_REASON} bytes")));
    }
    let (locks, text) = (service.locks(), name.as_str());
    let label = frozen_label(&reason);
    /// Sets the options that every kind of lock has.
    macro_rules! with_options {
        ($lock:expr) => {
            $lock.min_hold(period).label(&label)
        };
    }
    let wanted = match (kind.unwrap_or(Kind::Mutex), capacity) {
        (Kind::Mutex, None) => with_options!(locks.mutex(text)).into(),
        (Kind::RwLock, None) => with_options!(locks.rwlock(text)).write_request(),
        (Kind::Semaphore, Some(capacity)) => {
            with_options!(locks.semaphore(text, capacity)).permit_request(capacity)
        }
        (Kind::Semaphore, None) => {
            return Err(invalid("missing capacity of the semaphore", r#"set "capacity""#));
        }
        (_, Some(_)) => {
            let hint = r#"set "kind" to "semaphore", or omit "capacity""#;
            return Err(invalid("only a semaphore has a capacity", hint));
        }
    };
    let guards = match wait_ms {
        0 => locks.try_lock_all([wanted]).await?,
        ms => locks.lock_all_timeout([wanted], Duration::from_millis(ms)).await?,
    };
    for guard in guards {
        if guard.release().await? == leasehold_core::Released::Pending {
            let what = format!("the store did not answer: {name} may or may not be frozen");
            let error = Error::new(ErrorKind::Unreachable, what);
            return Err(error.with_hint("look at the lock, and repeat the request").into());
        }
    }
    tracing::warn!(
        target: "leasehold_server",
        lock = %name,
        identity = caller.identity.name,
        "frozen"
    );
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v1/locks/{name}/unfreeze`. Like `leasehold unfreeze`, it does not end other cooldowns.
#[utoipa::path(
    post,
    path = "/v1/locks/{name}/unfreeze",
    operation_id = "unfreeze",
    summary = "Unfreeze a lock",
    params(LockPath),
    responses((status = 204, description = "The lock is no longer frozen")),
)]
pub(crate) async fn unfreeze(
    State(service): State<Service>,
    caller: Caller,
    OfLock(name): OfLock,
) -> Result<StatusCode, Failure> {
    caller.check(Right::Freeze, &name)?;
    let store = service.store();
    let claims = service.read(store.read(&name)).await?.map_or_else(Vec::new, |lock| lock.claims);
    let frozen = claims.iter().filter(|claim| claim.frozen().is_some());
    let mut ended = 0;
    for token in frozen.filter_map(|claim| claim.token) {
        ended += service.read(store.evict(&name, Evict::Token(token))).await?;
    }
    if ended == 0 {
        let failure = invalid(format!("{name} is not frozen"), "check the name of the lock");
        return Err(failure.with_status(StatusCode::CONFLICT));
    }
    tracing::warn!(
        target: "leasehold_server",
        lock = %name,
        identity = caller.identity.name,
        "unfrozen"
    );
    Ok(StatusCode::NO_CONTENT)
}
