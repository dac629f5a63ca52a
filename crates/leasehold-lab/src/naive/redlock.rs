//! **Broken on purpose: do not copy.** Redlock whose servers vote as soon as they are up.

use crate::ours::NAME;
use crate::trouble::Result;
use crate::wire::Wire;

/// Requests the votes of all servers. `None` is a server that is down.
pub(crate) async fn votes(servers: &mut [Option<Wire>], me: &str) -> Result<Vec<String>> {
    let mut votes = Vec::new();
    for server in servers {
        votes.push(match server {
            Some(wire) => wire.ask(&["SET", NAME, me, "NX", "PX", "60000"]).await?,
            None => "down".to_owned(),
        });
    }
    Ok(votes)
}

/// Returns whether more than half of the votes are positive.
pub(crate) fn is_majority(votes: &[String]) -> bool {
    votes.iter().filter(|vote| *vote == "OK").count() * 2 > votes.len()
}
