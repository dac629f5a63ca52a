//! How the OpenAPI document describes values that are checked when they are parsed.
//!
//! The types of the core do not depend on `utoipa`, so each has a schema here. A client generator
//! sees what the server accepts: the length of a name, the digits of a claim ID, the range of a
//! token.

use std::borrow::Cow;

use leasehold_core::{MAX_LEASE, Token};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};

/// Declares a type that has the schema of this text or number.
macro_rules! schema {
    ($(#[doc = $doc:literal])+ $name:ident, $schema:expr) => {
        $(#[doc = $doc])+
        #[derive(Debug)]
        pub struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let description = [$($doc),+].map(str::trim).join(" ");
                $schema.description(Some(description)).build().into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}

fn text(pattern: &str) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern))
}

fn one_of<const N: usize>(words: [&'static str; N]) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words))
}

fn number(min: u64, max: u64) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(min)).maximum(Some(max))
}

/// The longest lease in milliseconds.
const MAX_LEASE_MS: u64 = MAX_LEASE.as_secs() * 1000;

schema! {
    /// The name of a lock: 1 to 512 bytes of UTF-8, without control characters.
    LockName,
    text("^[^\\x00-\\x1f\\x7f-\\x9f]+$").min_length(Some(1)).max_length(Some(512))
}
schema! {
    /// The ID of a claim, which the client draws at random and keeps secret: 16 bytes in
    /// hexadecimal.
    ClaimIdHex,
    text("^[0-9A-Fa-f]{32}$")
}
schema! {
    /// The kind of a lock.
    LockKind,
    one_of(["mutex", "rwlock", "semaphore"])
}
schema! {
    /// A fencing token.
    FencingToken,
    number(1, Token::MAX)
}
schema! {
    /// A fencing token, or 0 for none. The server limits it, so that no client can use up the
    /// tokens.
    SeenToken,
    number(0, u64::MAX)
}
schema! {
    /// A duration in milliseconds. The server limits it.
    Milliseconds,
    number(0, u64::MAX)
}
schema! {
    /// A lease in milliseconds, up to a day.
    LeaseMs,
    number(1, MAX_LEASE_MS)
}
schema! {
    /// A number of permits.
    Permits,
    number(1, i32::MAX as u64)
}
schema! {
    /// The ID of a process.
    ProcessId,
    number(0, u32::MAX.into())
}
schema! {
    /// The time for which a lock is frozen, in milliseconds, up to a year.
    FreezeMs,
    number(1, MAX_LEASE_MS * 366)
}
schema! {
    /// A duration such as `10s`, `500ms`, `5m` or `1h30m`. A bare number is in seconds.
    DurationText,
    text("^[0-9]{1,9}((ms|s|m|h)([0-9]{1,9}(ms|s|m|h))*)?$")
}
schema! {
    /// A hold as text: `lh1:KIND:TOKEN:STORE:NAME`.
    SequencerText,
    text("^lh1:(mutex|read|write|semaphore):[1-9][0-9]{0,18}:[A-Za-z0-9._~%-]+:[A-Za-z0-9._~%-]+$")
}

/// The path parameter of the calls of a lock.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct LockPath {
    /// The lock name. Percent-encode every byte except ASCII letters and digits.
    #[param(value_type = LockName)]
    pub name: String,
}

/// The path parameter of the calls of a claim.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct ClaimPath {
    /// The claim ID: 32 hexadecimal digits, drawn at random by the client.
    #[param(value_type = ClaimIdHex)]
    pub id: String,
}
