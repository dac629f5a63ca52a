//! Checks an ensemble. See [`leasehold_core::doctor`].

use std::time::Duration;

use super::join_all::{MAX_CONCURRENT_READS, join_all};
use super::node::{LAST_SEQUENCE, LATE_SEQUENCE};
use super::session::Session;
use super::url::ZooKeeperUrl;
use leasehold_core::Result;
use leasehold_core::doctor::Finding;

/// Maximum number of locks that are checked.
const LOOKED_AT: usize = 1_000;

/// Checks the ensemble.
pub(super) async fn diagnose(session: &Session, url: &ZooKeeperUrl) -> Result<Vec<Finding>> {
    let mut found: Vec<Finding> = limits(url.session, session.timeout()).into_iter().collect();
    found.extend(number(members(session).await.unwrap_or(0)));
    let root = url.root();
    let locks = session.read(|c| c.list_children(root)).await;
    let locks: Vec<String> = locks.unwrap_or_default().into_iter().take(LOOKED_AT).collect();
    for some in locks.chunks(MAX_CONCURRENT_READS) {
        let paths: Vec<String> = some.iter().map(|lock| url.path(lock)).collect();
        let stats = session.read(|c| async {
            Ok(join_all(paths.iter().map(|path| c.check_stat(path)).collect()).await)
        });
        for (lock, stat) in some.iter().zip(stats.await.unwrap_or_default()) {
            // Nodes that were deleted in the meantime, or that this user may not read, are skipped.
            let Ok(Some(stat)) = stat else { continue };
            found.extend(sequence(lock, given_out(stat.cversion, stat.num_children)));
        }
    }
    found.push(Finding::note(
        "force-sync",
        "leasehold cannot check zookeeper.forceSync, because only the servers' AdminServer \
         reports it",
        "with zookeeper.forceSync=no on a majority, a power failure loses grants and tokens; keep \
         the default, yes",
    ));
    Ok(found)
}

/// Returns how many members have a vote, if this user may read the configuration. A server that was
/// started without an ensemble has an empty list.
pub(super) async fn members(session: &Session) -> Option<usize> {
    let config = session.read(|c| c.get_data("/zookeeper/config")).await;
    config.ok().map(|(data, _)| participants(&String::from_utf8_lossy(&data)))
}

fn limits(asked: Duration, given: Duration) -> Option<Finding> {
    (asked != given).then(|| {
        Finding::weak(
            "session-limits",
            format!("the servers grant a session of {given:?} instead of the requested {asked:?}"),
            "the locks of a crashed client stay taken for that long, and no lease is guaranteed \
             for longer",
            "set session= in the URL within the servers' limits, or set minSessionTimeout and \
             maxSessionTimeout, equal on all servers",
        )
    })
}

/// Returns how many voting members a configuration contains.
fn participants(config: &str) -> usize {
    let servers = config.lines().filter(|line| line.starts_with("server."));
    servers.filter(|line| !line.contains(":observer")).count()
}

fn number(members: usize) -> Option<Finding> {
    match members {
        0 | 1 => Some(Finding::weak(
            "one-member",
            "the ensemble has one server",
            "while it is down, no lock can be acquired; if its disk is lost, all locks are lost",
            "run three or five servers",
        )),
        n if n % 2 == 0 => Some(Finding::weak(
            "even",
            format!("the ensemble has {n} voting servers"),
            "an even number tolerates no more failures than one server fewer",
            "run three or five servers",
        )),
        _ => None,
    }
}

/// Returns how many sequential children a node has had. ZooKeeper reports twice that number minus
/// the number of current children, as an overflowing 32-bit integer.
fn given_out(shown: i32, children: i32) -> i64 {
    i64::from(shown.cast_unsigned().wrapping_add(children.cast_unsigned()) / 2)
}

/// Checks the sequence numbers of a lock's children, which end at 2147483647.
fn sequence(lock: &str, given_out: i64) -> Option<Finding> {
    let shown: String = lock.chars().take(80).collect();
    let fix = format!(
        "when no client holds or waits for it, run `delete` on the node {shown} in zkCli.sh: \
         sequence numbers start again at 0, and tokens keep rising"
    );
    if given_out >= LAST_SEQUENCE {
        return Some(Finding::broken(
            "sequence",
            format!("the sequence numbers of the lock {shown:?} are used up"),
            "past 2147483647 other clients order the queue wrongly, so leasehold rejects this lock",
            fix,
        ));
    }
    (given_out >= LATE_SEQUENCE).then(|| {
        Finding::weak(
            "sequence",
            format!("the lock {shown:?} has used half of its sequence numbers"),
            "past 2147483647 other clients order the queue wrongly",
            fix,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_are_counted_despite_overflow() {
        assert_eq!(given_out(0, 0), 0);
        assert_eq!(given_out(2 * 7 - 3, 3), 7);
        // At 2^30 and above, the reported number is negative.
        assert_eq!(given_out(i32::MIN, 0), 1 << 30);
        assert_eq!(given_out(-3, 1), i64::from(i32::MAX));
    }

    #[test]
    fn voters_are_counted_in_a_configuration() {
        let config = "server.1=a:2888:3888:participant;0.0.0.0:2181\n\
                      server.2=b:2888:3888:participant;0.0.0.0:2181\n\
                      server.3=c:2888:3888:observer;0.0.0.0:2181\nversion=0";
        assert_eq!(participants(config), 2);
        assert_eq!(participants("version=0"), 0);
        assert_eq!(number(2).unwrap().id, "even");
        assert!(number(3).is_none());
    }
}
