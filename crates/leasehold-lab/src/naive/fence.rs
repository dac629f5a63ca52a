//! **Broken on purpose: do not copy.** A check of a token that is not part of the write.

use leasehold::Token;

use crate::trouble::{Result, Trouble};
use crate::wire::Wire;

/// Whether no greater token was seen, a moment ago; remembers this one.
pub(crate) async fn is_good(wire: &mut Wire, token: Token) -> Result<bool> {
    let seen = wire.ask(&["GET", "mark"]).await?;
    let seen: u64 = match &*seen {
        "nil" => 0,
        number => number.parse().map_err(|_| Trouble::new(format!("no token: {number}")))?,
    };
    if seen > token.get() {
        return Ok(false);
    }
    wire.say(&["SET", "mark", &token.to_string()]).await?;
    Ok(true)
}
