//! The common part of the fences for objects, memcached and NATS.
//!
//! Each of these systems has one atomic operation: it writes a value if the value has not changed
//! since it was read. So the value contains the highest token that has written it, and each write
//! is conditional on the value that was read.
//!
//! **The token** is the value's first line, `leasehold fence 1 TOKEN`. A program that reads the
//! value without a fence must skip that line.
//!
//! **A stale token** is rejected before anything is written. If a writer read the value before the
//! next holder wrote it, the writer's condition fails. The writer then reads again, and finds the
//! higher token.

use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, FencingToken, Result};

const START: &str = "leasehold fence 1 ";
/// Maximum number of attempts if other clients change the value at the same time.
const TRIES: usize = 32;

/// A place that supports compare-and-set of one value.
pub(crate) trait Guarded: Sync {
    /// The state that was read, which may be the absence of a value.
    type Version: Send + Sync;

    /// Whether a read can be stale.
    const LOOKS_BEHIND: bool;

    /// Returns the value, if there is one, and its state.
    fn look(&self) -> impl Future<Output = Result<(Option<Vec<u8>>, Self::Version)>> + Send;

    /// Writes the value if the state has not changed since the state was read. Returns whether the
    /// value was written.
    fn write(
        &self,
        value: Vec<u8>,
        read: &Self::Version,
    ) -> impl Future<Output = Result<bool>> + Send;
}

/// A value and its token.
struct Seen<V> {
    token: Option<FencingToken>,
    value: Option<Vec<u8>>,
    version: V,
}

/// Implements the `change` function of the fences.
pub(crate) async fn change(
    at: &impl Guarded,
    fence: impl Fence,
    mut work: impl FnMut(Option<&[u8]>) -> Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>> {
    for _ in 0..TRIES {
        let token = fence.fence()?;
        let seen = shows(at, token).await?;
        let Some(new) = work(seen.value.as_deref()) else { return Ok(seen.value) };
        if at.write(marked(token, &new), &seen.version).await? {
            return Ok(Some(new));
        }
    }
    Err(others_were_faster())
}

/// Implements the `read` function of the fences. If reads can be stale, a write confirms the
/// result.
pub(crate) async fn read<G: Guarded>(at: &G, fence: impl Fence) -> Result<Option<Vec<u8>>> {
    for _ in 0..TRIES {
        let token = fence.fence()?;
        let seen = shows(at, token).await?;
        let Some(value) = seen.value else { return Ok(None) };
        let is_shown = seen.token == Some(token) && !G::LOOKS_BEHIND;
        if is_shown || at.write(marked(token, &value), &seen.version).await? {
            return Ok(Some(value));
        }
    }
    Err(others_were_faster())
}

fn others_were_faster() -> Error {
    let what = "other writers changed the value during every attempt";
    Error::new(ErrorKind::Conflict, what).with_hint("retry later").with_operation("fence")
}

/// Returns the value if its token is not higher than `token`.
async fn shows<G: Guarded>(at: &G, token: FencingToken) -> Result<Seen<G::Version>> {
    let (there, version) = at.look().await?;
    let Some(there) = there else { return Ok(Seen { token: None, value: None, version }) };
    let (mark, value) = parsed(&there).ok_or_else(|| {
        let what = "the existing value was not written by this fence, so it has no token; it was \
                    left unchanged";
        let hint = "delete it or use another key; the fence then writes the first value";
        Error::new(ErrorKind::Corrupt, what).with_hint(hint).with_operation("fence")
    })?;
    if mark > token {
        return Err(Error::stale_fence(mark, token));
    }
    Ok(Seen { token: Some(mark), value: Some(value.to_vec()), version })
}

fn marked(token: FencingToken, value: &[u8]) -> Vec<u8> {
    let mut marked = format!("{START}{token}\n").into_bytes();
    marked.extend_from_slice(value);
    marked
}

fn parsed(there: &[u8]) -> Option<(FencingToken, &[u8])> {
    let rest = there.strip_prefix(START.as_bytes())?;
    // At most 20 digits of a token, and the end of the line.
    let end = rest.iter().take(21).position(|&byte| byte == b'\n')?;
    let digits = std::str::from_utf8(&rest[..end]).ok()?;
    let token = FencingToken::new(digits.parse().ok()?)?;
    (token.to_string() == digits).then_some((token, &rest[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_fenced_value_is_encoded_to_the_same_bytes(text in testbed::texts(&["leasehold fence 1 42\nvalue"])) {
            if let Some((token, value)) = parsed(text.as_bytes()) {
                proptest::prop_assert_eq!(marked(token, value), text.as_bytes());
            }
        }
    }
}
