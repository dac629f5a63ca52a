//! The requests and responses of `leasehold serve`, shared by the server and by its clients.
//!
//! The service is the contract of [`Store`](leasehold_core::store::Store) over HTTP. The server
//! keeps no state of its own: it forwards each call to the store behind it.
//!
//! - **The client chooses the claim ID.** Every call is idempotent by it, and may be repeated. An
//!   error means that it is *unknown* whether the call took effect.
//! - **Times are durations**, in milliseconds, measured from when the response was written. They
//!   are never instants, so no two clocks are compared. (Only [`HistoryResponse`] has instants, for
//!   people.) A client counts a lease from before it sent the request. A client rounds up what it
//!   requests ([`to_ms`]), and the server rounds down what is left of a lease.
//! - **A claim ID is a secret**: a client that knows it and has the same identity can release the
//!   claim. Responses never contain one. They have the claim's [handle](ClaimResponse::handle), which
//!   is not secret.
//!
//! | request | body or query | response |
//! |---|---|---|
//! | `GET /v1/store` | | [`StoreView`] |
//! | `POST /v1/claims` | [`JoinRequest`] | 201 or 202 [`ClaimResponse`]; 409 or 423 [`Problem`] with holders |
//! | `PUT /v1/claims/{id}` | [`ClaimBody`] | 200 [`ClaimResponse`] (held, waiting or lost) |
//! | `POST /v1/claims/renew` | [`RenewRequest`] | 200 [`RenewResponse`], one state per claim in order |
//! | `GET /v1/claims/{id}` | query: [`ClaimBody`], `wait=30s` | 200 [`ClaimResponse`], once the wait has ended, or after `wait` |
//! | `DELETE /v1/claims/{id}` | query: [`ClaimBody`], [`keep_ms`](LeaveQuery) | 200 [`LeaveResponse`] |
//! | `POST /v1/claims/{id}/weight` | [`ClaimBody`] with the new weight | 200 [`ConvertResponse`] |
//! | `GET /v1/locks` | [`ListQuery`] | [`LockList`] |
//! | `GET /v1/locks/{name}` | | [`LockResponse`] |
//! | `GET /v1/locks/{name}/holders` | [`HoldersQuery`] | [`LockResponse`] |
//! | `GET /v1/locks/{name}/why` | | [`WhyResponse`] |
//! | `GET /v1/locks/{name}/history` | | [`HistoryResponse`] |
//! | `POST /v1/locks/{name}/evict` | [`EvictRequest`] | [`EvictResponse`] |
//! | `POST /v1/locks/{name}/freeze` | [`FreezeRequest`] | 204 |
//! | `POST /v1/locks/{name}/unfreeze` | | 204 |
//! | `POST /v1/locks/{name}/hold` | [`HoldQuery`] | a stream of [`HoldEvent`] |
//! | `GET /v1/events` | [`EventsQuery`] | a stream of [`ServiceEvent`] (SSE) |
//! | `GET /v1/check` | [`CheckQuery`] | [`ClaimView`]; 410 [`Problem`] if it is lost |
//! | `GET /v1/doctor` | | [`DoctorResponse`] |
//!
//! In paths, `{name}` is the percent-encoded name of the lock. [`lock_path`] leaves ASCII letters,
//! digits, `-`, `.`, `_` and `~` as they are, but encodes the dots of the names `.` and `..`.
//! `{id}` is the claim ID as 32 hexadecimal digits ([`claim_path`]). Errors are [`Problem`]s with
//! the content type [`PROBLEM_JSON`]. A client presents its identity with the header
//! `Authorization: Bearer TOKEN`.

#[cfg(feature = "openapi")]
#[cfg_attr(docsrs, doc(cfg(feature = "openapi")))]
pub mod schema;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::doctor::{Finding, Severity};
use leasehold_core::kit::Escaped;
use leasehold_core::store::{
    ClaimInfo, ClaimState, ClockModel, Converted, Durability, Guarantees, Joined, Liveness,
    LockInfo, Mode, Place, Renewal, Stall, StoreInfo, Survival, Wakeup,
};
use leasehold_core::{
    Claim, ClaimId, DEFAULT_LEASE, DEFAULT_WAITER_LEASE, Error, ErrorKind, Holder, HolderInfo,
    Kind, MAX_LEASE, MAX_READERS, Name, Result, Token, WaitChain,
};
use serde::{Deserialize, Serialize};

#[cfg(feature = "openapi")]
use self::schema::{
    ClaimIdHex, DurationText, FencingToken, FreezeMs, LeaseMs, LockKind, LockName, Milliseconds,
    Permits, ProcessId, SeenToken, SequencerText,
};

/// The content type of a [`Problem`] (RFC 9457).
pub const PROBLEM_JSON: &str = "application/problem+json";
/// The content type of a stream of JSON lines.
pub const JSON_LINES: &str = "application/x-ndjson";
/// The content type of a stream of Server-Sent Events.
pub const EVENT_STREAM: &str = "text/event-stream";
/// The longest body of a request, in bytes.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// The maximum number of claims in one [`RenewRequest`].
pub const MAX_RENEWALS: usize = 1000;
/// The longest time that one `GET /v1/claims/{id}` waits.
pub const MAX_WAIT: Duration = Duration::from_secs(60);
/// The longest time between two events of a stream.
pub const PING_EVERY: Duration = Duration::from_secs(5);

/// Returns the path of a lock, below which its calls are: `/v1/locks/{name}`.
pub fn lock_path(name: &str) -> String {
    match name {
        // Clients and proxies resolve these segments, unless they are escaped.
        "." => "/v1/locks/%2E".to_owned(),
        ".." => "/v1/locks/%2E%2E".to_owned(),
        name => format!("/v1/locks/{}", Escaped(name)),
    }
}

/// Returns the path of a claim: `/v1/claims/{id}`.
pub fn claim_path(id: ClaimId) -> String {
    format!("/v1/claims/{}", id.to_hex())
}

/// Returns a requested duration in milliseconds, rounded up. So the store never keeps a lease for
/// less time than its client counts on.
pub fn to_ms(time: Duration) -> u64 {
    let up = time.as_nanos().div_ceil(1_000_000);
    u64::try_from(up).unwrap_or(u64::MAX)
}

/// Returns what is left of a lease in milliseconds, rounded down.
fn left_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// One claim, as a client sends it in a body, or in the query of a request that has no body.
///
/// Only `name` is required. The fields are flat, so that they can be the parameters of a query.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams, utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
#[serde(deny_unknown_fields)]
pub struct ClaimBody {
    /// The name of the lock.
    #[cfg_attr(feature = "openapi", schema(value_type = LockName), param(value_type = LockName))]
    pub name: Name,
    /// The kind of the lock: `mutex`, `rwlock` or `semaphore`.
    #[serde(default = "mutex")]
    #[cfg_attr(feature = "openapi", schema(value_type = LockKind), param(value_type = LockKind))]
    pub kind: Kind,
    /// How much of the capacity the claim takes. By default, one permit of a semaphore, or all of
    /// any other lock. A claim of weight 1 on a `rwlock` is a reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Permits>), param(value_type = Option<Permits>))]
    pub weight: Option<u32>,
    /// The capacity of the lock. Required for a semaphore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Permits>), param(value_type = Option<Permits>))]
    pub capacity: Option<u32>,
    /// How long a grant lasts without a renewal.
    #[serde(default = "default_lease_ms")]
    #[cfg_attr(feature = "openapi", schema(value_type = LeaseMs), param(value_type = LeaseMs))]
    pub lease_ms: u64,
    /// How long a queue position lasts without a heartbeat. By default, 6 s, or the lease if that
    /// is shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<LeaseMs>), param(value_type = Option<LeaseMs>))]
    pub waiter_lease_ms: Option<u64>,
    /// How long the lock stays unavailable after an unclean end of the claim.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "openapi", schema(value_type = Milliseconds), param(value_type = Milliseconds))]
    pub lock_delay_ms: u64,
    /// The highest token that the client has seen.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "openapi", schema(value_type = SeenToken), param(value_type = SeenToken))]
    pub seen: u64,
    /// The client's host name, shown to people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// The client's process ID, shown to people.
    #[serde(default, skip_serializing_if = "is_zero_pid")]
    #[cfg_attr(feature = "openapi", schema(value_type = ProcessId), param(value_type = ProcessId))]
    pub pid: u32,
    /// The client's label, shown to people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
}

fn mutex() -> Kind {
    Kind::Mutex
}

fn default_lease_ms() -> u64 {
    to_ms(DEFAULT_LEASE)
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn is_zero_pid(n: &u32) -> bool {
    *n == 0
}

impl From<&Claim> for ClaimBody {
    fn from(claim: &Claim) -> Self {
        Self {
            name: claim.name.clone(),
            kind: claim.kind,
            weight: Some(claim.weight),
            capacity: Some(claim.capacity),
            lease_ms: to_ms(claim.lease),
            waiter_lease_ms: Some(to_ms(claim.waiter_lease)),
            lock_delay_ms: to_ms(claim.lock_delay),
            seen: claim.seen,
            host: claim.holder.host.clone(),
            pid: claim.holder.pid,
            label: claim.holder.label.clone(),
        }
    }
}

impl ClaimBody {
    /// Returns the claim with this ID.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): a field is out of range, or a semaphore has no capacity.
    pub fn claim(&self, id: ClaimId) -> Result<Claim> {
        let invalid = |what: String, hint: &str| {
            Err(Error::new(ErrorKind::Config, what).with_hint(hint).with_lock(&self.name))
        };
        let capacity = match (self.kind, self.capacity) {
            (Kind::Mutex, None) => 1,
            (Kind::RwLock, None) => MAX_READERS,
            // Only the store knows whether the lock has this capacity.
            (_, Some(capacity)) if capacity > 0 && capacity <= i32::MAX as u32 => capacity,
            (Kind::Semaphore, None) => {
                let hint = r#"set "capacity" to the number of permits of the semaphore"#;
                return invalid("missing capacity of the semaphore".into(), hint);
            }
            (kind, Some(capacity)) => {
                let hint =
                    r#"omit "capacity", or for a semaphore, set it to the number of permits"#;
                return invalid(format!("invalid capacity {capacity} of a {kind}"), hint);
            }
        };
        let all = if self.kind == Kind::Semaphore { 1 } else { capacity };
        let weight = self.weight.unwrap_or(all);
        if weight == 0 || weight > capacity {
            let what = format!("invalid weight {weight}: expected 1 to {capacity}");
            return invalid(what, "set a weight from 1 to the capacity");
        }
        let lease = Duration::from_millis(self.lease_ms);
        if lease.is_zero() || lease > MAX_LEASE {
            let what = format!("invalid lease_ms {}", self.lease_ms);
            return invalid(what, "set a lease from 50 ms to 1 day");
        }
        let waiter_lease = match self.waiter_lease_ms {
            Some(ms) => Duration::from_millis(ms),
            None => DEFAULT_WAITER_LEASE.min(lease),
        };
        if waiter_lease.is_zero() || waiter_lease > MAX_LEASE {
            let what = format!("invalid waiter_lease_ms {}", left_ms(waiter_lease));
            return invalid(what, "set a waiter lease from 50 ms to 1 day");
        }
        let mut claim = Claim::new(self.name.clone(), self.kind, weight, capacity)?;
        claim.id = id;
        claim.lease = lease;
        claim.waiter_lease = waiter_lease;
        claim.lock_delay = Duration::from_millis(self.lock_delay_ms).min(MAX_LEASE);
        claim.seen = self.seen.min(Token::MAX);
        claim.holder = Arc::new(Holder {
            host: printable(&self.host),
            pid: self.pid,
            label: printable(&self.label),
        });
        Ok(claim)
    }
}

/// Removes control characters, and cuts the text to 256 bytes, as for every label.
fn printable(text: &str) -> String {
    let mut clean: String = text.chars().filter(|c| !c.is_control()).collect();
    clean.truncate(clean.floor_char_boundary(256));
    clean
}

/// The body of `POST /v1/claims`: [`Store::join`](leasehold_core::store::Store::join).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// The claim's ID, which the client has drawn at random.
    #[cfg_attr(feature = "openapi", schema(value_type = ClaimIdHex))]
    pub id: ClaimId,
    /// `try` (the default): join only if the claim is granted immediately. `wait`: wait in the
    /// queue.
    #[serde(default)]
    pub mode: JoinMode,
    /// The lock to acquire, and the options of the claim.
    pub claim: ClaimBody,
}

/// Whether a claim that cannot be granted immediately waits in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum JoinMode {
    /// Join only if the claim is granted immediately.
    #[default]
    Try,
    /// Wait in the queue.
    Wait,
}

impl From<Mode> for JoinMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Try => Self::Try,
            Mode::Wait => Self::Wait,
        }
    }
}

impl From<JoinMode> for Mode {
    fn from(mode: JoinMode) -> Self {
        match mode {
            JoinMode::Try => Self::Try,
            JoinMode::Wait => Self::Wait,
        }
    }
}

/// The state of a claim.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ClaimResponse {
    /// The name of the claim in [events](ServiceEvent). It is not secret: the claim's ID cannot be
    /// computed from it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub handle: String,
    /// The status of the claim.
    #[serde(flatten)]
    pub status: Status,
}

/// The status of a claim, in the field `status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum Status {
    /// The claim holds the lock.
    Held {
        /// The fencing token, always the same for the same claim.
        #[cfg_attr(feature = "openapi", schema(value_type = FencingToken))]
        token: Token,
        /// How long the grant lasts without a renewal. Missing if the store has no leases.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        remaining_ms: Option<u64>,
        /// The hold as text, for `GET /v1/check`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sequencer: Option<String>,
        /// How many replicas of the store had the grant, if the store waits for them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        confirmed: Option<u32>,
    },
    /// The claim waits in the queue.
    Waiting {
        /// The number of claims ahead of this one, including holders.
        ahead: usize,
        /// The time after which to poll again, even without a notification. Missing if it is
        /// unknown.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        head_remaining_ms: Option<u64>,
        /// The token that the claim will have as a holder, if the store assigns tokens to waiters.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<FencingToken>))]
        token: Option<Token>,
    },
    /// The store does not have the claim.
    Lost,
    /// The state is unknown: this renewal failed, while others of the same request have results.
    Unknown {
        /// Why the renewal failed.
        problem: Box<Problem>,
    },
}

impl Status {
    fn waiting(place: Place) -> Self {
        let Place { ahead, head_remaining, token } = place;
        let head_remaining_ms = head_remaining.map(to_ms);
        Self::Waiting { ahead, head_remaining_ms, token }
    }

    fn held(token: Token, remaining: Option<Duration>) -> Self {
        let remaining_ms = remaining.map(left_ms);
        Self::Held { token, remaining_ms, sequencer: None, confirmed: None }
    }

    /// Returns the status after a `join`, or `None` if the lock was busy, which is reported as a
    /// [`Problem`].
    pub fn of_joined(joined: &Joined) -> Option<Self> {
        match joined {
            Joined::Holding { token, remaining } => Some(Self::held(*token, *remaining)),
            Joined::Waiting(place) => Some(Self::waiting(*place)),
            Joined::Busy { .. } => None,
        }
    }

    /// Returns the status after a renewal.
    pub fn of_renewal(renewal: &Renewal) -> Self {
        match renewal {
            Renewal::Holding { token, remaining } => Self::held(*token, *remaining),
            Renewal::Waiting(place) => Self::waiting(*place),
            Renewal::Lost => Self::Lost,
            Renewal::Unknown { kind, why } => {
                Self::Unknown { problem: Box::new(Problem::new(&Error::new(*kind, why.clone()))) }
            }
        }
    }

    /// Returns the status as the result of a renewal.
    pub fn renewal(&self) -> Renewal {
        match self {
            Self::Held { token, remaining_ms, .. } => {
                let remaining = remaining_ms.map(Duration::from_millis);
                Renewal::Holding { token: *token, remaining }
            }
            Self::Waiting { ahead, head_remaining_ms, token } => Renewal::Waiting(Place {
                ahead: *ahead,
                head_remaining: head_remaining_ms.map(Duration::from_millis),
                token: *token,
            }),
            Self::Lost => Renewal::Lost,
            Self::Unknown { problem } => Renewal::unknown(&problem.error()),
        }
    }

    /// Returns the status as the result of a `join`, or `None` if it is neither a grant nor a queue
    /// position.
    pub fn joined(&self) -> Option<Joined> {
        match self.renewal() {
            Renewal::Holding { token, remaining } => Some(Joined::Holding { token, remaining }),
            Renewal::Waiting(place) => Some(Joined::Waiting(place)),
            Renewal::Lost | Renewal::Unknown { .. } => None,
        }
    }
}

/// The body of `POST /v1/claims/renew`: [`Store::renew`](leasehold_core::store::Store::renew).
///
/// The lease of a claim that holds its lock is how long the grant is to last from now.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RenewRequest {
    /// The claims, at most [`MAX_RENEWALS`].
    pub claims: Vec<RenewClaim>,
}

/// One claim of a [`RenewRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RenewClaim {
    /// The claim's ID.
    #[cfg_attr(feature = "openapi", schema(value_type = ClaimIdHex))]
    pub id: ClaimId,
    /// The claim to renew, with its new lease.
    pub claim: ClaimBody,
}

/// The response to a [`RenewRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RenewResponse {
    /// One state per claim, in the order of the request.
    pub claims: Vec<ClaimResponse>,
}

/// The query of `GET /v1/claims/{id}`, in addition to the fields of the [`ClaimBody`].
///
/// While the request waits, the server renews the claim.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub struct WaitQuery {
    /// How long to wait for a grant, such as `30s`, at most [`MAX_WAIT`]. By default, the server
    /// does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<DurationText>))]
    pub wait: Option<String>,
}

/// The query of `DELETE /v1/claims/{id}`, in addition to the fields of the [`ClaimBody`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub struct LeaveQuery {
    /// How long the lock stays unavailable after the release, if the claim held it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<Milliseconds>))]
    pub keep_ms: Option<u64>,
}

/// The response to `DELETE /v1/claims/{id}`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaveResponse {
    /// Whether the claim was in the queue.
    pub left: bool,
}

/// The response to `POST /v1/claims/{id}/weight`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum ConvertResponse {
    /// The claim holds the lock with the requested weight.
    Done {
        /// The fencing token, which has not changed.
        #[cfg_attr(feature = "openapi", schema(value_type = FencingToken))]
        token: Token,
    },
    /// The claim holds the lock as before, because there are other holders or a cooldown.
    Busy,
    /// The claim does not hold the lock.
    Lost,
}

impl From<Converted> for ConvertResponse {
    fn from(converted: Converted) -> Self {
        match converted {
            Converted::Done { token } => Self::Done { token },
            Converted::Busy => Self::Busy,
            Converted::Lost => Self::Lost,
        }
    }
}

impl From<ConvertResponse> for Converted {
    fn from(response: ConvertResponse) -> Self {
        match response {
            ConvertResponse::Done { token } => Self::Done { token },
            ConvertResponse::Busy => Self::Busy,
            ConvertResponse::Lost => Self::Lost,
        }
    }
}

/// A description of one claim in a queue, without its secret ID.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ClaimView {
    /// The state of the claim: `holding`, `waiting` or `departed` (in its cooldown).
    #[serde(rename = "standing")]
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub state: ClaimState,
    /// The client's host name.
    pub host: String,
    /// The client's process ID.
    #[cfg_attr(feature = "openapi", schema(value_type = ProcessId))]
    pub pid: u32,
    /// The client's label.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// The fencing token, if one was assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<FencingToken>))]
    pub token: Option<Token>,
    /// How much of the capacity the claim takes.
    pub weight: u32,
    /// How long the claim has been in this state.
    pub since_ms: u64,
    /// The time until the claim's lease expires. Missing if it has no lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_ms: Option<u64>,
}

impl From<&ClaimInfo> for ClaimView {
    fn from(claim: &ClaimInfo) -> Self {
        Self {
            state: claim.state,
            host: claim.holder.host.clone(),
            pid: claim.holder.pid,
            label: claim.holder.label.clone(),
            token: claim.token,
            weight: claim.weight,
            since_ms: left_ms(claim.since),
            remaining_ms: claim.remaining.map(left_ms),
        }
    }
}

impl From<ClaimView> for ClaimInfo {
    fn from(view: ClaimView) -> Self {
        let holder = Holder { host: view.host, pid: view.pid, label: view.label };
        let (since, remaining) = (view.since_ms, view.remaining_ms.map(Duration::from_millis));
        let since = Duration::from_millis(since);
        Self::new(view.state, holder, view.token, view.weight, since, remaining)
    }
}

/// A lock and its queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LockView {
    /// The name of the lock.
    #[cfg_attr(feature = "openapi", schema(value_type = LockName))]
    pub name: Name,
    /// The kind of the lock.
    #[cfg_attr(feature = "openapi", schema(value_type = LockKind))]
    pub kind: Kind,
    /// The capacity of the lock (1 for a mutex).
    pub capacity: u32,
    /// The claims in the queue, in order.
    pub claims: Vec<ClaimView>,
    /// The reason why the queue could not be read. Set only in a list of locks. If set, only the
    /// name is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
    /// The reason why the lock is frozen, which may be empty. Missing if the lock is not frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
}

impl From<&LockInfo> for LockView {
    fn from(lock: &LockInfo) -> Self {
        Self {
            name: lock.name.clone(),
            kind: lock.kind,
            capacity: lock.capacity,
            claims: lock.claims.iter().map(ClaimView::from).collect(),
            unreadable: lock.unreadable.clone(),
            frozen: lock.claims.iter().find_map(ClaimInfo::frozen).map(str::to_owned),
        }
    }
}

impl From<LockView> for LockInfo {
    fn from(view: LockView) -> Self {
        let claims = view.claims.into_iter().map(ClaimInfo::from).collect();
        let mut info = Self::new(view.name, view.kind, view.capacity, claims);
        info.unreadable = view.unreadable;
        info
    }
}

/// The response to `GET /v1/locks/{name}` and `GET /v1/locks/{name}/holders`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LockResponse {
    /// The lock, or `null` if its queue is empty.
    pub lock: Option<LockView>,
}

/// The query of `GET /v1/locks/{name}/holders`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub struct HoldersQuery {
    /// The holder with this token must be in the response if it holds the lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<FencingToken>))]
    pub token: Option<Token>,
}

/// The query of `GET /metrics`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub struct MetricsQuery {
    /// If given, the response also has the number of holders and waiters of each lock whose name
    /// begins with this text. The server reads these locks from the store.
    #[serde(default)]
    pub locks: Option<String>,
}

/// The query of `GET /v1/locks`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub struct ListQuery {
    /// Only locks whose names begin with this text are listed.
    #[serde(default)]
    pub prefix: String,
}

/// The response to `GET /v1/locks`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LockList {
    /// The locks in use, sorted by name.
    pub locks: Vec<LockView>,
}

/// The response to `GET /v1/locks/{name}/why`: which clients the lock's waiters wait for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WhyResponse {
    /// The lock, then the locks for which holders of earlier locks in the chain wait.
    pub chain: Vec<LockView>,
    /// The clients that wait for each other, if there may be a deadlock. Empty otherwise. A client
    /// is a process. If it has several tasks, the one that holds a lock may not be the one that
    /// waits.
    pub deadlock: Vec<WaitsFor>,
}

/// One party of a deadlock: a client that holds one lock and waits for another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaitsFor {
    /// The client's host name.
    pub host: String,
    /// The client's process ID.
    #[cfg_attr(feature = "openapi", schema(value_type = ProcessId))]
    pub pid: u32,
    /// The lock that the client holds.
    #[cfg_attr(feature = "openapi", schema(value_type = LockName))]
    pub holds: Name,
    /// The lock for which the client waits.
    #[cfg_attr(feature = "openapi", schema(value_type = LockName))]
    pub waits_for: Name,
}

impl From<&WaitChain> for WhyResponse {
    fn from(chain: &WaitChain) -> Self {
        let party = |of: &leasehold_core::WaitsFor| WaitsFor {
            host: of.host.clone(),
            pid: of.pid,
            holds: of.holds.clone(),
            waits_for: of.waits_for.clone(),
        };
        Self {
            chain: chain.locks.iter().map(LockView::from).collect(),
            deadlock: chain.deadlock.iter().map(party).collect(),
        }
    }
}

/// The response to `GET /v1/locks/{name}/history`: the holds that this server has observed.
///
/// A restart of the server loses the history, unless `leasehold serve --history` keeps it. Times
/// are those of the server's clock, in seconds since 1970.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HistoryResponse {
    /// The time of the response.
    pub now: f64,
    /// Holds that ended before this time may be missing.
    pub since: f64,
    /// Whether the server also observes the claims of other servers and clients. If not, it
    /// observes them only when a client lists or reads these locks.
    pub watches_store: bool,
    /// The holds, the latest first.
    pub holds: Vec<PastHold>,
}

/// One hold of a [`HistoryResponse`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PastHold {
    /// The client's host name.
    pub host: String,
    /// The client's process ID.
    #[cfg_attr(feature = "openapi", schema(value_type = ProcessId))]
    pub pid: u32,
    /// The client's label.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// The fencing token.
    #[cfg_attr(feature = "openapi", schema(value_type = FencingToken))]
    pub token: Token,
    /// The kind of the lock.
    #[cfg_attr(feature = "openapi", schema(value_type = LockKind))]
    pub kind: Kind,
    /// How much of the capacity the hold took.
    pub weight: u32,
    /// When the hold began.
    pub from: f64,
    /// When the server last saw that the client held the lock.
    pub seen: f64,
    /// When the server saw that the hold had ended. `null` while the lock is held.
    pub to: Option<f64>,
    /// How the hold ended. `null` while the lock is held.
    pub end: Option<HoldEnd>,
}

/// How a [`PastHold`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum HoldEnd {
    /// The client released the lock through this server.
    Released,
    /// The holder was evicted through this server.
    Evicted,
    /// The client tried to renew or release the lock through this server, but no longer held it.
    Lost,
    /// The lock was not held any more when the server looked: the hold was released, evicted or
    /// expired between [`seen`](PastHold::seen) and [`to`](PastHold::to).
    Gone,
    /// An end that this version does not know.
    #[serde(other)]
    Other,
}

/// The body of `POST /v1/locks/{name}/evict`: [`Store::evict`](leasehold_core::store::Store::evict).
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EvictRequest {
    /// The token of the claim to evict. By default, all holders and cooldowns are evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<FencingToken>))]
    pub token: Option<Token>,
}

/// The response to `POST /v1/locks/{name}/evict`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvictResponse {
    /// How many claims were removed.
    pub evicted: usize,
}

/// The body of `POST /v1/locks/{name}/freeze`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FreezeRequest {
    /// How long the lock stays frozen.
    #[cfg_attr(feature = "openapi", schema(value_type = FreezeMs))]
    pub for_ms: u64,
    /// The reason, shown to every client that tries to acquire the lock.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_length = 240))]
    pub reason: String,
    /// How long to wait for the holders and earlier waiters. By default, the server does not wait.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "openapi", schema(value_type = Milliseconds))]
    pub wait_ms: u64,
    /// The kind of the lock, if it is not a mutex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<LockKind>))]
    pub kind: Option<Kind>,
    /// The number of permits of a semaphore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Permits>))]
    pub capacity: Option<u32>,
}

/// The query of `POST /v1/locks/{name}/hold`. Durations are written as `15s` or `1m`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
#[serde(deny_unknown_fields)]
pub struct HoldQuery {
    /// What to acquire: `mutex` (the default), `read`, `write` or `semaphore`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<HoldKind>,
    /// How many permits of a semaphore to take. By default, 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<Permits>))]
    pub permits: Option<u32>,
    /// The number of permits that the semaphore has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<Permits>))]
    pub capacity: Option<u32>,
    /// How long to wait for the lock. By default, without limit. With `0s`, the server does not
    /// wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<DurationText>))]
    pub wait: Option<String>,
    /// The lease: how long the lock stays held if the server can no longer renew it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<DurationText>))]
    pub lease: Option<String>,
    /// How long the lock stays held after the connection has closed. By default, it is released
    /// immediately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<DurationText>))]
    pub grace: Option<String>,
    /// The time after which the server releases the lock, even if the connection is still open. By
    /// default, there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<DurationText>))]
    pub max_hold: Option<String>,
    /// The client's label, shown to people. Default: the name of the identity, and the client's
    /// address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
}

/// What a [`HoldQuery`] acquires: the kind of the lock, and the side of a read-write lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum HoldKind {
    /// A mutex.
    Mutex,
    /// A reader of a read-write lock.
    Read,
    /// A writer of a read-write lock.
    Write,
    /// Permits of a semaphore.
    Semaphore,
}

/// One event of a hold stream, in the field `event`: one JSON object per line.
///
/// It has the schema of `leasehold hold --json`, except that `deadline` is missing, because the
/// client has a different clock. New events and fields may be added.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum HoldEvent {
    /// The claim waits in the queue.
    Waiting {
        /// The name of the lock.
        name: String,
        /// The number of claims ahead of this one, including holders.
        ahead: usize,
        /// The claim's number among the waiters, from 1, if the number of holders is known.
        place: Option<usize>,
        /// The holder, or the reason why the lock is unavailable, in words.
        held_by: Option<String>,
        /// The holders, as far as they are known.
        holders: Vec<ClaimLine>,
    },
    /// The lock was acquired.
    Held {
        /// The name of the lock.
        name: String,
        /// The fencing token.
        token: u64,
        /// The hold as text, for `GET /v1/check`.
        sequencer: String,
        /// How much longer the lease lasts.
        remaining_seconds: Option<f64>,
    },
    /// The server is running, and the state has not changed.
    Ping {
        /// How much longer the lease lasts. `null` while waiting.
        remaining_seconds: Option<f64>,
    },
    /// The lease was not renewed in time: stop working.
    AtRisk {
        /// The name of the lock.
        name: String,
        /// How much longer the lease lasts.
        remaining_seconds: Option<f64>,
    },
    /// A renewal succeeded after all.
    Recovered {
        /// The name of the lock.
        name: String,
        /// How much longer the lease lasts.
        remaining_seconds: Option<f64>,
    },
    /// The lock is lost. This is always the last event.
    Lost {
        /// The name of the lock.
        name: String,
        /// Why the lock was lost, in one word.
        reason: String,
    },
    /// The server released the lock. This is always the last event.
    Released {
        /// The name of the lock.
        name: String,
        /// The fencing token.
        token: u64,
        /// Whether the store has confirmed the release.
        answered: bool,
    },
    /// The server shuts down: finish soon, or connect to another server.
    Draining,
    /// The lock was not acquired, or is no longer held. This is always the last event.
    Failed {
        /// The exit status that `leasehold hold` would have.
        code: u8,
        /// The kind of the error.
        kind: String,
        /// What went wrong.
        message: String,
        /// The next step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
    /// An event that this version does not know.
    #[serde(other)]
    Other,
}

/// A holder in a [`HoldEvent`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ClaimLine {
    /// The status of the claim: `held`, `waiting` or `cooldown`.
    pub state: String,
    /// The client's host name.
    pub host: String,
    /// The client's process ID.
    #[cfg_attr(feature = "openapi", schema(value_type = ProcessId))]
    pub pid: u32,
    /// The client's label.
    pub label: String,
    /// The fencing token, if one was assigned.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<FencingToken>))]
    pub token: Option<Token>,
    /// How much of the capacity the claim takes.
    pub weight: u32,
    /// How long the claim has been in this state.
    pub since_seconds: f64,
    /// The time until the claim's lease expires.
    pub remaining_seconds: Option<f64>,
}

impl From<&ClaimInfo> for ClaimLine {
    fn from(claim: &ClaimInfo) -> Self {
        Self {
            state: claim.state.as_str().to_owned(),
            host: claim.holder.host.clone(),
            pid: claim.holder.pid,
            label: claim.holder.label.clone(),
            token: claim.token,
            weight: claim.weight,
            since_seconds: claim.since.as_secs_f64(),
            remaining_seconds: claim.remaining.map(|left| left.as_secs_f64()),
        }
    }
}

/// The query of `GET /v1/events`. Without `name` and `prefix`, only evictions are reported.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
#[serde(deny_unknown_fields)]
pub struct EventsQuery {
    /// The lock whose queue is reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", param(value_type = Option<LockName>))]
    pub name: Option<Name>,
    /// The queues of all locks whose names begin with this text are reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
}

/// One event of `GET /v1/events`. Its SSE type is the value of the field `event`, and its data is
/// this value as JSON. Every event is a hint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ServiceEvent {
    /// The subscription has begun: poll now. Changes from now on are reported.
    Ready,
    /// One of the queues may have changed: poll.
    Changed,
    /// The claim with this handle was evicted, or may have been: renew it now.
    Ask {
        /// The claim's [handle](ClaimResponse::handle).
        handle: String,
    },
    /// Nothing has happened for a while.
    Ping,
    /// The server shuts down: connect again.
    Draining,
    /// An event that this version does not know.
    #[serde(other)]
    Other,
}

/// The query of `GET /v1/check`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
#[serde(deny_unknown_fields)]
pub struct CheckQuery {
    /// The sequencer of the hold, as text.
    #[cfg_attr(feature = "openapi", param(value_type = SequencerText))]
    pub sequencer: String,
}

/// The response to `GET /v1/store`: facts about the store behind the server.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoreView {
    /// The version of the API: 1.
    pub api: u32,
    /// The store's URL, without credentials.
    pub url: String,
    /// The identity of the store, as in sequencers.
    pub identity: String,
    /// What clients of this server can rely on.
    pub guarantees: GuaranteesView,
    /// Extra time that a grant may need for replication.
    pub replication_timeout_ms: u64,
    /// The longest lease that the store can guarantee now.
    pub longest_lease_ms: u64,
    /// Whether several servers can share the store, so that each serves every claim.
    pub replicas: bool,
}

impl StoreView {
    /// Describes a store.
    pub fn new(info: &StoreInfo, longest_lease: Duration) -> Self {
        Self {
            api: 1,
            url: info.url.clone(),
            identity: info.identity.clone(),
            guarantees: GuaranteesView::from(&info.guarantees),
            replication_timeout_ms: to_ms(info.replication_timeout),
            longest_lease_ms: left_ms(longest_lease),
            replicas: info.guarantees.liveness == Liveness::Lease,
        }
    }
}

/// [`Guarantees`], as they are sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[allow(missing_docs, reason = "the fields of Guarantees")]
pub struct GuaranteesView {
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<LockKind>))]
    pub kinds: Vec<Kind>,
    pub fifo: bool,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub wakeup: Wakeup,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub evicted: Wakeup,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub followed: Wakeup,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub liveness: Liveness,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub clock: ClockModel,
    pub lock_delay: bool,
    pub min_hold: bool,
    pub downgrades: bool,
    pub upgrades: bool,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub grant: Durability,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub token: Durability,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub on_pause: Survival,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub on_clock_step: Survival,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub on_store_crash: Survival,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub on_failover: Survival,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub on_partition: Survival,
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub stall: Stall,
    pub recovery_ms: u64,
    pub recovery_leases: u32,
    pub notes: Vec<String>,
}

impl From<&Guarantees> for GuaranteesView {
    fn from(of: &Guarantees) -> Self {
        Self {
            kinds: of.kinds.to_vec(),
            fifo: of.fifo,
            wakeup: of.wakeup,
            evicted: of.evicted,
            followed: of.followed,
            liveness: of.liveness,
            clock: of.clock,
            lock_delay: of.lock_delay,
            min_hold: of.min_hold,
            downgrades: of.downgrades,
            upgrades: of.upgrades,
            grant: of.grant,
            token: of.token,
            on_pause: of.on_pause,
            on_clock_step: of.on_clock_step,
            on_store_crash: of.on_store_crash,
            on_failover: of.on_failover,
            on_partition: of.on_partition,
            stall: of.stall,
            recovery_ms: to_ms(of.recovery),
            recovery_leases: of.recovery_leases,
            notes: of.notes.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<GuaranteesView> for Guarantees {
    fn from(view: GuaranteesView) -> Self {
        let mut of = Self::least();
        of.kinds = Cow::Owned(view.kinds);
        of.fifo = view.fifo;
        of.wakeup = view.wakeup;
        of.evicted = view.evicted;
        of.followed = view.followed;
        of.liveness = view.liveness;
        of.clock = view.clock;
        of.lock_delay = view.lock_delay;
        of.min_hold = view.min_hold;
        of.downgrades = view.downgrades;
        of.upgrades = view.upgrades;
        of.grant = view.grant;
        of.token = view.token;
        of.on_pause = view.on_pause;
        of.on_clock_step = view.on_clock_step;
        of.on_store_crash = view.on_store_crash;
        of.on_failover = view.on_failover;
        of.on_partition = view.on_partition;
        of.stall = view.stall;
        of.recovery = Duration::from_millis(view.recovery_ms);
        of.recovery_leases = view.recovery_leases;
        of.notes = view.notes.into_iter().map(Cow::Owned).collect();
        of
    }
}

/// The response to `GET /v1/doctor`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DoctorResponse {
    /// What weakens the store's guarantees.
    pub findings: Vec<FindingView>,
}

/// A [`Finding`], as it is sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FindingView {
    /// How serious the finding is.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub severity: Severity,
    /// A stable ID for programs.
    pub id: String,
    /// What was found.
    pub what: String,
    /// Why it matters.
    pub why: String,
    /// How to fix it. May be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

impl From<&Finding> for FindingView {
    fn from(finding: &Finding) -> Self {
        Self {
            severity: finding.severity,
            id: finding.id.to_owned(),
            what: finding.what.clone(),
            why: finding.why.to_string(),
            fix: finding.fix.to_string(),
        }
    }
}

/// An error, as problem details (RFC 9457).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `urn:leasehold:error:` followed by the kind.
    #[serde(rename = "type", default)]
    pub uri: String,
    /// The kind in words.
    #[serde(default)]
    pub title: String,
    /// The HTTP status of the response. Missing in a list of results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// What went wrong, in one line.
    #[serde(default)]
    pub detail: String,
    /// The kind as one word, which does not change between versions: `contended`, `unreachable`, …
    #[serde(default)]
    pub kind: String,
    /// The next step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The same request cannot succeed before this time has passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The holders, as far as the store reported them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<HolderView>,
    /// The reason why the lock is frozen, which may be empty. Missing if the lock is not frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
}

/// A holder, as a [`Problem`] lists it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HolderView {
    /// The client's host name.
    pub host: String,
    /// The client's process ID.
    #[cfg_attr(feature = "openapi", schema(value_type = ProcessId))]
    pub pid: u32,
    /// The client's label.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// The fencing token.
    #[cfg_attr(feature = "openapi", schema(value_type = FencingToken))]
    pub token: Token,
    /// How long the lock has been held.
    pub since_ms: u64,
}

impl From<&HolderInfo> for HolderView {
    fn from(info: &HolderInfo) -> Self {
        Self {
            host: info.holder.host.clone(),
            pid: info.holder.pid,
            label: info.holder.label.clone(),
            token: info.token,
            since_ms: left_ms(info.since),
        }
    }
}

impl From<HolderView> for HolderInfo {
    fn from(view: HolderView) -> Self {
        let holder = Holder { host: view.host, pid: view.pid, label: view.label };
        Self::new(holder, view.token, Duration::from_millis(view.since_ms))
    }
}

const URI: &str = "urn:leasehold:error:";

/// The kinds of errors that a service sends.
const KINDS: [ErrorKind; 17] = [
    ErrorKind::Contended,
    ErrorKind::Timeout,
    ErrorKind::Lost,
    ErrorKind::AtRisk,
    ErrorKind::Unreachable,
    ErrorKind::Unconfirmed,
    ErrorKind::Unsupported,
    ErrorKind::Mismatch,
    ErrorKind::InvalidName,
    ErrorKind::Config,
    ErrorKind::Denied,
    ErrorKind::Full,
    ErrorKind::Corrupt,
    ErrorKind::Closed,
    ErrorKind::Conflict,
    ErrorKind::StaleVersion,
    ErrorKind::StaleToken,
];

impl Problem {
    /// Describes an error, without a status.
    pub fn new(error: &Error) -> Self {
        let kind = error.kind();
        Self {
            uri: format!("{URI}{}", kind.as_str()),
            title: kind.to_string(),
            status: None,
            detail: error.reason(),
            kind: kind.as_str().to_owned(),
            hint: error.hint().map(str::to_owned),
            retry_after_ms: error.retry_after().map(to_ms),
            holders: error.holders().iter().map(HolderView::from).collect(),
            frozen: None,
        }
    }

    /// Converts the problem back to an error with the same kind, message, hint and holders.
    ///
    /// A kind that this version does not know becomes [`Unreachable`](ErrorKind::Unreachable), so
    /// the client retries.
    pub fn error(&self) -> Error {
        let known = KINDS.into_iter().find(|kind| kind.as_str() == self.kind);
        let what = if self.detail.is_empty() { &self.title } else { &self.detail };
        let mut error = Error::new(known.unwrap_or(ErrorKind::Unreachable), what.clone());
        if let Some(hint) = &self.hint {
            error = error.with_hint(hint.clone());
        }
        if let Some(ms) = self.retry_after_ms {
            error = error.with_retry_after(Duration::from_millis(ms));
        }
        error.held_by(self.holders.iter().cloned().map(HolderInfo::from).collect())
    }

    /// Returns whether the lock is busy, which is a result of a `join` and not an error.
    pub fn is_busy(&self) -> bool {
        self.kind == ErrorKind::Contended.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_kind_message_hint_and_time() {
        for kind in KINDS {
            let error = Error::new(kind, "what").with_hint("do").with_retry_after(MAX_WAIT);
            let json = serde_json::to_string(&Problem::new(&error)).unwrap();
            let read = serde_json::from_str::<Problem>(&json).unwrap().error();
            let facts =
                |e: &Error| (e.kind(), e.reason(), e.hint().map(str::to_owned), e.retry_after());
            assert_eq!(facts(&read), facts(&error));
        }
        let newer = Problem { kind: "new".into(), detail: "x".into(), ..Problem::default() };
        assert!(newer.error().is_transient());
    }

    #[test]
    fn claim_round_trips_without_shortening_its_leases() {
        let name = Name::new("a/../b").unwrap();
        let mut claim = Claim::new(name, Kind::Semaphore, 2, 3).unwrap();
        claim.lease = Duration::from_micros(50_001);
        claim.waiter_lease = Duration::from_micros(10_500);
        claim.lock_delay = Duration::from_micros(1);
        claim.seen = 7;
        let body = ClaimBody::from(&claim);
        let json = serde_json::to_string(&body).unwrap();
        let read = serde_json::from_str::<ClaimBody>(&json).unwrap().claim(claim.id).unwrap();
        assert_eq!((read.id, &read.name, read.kind), (claim.id, &claim.name, claim.kind));
        assert_eq!((read.weight, read.capacity, read.seen), (2, 3, 7));
        assert_eq!(read.holder, claim.holder);
        assert_eq!(read.lease, Duration::from_millis(51));
        assert_eq!(read.waiter_lease, Duration::from_millis(11));
        assert_eq!(read.lock_delay, Duration::from_millis(1));
        assert!(serde_json::from_str::<ClaimBody>(r#"{"name":"a","lease":"1h"}"#).is_err());
    }

    #[test]
    fn remaining_lease_is_rounded_down() {
        let token = Token::new(5).unwrap();
        let remaining = Some(Duration::from_micros(1999));
        let status = Status::of_renewal(&Renewal::Holding { token, remaining });
        let json = serde_json::to_value(ClaimResponse { handle: String::new(), status }).unwrap();
        let expected = serde_json::json!({"status": "held", "token": 5, "remaining_ms": 1});
        assert_eq!(json, expected);
        let read: ClaimResponse = serde_json::from_value(json).unwrap();
        let Renewal::Holding { token: read_token, remaining } = read.status.renewal() else {
            panic!("the lock was not acquired")
        };
        assert_eq!((read_token, remaining), (token, Some(Duration::from_millis(1))));
    }

    #[test]
    fn guarantees_round_trip() {
        let least = Guarantees::least();
        let json = serde_json::to_string(&GuaranteesView::from(&least)).unwrap();
        let read: GuaranteesView = serde_json::from_str(&json).unwrap();
        assert_eq!(Guarantees::from(read).in_words(), least.in_words());
    }

    #[test]
    fn names_are_one_segment_of_a_path() {
        for name in ["..", ".", "a/../b", "a?b#c", "é"] {
            let path = lock_path(name);
            let segment = path.strip_prefix("/v1/locks/").unwrap();
            assert!(!segment.contains(['/', '?', '#']) && segment != "." && segment != "..");
        }
    }
}
