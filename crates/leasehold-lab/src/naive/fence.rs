//! **Broken on purpose: do not copy.** A check of a token that is not part of the write.

use leasehold::FencingToken;

use crate::trouble::{Result, Trouble};
use crate::wire::Wire;

/// Returns whether no higher token has been seen, and stores this one if so. Not atomic.
pub(crate) async fn is_good(wire: &mut Wire, token: FencingToken) -> Result<bool> {
    let seen = wire.ask(&["GET", "highest"]).await?;
    let seen: u64 = match &*seen {
        "nil" => 0,
        number => number.parse().map_err(|_| Trouble::new(format!("not a token: {number}")))?,
    };
    if seen > token.get() {
        return Ok(false);
    }
    wire.say(&["SET", "highest", &token.to_string()]).await?;
    Ok(true)
}
