//! Subscriptions to queues, based on Redis's notifications of changed keys.
//!
//! Each subscription opens one connection to each master and sends `CLIENT TRACKING … BCAST`. The
//! server then reports every key with the given prefixes that any client writes or deletes, or that
//! expires. So clients that acquire a lock send no extra command for its subscribers, and changes
//! by foreign clients are reported too.
//!
//! - *A connection breaks, or another server becomes the master.* The subscription's task
//!   subscribes again and notifies the subscriber, which polls, because changes in between were not
//!   reported.
//! - *The subscription cannot start* (a permission is missing, or a server is older than version
//!   6). The subscriber polls periodically.
//! - *The subscription is dropped.* The task ends and closes its connections.
//!
//! An expired lease is reported when the server finds the expired key, which can be later. The
//! server checks a sample of the keys that no client accesses, ten times a second.

use std::sync::Arc;
use std::time::Duration;

use redis::{RedisResult, Value};
use tokio::runtime::Handle;

use super::connection::{Node, Tracking};
use super::keys::Keyspace;
use super::servers::Servers;
use leasehold_core::kit::Ends;
use leasehold_core::store::{Follow, Notifier, Queues};

/// Interval between checks that all connections are up and lead to the current masters.
const LOOK: Duration = Duration::from_secs(1);

/// Subscribes to these queues. Returns `None` if the server does not allow it.
pub(super) async fn follow(
    servers: &Arc<Servers>,
    keyspace: &Keyspace,
    queues: &Queues,
    runtime: &Handle,
) -> RedisResult<Option<Follow>> {
    let (follow, notifier) = Follow::new();
    let following = Following {
        keyspace: keyspace.clone(),
        queues: queues.clone(),
        prefixes: prefixes(keyspace, queues),
        notifier,
    };
    let tracked = match following.begin(servers).await {
        Ok(tracked) => tracked,
        Err(error) if super::fault::refusal(&error).is_some() => return Ok(None),
        Err(error) => return Err(error),
    };
    let task = runtime.spawn(following.go_on(Arc::downgrade(servers), tracked));
    Ok(Some(follow.keeping(Ends::new(&task))))
}

/// Returns the key prefixes of these queues. None of them is a prefix of another one.
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
    notifier: Notifier,
}

type Tracked = Vec<(Arc<Node>, Tracking)>;

impl Following {
    /// Subscribes on every master.
    async fn begin(&self, servers: &Servers) -> RedisResult<Tracked> {
        let mut all = Vec::new();
        for node in servers.masters().await? {
            let (keyspace, queues, notifier) =
                (self.keyspace.clone(), self.queues.clone(), self.notifier.clone());
            let on_change = move |changes: &[Value]| {
                if changes.iter().any(|changed| concerns(&keyspace, &queues, changed)) {
                    notifier.notify();
                }
            };
            let tracking = node.track(&self.prefixes, on_change).await?;
            all.push((node, tracking));
        }
        Ok(all)
    }

    async fn go_on(self, servers: std::sync::Weak<Servers>, mut tracked: Tracked) {
        loop {
            tokio::time::sleep(LOOK).await;
            let Some(servers) = servers.upgrade() else { return };
            if !self.notifier.is_followed() {
                return;
            }
            // If the masters are unknown, changes may be missed. So the subscriber is notified at
            // every check until all connections are up again.
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
            self.notifier.notify();
        }
    }
}

/// Returns whether a changed key, or the loss of all keys, concerns one of these queues.
fn concerns(keyspace: &Keyspace, queues: &Queues, changed: &Value) -> bool {
    match changed {
        Value::Array(keys) => keys.iter().any(|key| concerns(keyspace, queues, key)),
        Value::BulkString(key) => std::str::from_utf8(key)
            .ok()
            .and_then(|key| keyspace.lock_of(key))
            .is_some_and(|(name, _)| queues.has(name.as_str())),
        // Redis sends nil when all keys were deleted.
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
    fn changed_keys_are_matched_to_the_followed_queues() {
        let keyspace = Keyspace::new("app:", false);
        let of = Queues::Of(Name::new("a").unwrap());
        let push = |key: &str| Value::Array(vec![Value::BulkString(key.into())]);
        for (key, expected) in [
            ("app:a", true),
            ("leasehold:w:app:a", true),
            ("app:ab", false),
            ("leasehold:clock", false),
        ] {
            assert_eq!(concerns(&keyspace, &of, &push(key)), expected, "{key}");
        }
        assert!(concerns(&keyspace, &of, &Value::Nil));
    }
}
