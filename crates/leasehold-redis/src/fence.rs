//! A fence in Redis: for data that lives on a Redis server while its lock may live anywhere.
//!
//! Redis runs a script as one atomic step, so a script that compares the token with the greatest one
//! seen, and writes only then, is a fence. Three forms: [`set`] for a string, [`hash_set`] for fields
//! of a hash, [`Fenced`] for whatever else a script can do; [`check`] only shows the token, which is
//! what a reader does first. Each refuses a stale token with the error `STALETOKEN seen offered`,
//! and has written nothing then.
//!
//! **The mark** is a field of the hash itself ([`TOKEN_FIELD`]), and otherwise a key beside the data
//! ([`mark_of`]), made so that both are in one slot of a cluster. It has no expiry: data that expires
//! leaves its mark behind, and a mark that is evicted or deleted lets the next late writer in. So:
//! `maxmemory-policy noeviction`.
//!
//! **What a server forgets, the fence forgets.** After a restart without its last writes, or a
//! fail-over to a replica that had not got them, the mark is what it was before, *together with the
//! data* that was written under it: a late writer may get in until the current holder writes again.
//!
//! Tokens are compared as text, since Lua's numbers end at 2⁵³, so what is not written as a token is
//! refused (`BADTOKEN`): a zero in front of it, an exponent, more than 2⁶³ − 1. Equal tokens pass.

use redis::aio::ConnectionLike;
use redis::{FromRedisValue, RedisError, ToRedisArgs};

use crate::redis::fault;
use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, Result, Token};

/// The field of a fenced hash that holds the greatest token seen.
pub const TOKEN_FIELD: &str = "fencing_token";

/// The word that the scripts' refusal begins with.
const STALE: &str = "STALETOKEN";
/// The same for what is no token at all: believed, it could close the resource for good.
const BAD: &str = "BADTOKEN";

/// Sets a string, if its mark allows. KEYS: the string, its mark. ARGV: the token, the value.
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

/// Sets fields of a hash, if its field `fencing_token` allows. KEYS: the hash. ARGV: the token, then
/// field, value, field, value, …
pub fn hash_script() -> String {
    include_str!("fence/hash.lua").to_owned()
}

/// Any script of yours, run only if the mark allows. KEYS: the mark, then those that your script sees
/// as KEYS. ARGV: the token, then those that it sees as ARGV. Redis undoes nothing of a script that
/// fails in the middle.
pub fn guarded_script(body: &str) -> String {
    include_str!("fence/guarded.lua").replacen("  -- BODY", body, 1)
}

/// The key that holds the mark of the string `key`: in the same slot of a cluster, unless `key` has a
/// `}` and no hash tag.
///
/// ```
/// use leasehold::fence::redis::mark_of;
/// assert_ne!(mark_of("stock:7"), "stock:7");
/// assert!(mark_of("{stock}:7").contains("{stock}")); // of one slot of a cluster
/// ```
pub fn mark_of(key: &str) -> String {
    let tagged = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    match tagged {
        Some((tag, _)) if !tag.is_empty() => format!("{key}:{TOKEN_FIELD}"),
        _ => format!("{{{key}}}:{TOKEN_FIELD}"),
    }
}

/// Sets the string `key`, if no greater token has been seen for it: one round trip.
///
/// # Cancel safety
/// Dropped, it may have been written or not: as after [`ErrorKind::Unreachable`].
///
/// # Errors
/// [`ErrorKind::StaleToken`] (see [`Error::stale_token`]), and nothing was written. Those of
/// [`Fence::fence`], and what Redis answers; [`ErrorKind::Unreachable`] leaves open whether it was
/// written.
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

/// Sets fields of the hash `key`, and its token, if it has seen no greater one: one round trip. With
/// no fields it only shows the token: do that before you read what the next write depends on.
///
/// # Cancel safety
/// As [`set`].
///
/// # Errors
/// As [`set`]; [`ErrorKind::Config`] for a field of the name [`TOKEN_FIELD`].
pub async fn hash_set<V: ToRedisArgs>(
    connection: &mut impl ConnectionLike,
    key: &str,
    fence: impl Fence,
    fields: &[(&str, V)],
) -> Result<()> {
    if fields.iter().any(|(field, _)| *field == TOKEN_FIELD) {
        let what = format!("the field {TOKEN_FIELD} is the fence's own: use another name");
        return Err(Error::new(ErrorKind::Config, what).during("fence"));
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

/// Shows the token to the mark of the string `key`, before it is read: from here on no smaller one
/// passes.
///
/// # Cancel safety
/// As [`set`].
///
/// # Errors
/// As [`set`].
pub async fn check(
    connection: &mut impl ConnectionLike,
    key: &str,
    fence: impl Fence,
) -> Result<()> {
    let nothing: [&str; 0] = [];
    let _: i64 = Fenced::new("return 1").run(connection, key, fence, &[], &nothing).await?;
    Ok(())
}

/// A script of the caller's, run only if no greater token has been seen.
///
/// ```no_run
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let client = redis::Client::open("redis://localhost").expect("a URL");
/// # let mut connection = client.get_multiplexed_async_connection().await.expect("a server");
/// # let locks = leasehold::connect("redis://localhost").await?;
/// use leasehold::fence::redis::{Fenced, check, hash_set, set};
/// let guard = locks.mutex("stock:7").lock().await?;
/// check(&mut connection, "stock:7", &guard).await?; // before it is read
/// set(&mut connection, "stock:7", &guard, 9).await?;
/// hash_set(&mut connection, "order:42", &guard, &[("state", "paid")]).await?;
/// let take = Fenced::new("return redis.call('DECRBY', KEYS[1], ARGV[1])");
/// let left: i64 = take.run(&mut connection, "stock:7", &guard, &["stock:7"], &[2]).await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Debug)]
pub struct Fenced(redis::Script);

impl Fenced {
    /// `body` is Lua, as for EVAL: it sees its KEYS and ARGV, and returns its answer. It is code, so
    /// never make it of anybody's input.
    pub fn new(body: &str) -> Self {
        Self(redis::Script::new(&guarded_script(body)))
    }

    /// Runs it under the mark of `resource`. In a cluster, `resource` and `keys` must be in one slot.
    ///
    /// # Cancel safety
    /// As [`set`].
    ///
    /// # Errors
    /// As [`set`].
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
        let token = |text: &str| text.parse::<Token>().ok();
        Some(Error::stale_fence(token(seen)?, token(offered)?))
    });
    let bad = || {
        let what = "the mark of this resource holds something else than a token: set it to the \
                    greatest token in use, or remove it";
        Error::new(ErrorKind::Corrupt, what).because(fault::shown(&error))
    };
    let is_bad = error.code() == Some(BAD);
    let other = || if is_bad { bad() } else { fault::explain(&error) };
    stale.flatten().unwrap_or_else(other).during("fence")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::keys::slot;

    #[test]
    fn s26_a_mark_is_in_the_slot_of_its_key() {
        for key in ["a", "a{b}c", "{", "a{b", "{a}{b}", "}{a}", "ключ"] {
            assert_eq!(slot(mark_of(key).as_bytes()), slot(key.as_bytes()), "{key:?}");
        }
        assert_eq!(mark_of("a"), "{a}:fencing_token");
        assert_eq!(mark_of("a{b}c"), "a{b}c:fencing_token");
        // The exceptions that are documented: nothing around them hashes as they do.
        for key in ["a}b", "}", "{}x", "a{}"] {
            assert_ne!(slot(mark_of(key).as_bytes()), slot(key.as_bytes()), "{key:?}");
        }
    }
}
