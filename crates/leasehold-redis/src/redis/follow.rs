//! Following queues: Redis itself tells which keys changed.
//!
//! `CLIENT TRACKING … BCAST` on a connection of its own: the server tells the keys that begin so whenever one of
//! them is written, deleted or expires, whoever did it. So a lock that is followed costs nobody who takes it
//! a command, and foreign clients are seen as well. One connection to each master for each
//! that follows.
//!
//! - *A connection breaks, or another server is the master now*: the following begins anew, and whoever follows looks,
//!   since what changed meanwhile went unheard. *It cannot begin* (a right is missing, a server before 6): then he
//!   looks now and then.
//! - *It is dropped*: the task ends, and its connections with it.
//!
//! A lease that runs out is told when the server finds the key expired, which may be later: of keys that nobody
//! touches it looks at some, ten times a second.

use std::sync::Arc;
use std::time::Duration;

use redis::{RedisResult, Value};
use tokio::runtime::Handle;

use super::connection::{Node, Tracking};
use super::keys::Keyspace;
use super::servers::Servers;
use leasehold_core::kit::Ends;
use leasehold_core::store::{Follow, Queues, Stirrer};

/// How often it is looked whether all connections are there, and to the right servers.
const LOOK: Duration = Duration::from_secs(1);

/// Follows these queues; `None` where the server does not let us.
pub(super) async fn follow(
    servers: &Arc<Servers>,
    keyspace: &Keyspace,
    queues: &Queues,
    runtime: &Handle,
) -> RedisResult<Option<Follow>> {
    let (follow, stirrer) = Follow::new();
    let following = Following {
        keyspace: keyspace.clone(),
        queues: queues.clone(),
        prefixes: prefixes(keyspace, queues),
        stirrer,
    };
    let tracked = match following.begin(servers).await {
        Ok(tracked) => tracked,
        Err(error) if super::fault::refusal(&error).is_some() => return Ok(None),
        Err(error) => return Err(error),
    };
    let task = runtime.spawn(following.go_on(Arc::downgrade(servers), tracked));
    Ok(Some(follow.keeping(Ends::new(&task))))
}

/// What the keys of these queues begin with; none is the beginning of another.
fn prefixes(keyspace: &Keyspace, queues: &Queues) -> Vec<String> {
    let begin = match queues {
        Queues::Of(name) => name.as_str(),
        Queues::All(prefix) => prefix,
    };
    let mut all = keyspace.beginnings(begin);
    all.sort_unstable();
    let mut apart: Vec<String> = Vec::new();
    for prefix in all {
        if !apart.iter().any(|shorter| prefix.starts_with(shorter)) {
            apart.push(prefix);
        }
    }
    apart
}

struct Following {
    keyspace: Keyspace,
    queues: Queues,
    prefixes: Vec<String>,
    stirrer: Stirrer,
}

type Tracked = Vec<(Arc<Node>, Tracking)>;

impl Following {
    /// Has every master tell.
    async fn begin(&self, servers: &Servers) -> RedisResult<Tracked> {
        let mut all = Vec::new();
        for node in servers.masters().await? {
            let (keyspace, queues, stirrer) =
                (self.keyspace.clone(), self.queues.clone(), self.stirrer.clone());
            let hears = move |told: &[Value]| {
                if told.iter().any(|told| concerns(&keyspace, &queues, told)) {
                    stirrer.stir();
                }
            };
            let tracking = node.track(&self.prefixes, hears).await?;
            all.push((node, tracking));
        }
        Ok(all)
    }

    async fn go_on(self, servers: std::sync::Weak<Servers>, mut tracked: Tracked) {
        loop {
            tokio::time::sleep(LOOK).await;
            let Some(servers) = servers.upgrade() else { return };
            if !self.stirrer.is_followed() {
                return;
            }
            // Who cannot be asked now is asked again; meanwhile nothing is certain.
            let masters = servers.masters().await.unwrap_or_default();
            let same = |(node, _): &(Arc<Node>, _)| masters.iter().any(|m| Arc::ptr_eq(m, node));
            let whole = tracked.len() == masters.len()
                && tracked.iter().all(same)
                && tracked.iter().all(|(_, tracking)| !tracking.is_broken());
            if whole {
                continue;
            }
            if let Ok(anew) = self.begin(&servers).await {
                tracked = anew;
            }
            self.stirrer.stir();
        }
    }
}

/// Whether a key that changed, or all of them, is in one of these queues.
fn concerns(keyspace: &Keyspace, queues: &Queues, told: &Value) -> bool {
    match told {
        Value::Array(keys) => keys.iter().any(|key| concerns(keyspace, queues, key)),
        Value::BulkString(key) => std::str::from_utf8(key)
            .ok()
            .and_then(|key| keyspace.lock_of(key))
            .is_some_and(|(name, _)| queues.has(name.as_str())),
        // All keys are gone.
        Value::Nil => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::Name;

    #[test]
    fn prefixes_do_not_overlap() {
        let of = |prefix: &str, cluster, begin: &str| {
            prefixes(&Keyspace::new(prefix, cluster), &Queues::All(begin.into()))
        };
        assert_eq!(of("", false, ""), [""]);
        assert_eq!(of("", false, "leas"), ["leas"]);
        assert_eq!(of("", false, "a:"), ["a:", "leasehold:m:a:", "leasehold:w:a:"]);
        assert_eq!(of("app:", true, "a"), ["app:a", "leasehold:{"]);
    }

    #[test]
    fn what_changed_is_one_of_the_queues_or_it_is_not() {
        let keyspace = Keyspace::new("app:", false);
        let of = Queues::Of(Name::new("a").unwrap());
        let told = |key: &str| Value::Array(vec![Value::BulkString(key.into())]);
        for (key, expected) in [
            ("app:a", true),
            ("leasehold:w:app:a", true),
            ("app:ab", false),
            ("leasehold:clock", false),
        ] {
            assert_eq!(concerns(&keyspace, &of, &told(key)), expected, "{key}");
        }
        assert!(concerns(&keyspace, &of, &Value::Nil));
    }
}
