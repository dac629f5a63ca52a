//! A fence in Redis, for data on a Redis server. The lock itself may be in any store.
//!
//! Redis runs a script as one atomic step, so a script can compare the token with the highest token
//! seen before it writes. There are three forms: [`set`] for a string, [`hash_set`] for fields of a
//! hash, and [`Fenced`] for any other script. [`check`] only presents the token; call it before you
//! read. Each rejects a stale token with the error `STALETOKEN seen offered` and writes nothing.
//!
//! **The highest token seen** is a field of the hash itself ([`TOKEN_FIELD`]), or otherwise a
//! separate key ([`mark_of`]) in the same cluster slot as the data. It never expires, even when the
//! data does. If it is evicted by Redis or deleted, the next stale token is accepted, so set
//! `maxmemory-policy noeviction`.
//!
//! **The fence is as durable as the server.** After a restart that loses the last writes, or a
//! fail-over to a replica without them, both the token and the data written under it return to the
//! earlier state. A stale token can then be accepted until the current holder writes again.
//!
//! Tokens are compared as text, because Lua's numbers are exact only up to 2⁵³. Other notations are
//! rejected (`BADTOKEN`): leading zeros, exponents, and numbers above 2⁶³ − 1. Equal tokens pass.

use redis::aio::ConnectionLike;
use redis::{FromRedisValue, RedisError, ToRedisArgs};

use crate::redis::fault;
use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, FencingToken, Result};

/// The field of a fenced hash that stores the highest token seen.
pub const TOKEN_FIELD: &str = "fencing_token";

/// The error code of the scripts for a stale token.
const STALE: &str = "STALETOKEN";
/// The error code of the scripts for an invalid token, which could block the resource permanently.
const BAD: &str = "BADTOKEN";

/// Returns the script that sets a string, unless a higher token has been seen.
///
/// KEYS: the string, the key of its token. ARGV: the token, the value.
///
/// ```
/// use leasehold::fence::redis::{guarded_script, hash_script, set_script};
/// for script in [set_script(), hash_script(), guarded_script("return redis.call('GET', KEYS[1])")] {
///     assert!(script.contains("STALETOKEN")); // for EVAL, in any language
/// }
/// ```
pub fn set_script() -> String {
    include_str!("fence/set.lua").to_owned()
}

/// Returns the script that sets fields of a hash, unless the hash's `fencing_token` field holds a
/// higher token.
///
/// KEYS: the hash. ARGV: the token, then field, value, field, value, …
pub fn hash_script() -> String {
    include_str!("fence/hash.lua").to_owned()
}

/// Returns a script that runs `body`, unless a higher token has been seen.
///
/// KEYS: the key of the token, then the KEYS of `body`. ARGV: the token, then the ARGV of `body`.
/// If `body` fails, Redis does not undo what it has written.
pub fn guarded_script(body: &str) -> String {
    include_str!("fence/guarded.lua").replacen("  -- BODY", body, 1)
}

/// Returns the key that stores the highest token seen for the string `key`.
///
/// The returned key is in the same cluster slot as `key`, unless `key` contains a `}` and no hash
/// tag.
///
/// ```
/// use leasehold::fence::redis::mark_of;
/// assert_ne!(mark_of("stock:7"), "stock:7");
/// assert!(mark_of("{stock}:7").contains("{stock}")); // in the same cluster slot
/// ```
pub fn mark_of(key: &str) -> String {
    let tagged = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    match tagged {
        Some((tag, _)) if !tag.is_empty() => format!("{key}:{TOKEN_FIELD}"),
        _ => format!("{{{key}}}:{TOKEN_FIELD}"),
    }
}

/// Sets the string `key`, unless a higher token has been seen for it. One round trip.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// - [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): nothing was written.
/// - [`ErrorKind::Unreachable`]: the write may or may not have happened.
/// - The errors of [`Fence::fence`], and any error of Redis.
pub async fn set(
    connection: &mut impl ConnectionLike,
    key: &str,
    fence: impl Fence,
    value: impl ToRedisArgs,
) -> Result<()> {
    let script = redis::Script::new(&set_script());
    let mut call = script.prepare_invoke();
    call.key(key).key(mark_of(key)).arg(fence.fence()?.get()).arg(value);
    call.invoke_async(connection).await.map_err(explain)
}

/// Sets fields of the hash `key` and its token, unless a higher token has been seen for the hash.
/// One round trip.
///
/// Without fields, this only presents the token. Do that before you read data on which the next
/// write depends.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// - [`ErrorKind::Config`]: a field has the reserved name [`TOKEN_FIELD`].
/// - The errors of [`set`].
pub async fn hash_set<V: ToRedisArgs>(
    connection: &mut impl ConnectionLike,
    key: &str,
    fence: impl Fence,
    fields: &[(&str, V)],
) -> Result<()> {
    if fields.iter().any(|(field, _)| *field == TOKEN_FIELD) {
        let what = format!("the field name {TOKEN_FIELD:?} is reserved for the fence");
        let hint = "use another field name";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint).with_operation("fence"));
    }
    let script = redis::Script::new(&hash_script());
    let mut call = script.prepare_invoke();
    call.key(key).arg(fence.fence()?.get());
    for (field, value) in fields {
        call.arg(*field).arg(value);
    }
    let _: i64 = call.invoke_async(connection).await.map_err(explain)?;
    Ok(())
}

/// Presents the token for the string `key`, so that no smaller token passes from then on. Call this
/// before you read the string.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// The errors of [`set`].
pub async fn check(
    connection: &mut impl ConnectionLike,
    key: &str,
    fence: impl Fence,
) -> Result<()> {
    let nothing: [&str; 0] = [];
    let _: i64 = Fenced::new("return 1").run(connection, key, fence, &[], &nothing).await?;
    Ok(())
}

/// Your own script, which runs only if no higher token has been seen.
///
/// ```no_run
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let client = redis::Client::open("redis://localhost").expect("a URL");
/// # let mut connection = client.get_multiplexed_async_connection().await.expect("a server");
/// # let locks = leasehold::connect("redis://localhost").await?;
/// use leasehold::fence::redis::{Fenced, check, hash_set, set};
/// let guard = locks.mutex("stock:7").lock().await?;
/// check(&mut connection, "stock:7", &guard).await?; // before you read it
/// set(&mut connection, "stock:7", &guard, 9).await?;
/// hash_set(&mut connection, "order:42", &guard, &[("state", "paid")]).await?;
/// let take = Fenced::new("return redis.call('DECRBY', KEYS[1], ARGV[1])");
/// let left: i64 = take.run(&mut connection, "stock:7", &guard, &["stock:7"], &[2]).await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
pub struct Fenced(redis::Script);

impl Fenced {
    /// Creates the script from Lua code, as for EVAL. The code has its own KEYS and ARGV and
    /// returns its result. Never build it from user input.
    pub fn new(body: &str) -> Self {
        Self(redis::Script::new(&guarded_script(body)))
    }

    /// Runs the script, unless a higher token has been seen for `resource`. In a cluster,
    /// `resource` and `keys` must be in one slot.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened.
    ///
    /// # Errors
    /// The errors of [`set`].
    pub async fn run<T: FromRedisValue>(
        &self,
        connection: &mut impl ConnectionLike,
        resource: &str,
        fence: impl Fence,
        keys: &[&str],
        args: &[impl ToRedisArgs],
    ) -> Result<T> {
        let mut call = self.0.prepare_invoke();
        call.key(mark_of(resource)).arg(fence.fence()?.get());
        for key in keys {
            call.key(*key);
        }
        for arg in args {
            call.arg(arg);
        }
        call.invoke_async(connection).await.map_err(explain)
    }
}

fn explain(error: RedisError) -> Error {
    let stale = (error.code() == Some(STALE)).then(|| {
        let (seen, offered) = error.detail()?.split_once(' ')?;
        let token = |text: &str| text.parse::<FencingToken>().ok();
        Some(Error::stale_fence(token(seen)?, token(offered)?))
    });
    let bad = || {
        let what = "the key that holds this resource's highest token contains an invalid token";
        let hint = "set it to the highest token in use, or delete it";
        Error::new(ErrorKind::Corrupt, what).with_hint(hint).with_source(fault::shown(&error))
    };
    let is_bad = error.code() == Some(BAD);
    let other = || if is_bad { bad() } else { fault::explain(&error) };
    stale.flatten().unwrap_or_else(other).with_operation("fence")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::keys::slot;

    // S26
    #[test]
    fn token_key_is_in_the_slot_of_its_key() {
        for key in ["a", "a{b}c", "{", "a{b", "{a}{b}", "}{a}", "ключ"] {
            assert_eq!(slot(mark_of(key).as_bytes()), slot(key.as_bytes()), "{key:?}");
        }
        assert_eq!(mark_of("a"), "{a}:fencing_token");
        assert_eq!(mark_of("a{b}c"), "a{b}c:fencing_token");
        // The documented exceptions: the token keys of these keys are in other slots.
        for key in ["a}b", "}", "{}x", "a{}"] {
            assert_ne!(slot(mark_of(key).as_bytes()), slot(key.as_bytes()), "{key:?}");
        }
    }
}
