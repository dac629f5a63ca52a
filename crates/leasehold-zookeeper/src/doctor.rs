//! What is wrong with an ensemble: see [`leasehold_core::doctor`].

use std::time::Duration;

use super::node::{LAST_SEQUENCE, LATE_SEQUENCE};
use super::session::Session;
use super::together::{READ_TOGETHER, all_of};
use super::url::ZooKeeperUrl;
use leasehold_core::Result;
use leasehold_core::doctor::Finding;

/// So many locks are looked at.
const LOOKED_AT: usize = 1_000;

/// Asks the ensemble.
pub(super) async fn diagnose(session: &Session, url: &ZooKeeperUrl) -> Result<Vec<Finding>> {
    let mut found: Vec<Finding> = limits(url.session, session.timeout()).into_iter().collect();
    found.extend(number(members(session).await.unwrap_or(0)));
    let root = url.root();
    let locks = session.read(|c| c.list_children(root)).await;
    let locks: Vec<String> = locks.unwrap_or_default().into_iter().take(LOOKED_AT).collect();
    for some in locks.chunks(READ_TOGETHER) {
        let paths: Vec<String> = some.iter().map(|lock| url.path(lock)).collect();
        let stats = session.read(|c| async {
            Ok(all_of(paths.iter().map(|path| c.check_stat(path)).collect()).await)
        });
        for (lock, stat) in some.iter().zip(stats.await.unwrap_or_default()) {
            // What went meanwhile, or is closed to us, is nobody's trouble here.
            let Ok(Some(stat)) = stat else { continue };
            found.extend(sequence(lock, given_out(stat.cversion, stat.num_children)));
        }
    }
    found.push(Finding::note(
        "force-sync",
        "whether the servers wait for their disks is not asked: only their AdminServer tells, which \
         clients seldom reach",
        "with zookeeper.forceSync=no on a majority, a power cut forgets grants and tokens: leave it at \
         yes",
    ));
    Ok(found)
}

/// How many members have a vote, if anybody may know. A server that was started without an ensemble has
/// none in its list.
pub(super) async fn members(session: &Session) -> Option<usize> {
    let config = session.read(|c| c.get_data("/zookeeper/config")).await;
    config.ok().map(|(data, _)| participants(&String::from_utf8_lossy(&data)))
}

fn limits(asked: Duration, given: Duration) -> Option<Finding> {
    (asked != given).then(|| {
        Finding::weak(
            "session-limits",
            format!(
                "the servers make a session of {given:?} out of the {asked:?} that were asked for"
            ),
            "a dead client's locks stay taken for that long, and no lease is certain for longer",
            "write session=… into the URL within the servers' limits, or set minSessionTimeout and \
             maxSessionTimeout, the same on every member",
        )
    })
}

/// How many members with a vote a configuration names.
fn participants(config: &str) -> usize {
    let servers = config.lines().filter(|line| line.starts_with("server."));
    servers.filter(|line| !line.contains(":observer")).count()
}

fn number(members: usize) -> Option<Finding> {
    match members {
        0 | 1 => Some(Finding::weak(
            "one-member",
            "there is one server",
            "when it is down, nothing can be locked; when its disk is lost, so is every lock",
            "run three servers or five",
        )),
        n if n % 2 == 0 => Some(Finding::weak(
            "even",
            format!("there are {n} servers with a vote"),
            "an even number survives no more failures than one server less",
            "run three servers or five",
        )),
        _ => None,
    }
}

/// How many sequential children a node has had. What ZooKeeper shows is twice that, less those that
/// are there, in 32 bits that run over.
fn given_out(shown: i32, children: i32) -> i64 {
    i64::from(shown.cast_unsigned().wrapping_add(children.cast_unsigned()) / 2)
}

/// The numbers of a lock's children, which end at 2147483647.
fn sequence(lock: &str, given_out: i64) -> Option<Finding> {
    let shown: String = lock.chars().take(80).collect();
    let fix =
        "while nobody holds it, delete the lock's node: the numbers begin anew, and tokens go on";
    if given_out >= LAST_SEQUENCE {
        return Some(Finding::broken(
            "sequence",
            format!("the lock {shown:?} has given out its numbers"),
            "past 2147483647 other clients put the queue into a wrong order, so it is refused",
            fix,
        ));
    }
    (given_out >= LATE_SEQUENCE).then(|| {
        Finding::weak(
            "sequence",
            format!("the lock {shown:?} has given out half of its numbers"),
            "past 2147483647 other clients put the queue into a wrong order",
            fix,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_though_what_is_shown_runs_over() {
        assert_eq!(given_out(0, 0), 0);
        assert_eq!(given_out(2 * 7 - 3, 3), 7);
        // 2^30 and more: what is shown is negative.
        assert_eq!(given_out(i32::MIN, 0), 1 << 30);
        assert_eq!(given_out(-3, 1), i64::from(i32::MAX));
    }

    #[test]
    fn a_configuration_names_its_voters() {
        let config = "server.1=a:2888:3888:participant;0.0.0.0:2181\n\
                      server.2=b:2888:3888:participant;0.0.0.0:2181\n\
                      server.3=c:2888:3888:observer;0.0.0.0:2181\nversion=0";
        assert_eq!(participants(config), 2);
        assert_eq!(participants("version=0"), 0);
        assert_eq!(number(2).unwrap().id, "even");
        assert!(number(3).is_none());
    }
}
