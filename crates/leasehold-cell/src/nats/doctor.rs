//! Checks of a NATS bucket that stores locks. See [`leasehold_core::doctor`].

use async_nats::jetstream::stream::Info;
use leasehold_core::doctor::Finding;

use super::bucket;

/// The first version in which keys can expire.
pub(super) const LEAST: [u64; 3] = [2, 11, 0];
/// The first version of each release line in which a new leader waits until it has all writes that
/// its predecessor acknowledged.
const WHOLE: [[u64; 3]; 2] = [[2, 11, 11], [2, 12, 2]];

/// Parses the numbers of a version such as `2.12.1`.
pub(super) fn version(text: &str) -> Option<[u64; 3]> {
    let mut parts = text.split(['.', '-', '+']).map(|part| part.parse().ok());
    Some([parts.next()??, parts.next()??, parts.next()??])
}

/// Judges the bucket and its servers.
pub(super) fn judge(bucket: &str, server: &str, info: &Info, is_listening: bool) -> Vec<Finding> {
    let mut found = Vec::new();
    let config = &info.config;
    if let Some((what, fix)) = bucket::flaw(bucket, config) {
        let why = "locks are values of this bucket, so held locks can be lost or cannot be changed";
        let what = format!("the bucket {bucket:?} cannot store locks: {what}");
        found.push(Finding::broken("bucket", what, why, fix));
    }
    found.extend(copies(bucket, info));
    if config.num_replicas > 1 && !version(server).is_some_and(is_whole) {
        found.push(Finding::weak(
            "version",
            format!("the server runs NATS {server}"),
            "before 2.11.11 and 2.12.2, a new leader can reply before it has all acknowledged \
             writes of its predecessor, so two clients can hold the same lock",
            "upgrade all servers to NATS 2.12.2 or later",
        ));
    }
    if !is_listening {
        found.push(Finding::weak(
            "messages",
            "this user cannot be notified of a grant, so it polls",
            "it may not publish or subscribe on leasehold.BUCKET.>; hand-overs take longer and \
             cause more requests",
            format!("allow this user to publish and subscribe on leasehold.{bucket}.>"),
        ));
    }
    if config.max_bytes > 0 && info.state.bytes > config.max_bytes.unsigned_abs() / 3 * 2 {
        let what =
            format!("{} of the bucket's {} bytes are used", info.state.bytes, config.max_bytes);
        let why = "above four fifths, no new name can be locked and no new client is accepted; when the \
                   bucket is full, no client can renew, and all held locks are lost";
        let fix = format!("`nats stream edit {} --max-bytes=SIZE`", bucket::stream(bucket));
        found.push(Finding::broken("room", what, why, fix));
    }
    found.push(Finding::note(
        "sync-interval",
        "leasehold cannot check whether the servers sync to disk before they acknowledge a write",
        "by default they sync every two minutes: a power failure can undo acknowledged writes, \
         and so can the failure of one server while other copies lag; set sync_interval: always \
         in the servers' configuration files",
    ));
    found
}

fn is_whole(version: [u64; 3]) -> bool {
    WHOLE.iter().any(|least| version[..2] == least[..2] && version >= *least)
        || version[..2] > WHOLE[1][..2]
}

fn copies(bucket: &str, info: &Info) -> Vec<Finding> {
    let copies = info.config.num_replicas;
    let mut found = Vec::new();
    if copies < 3 {
        found.push(Finding::weak(
            "replicas",
            format!(
                "the bucket {bucket} has {copies} of its value{}",
                if copies == 1 { "" } else { "s" }
            ),
            "if one of its servers fails, no lock can be acquired or renewed; if its disk is \
             lost, all locks are lost",
            format!(
                "in a cluster of three servers: `nats stream edit {} --replicas=3`",
                bucket::stream(bucket)
            ),
        ));
    }
    let Some(cluster) = &info.cluster else { return found };
    let away: Vec<&str> = cluster
        .replicas
        .iter()
        .filter(|peer| peer.offline || !peer.current)
        .map(|peer| peer.name.as_str())
        .collect();
    if !away.is_empty() {
        found.push(Finding::weak(
            "members",
            format!("these servers of the bucket are offline or behind: {}", away.join(", ")),
            "a majority must be up to date, so fewer further failures are tolerated",
            format!(
                "run `nats stream info {}`, and check the servers' logs",
                bucket::stream(bucket)
            ),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_versions_with_the_fix_are_recognized() {
        assert_eq!(version("2.15.0-dev"), Some([2, 15, 0]));
        assert_eq!(version("2.9"), None);
        for (text, whole) in [
            ("2.11.10", false),
            ("2.11.11", true),
            ("2.12.1", false),
            ("2.12.2", true),
            ("2.14.0", true),
            ("3.0.0", true),
        ] {
            assert_eq!(is_whole(version(text).unwrap()), whole, "{text}");
        }
    }
}
