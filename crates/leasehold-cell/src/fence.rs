//! Fences in values: what those in objects, memcached and NATS share.
//!
//! Each of these systems can do one thing in one step: write a value if it is still what was read. So what was read
//! must tell the greatest token that has written, and what is written is conditional on it: token and value are one.
//!
//! **The mark** is the value's first line, `leasehold fence 1 TOKEN`. Whoever reads the value without a fence
//! skips that line.
//!
//! **A stale token** is refused before anything is written. Who read before the next holder came by is refused by the
//! condition, looks again, and finds the greater token.

use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, Result, Token};

const START: &str = "leasehold fence 1 ";
/// So often a change is begun anew that somebody else was faster with.
const TRIES: usize = 32;

/// A place that can compare and set one value.
pub(crate) trait Guarded: Sync {
    /// Which state was read, absence among them.
    type Version: Send + Sync;

    /// Whether a look may show what was, and is no more.
    const LOOKS_BEHIND: bool;

    /// What is there, if anything is, and which state that is.
    fn look(&self) -> impl Future<Output = Result<(Option<Vec<u8>>, Self::Version)>> + Send;

    /// Writes it, if it is still what was read. Whether it was.
    fn write(
        &self,
        value: Vec<u8>,
        read: &Self::Version,
    ) -> impl Future<Output = Result<bool>> + Send;
}

/// What is there, with its mark.
struct Seen<V> {
    token: Option<Token>,
    value: Option<Vec<u8>>,
    version: V,
}

/// What the fences' `change` does.
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

/// What the fences' `read` does. Where a look may be behind, it is made sure of
/// by a write.
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
    Error::new(ErrorKind::Conflict, what).with_hint("retry later").during("fence")
}

/// What is there, if its mark allows this token.
async fn shows<G: Guarded>(at: &G, token: Token) -> Result<Seen<G::Version>> {
    let (there, version) = at.look().await?;
    let Some(there) = there else { return Ok(Seen { token: None, value: None, version }) };
    let (mark, value) = parsed(&there).ok_or_else(|| {
        let what = "the existing value was not written by this fence, so it has no token; it was \
                    left unchanged";
        let hint = "delete it or use another key; the fence then writes the first value";
        Error::new(ErrorKind::Corrupt, what).with_hint(hint).during("fence")
    })?;
    if mark > token {
        return Err(Error::stale_fence(mark, token));
    }
    Ok(Seen { token: Some(mark), value: Some(value.to_vec()), version })
}

fn marked(token: Token, value: &[u8]) -> Vec<u8> {
    let mut marked = format!("{START}{token}\n").into_bytes();
    marked.extend_from_slice(value);
    marked
}

fn parsed(there: &[u8]) -> Option<(Token, &[u8])> {
    let rest = there.strip_prefix(START.as_bytes())?;
    // The digits of a token, and the end of the line.
    let end = rest.iter().take(21).position(|&byte| byte == b'\n')?;
    let digits = std::str::from_utf8(&rest[..end]).ok()?;
    let token = Token::new(digits.parse().ok()?)?;
    (token.to_string() == digits).then_some((token, &rest[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_value_has_a_mark_or_has_none(text in testbed::texts(&["leasehold fence 1 42\nvalue"])) {
            if let Some((token, value)) = parsed(text.as_bytes()) {
                proptest::prop_assert_eq!(marked(token, value), text.as_bytes());
            }
        }
    }
}
