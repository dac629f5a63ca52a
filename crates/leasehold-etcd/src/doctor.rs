//! Checks an etcd cluster. See [`leasehold_core::doctor`].

use super::client::{ANSWER, Client};
use super::fault::Failure;
use super::probe::ignores_old_leaders;
use super::proto::{
    AlarmRequest, AlarmResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest,
    LeaseRevokeResponse,
};
use leasehold_core::ErrorKind;
use leasehold_core::doctor::Finding;

/// etcd's number for the alarm that its database is full.
const NO_SPACE: i32 = 1;

/// Checks the cluster. `members` is the number of voting members.
pub(super) async fn diagnose(client: &Client, members: usize) -> Result<Vec<Finding>, Failure> {
    let mut found: Vec<Finding> = number(members).into_iter().collect();
    let each = client.each(ANSWER).await;
    let statuses = each.iter().filter_map(|(_, status)| status.as_ref());
    // One finding is enough, even if several members run an old version.
    found.extend(statuses.filter_map(|status| version(members, &status.version)).next());
    let silent = each.into_iter().filter(|(_, status)| status.is_none());
    found.extend(silent.map(|(member, _)| {
        Finding::weak(
            "member-down",
            format!("the member {member} does not respond, or has no leader"),
            "if another member fails, there may be no majority, and no lock can be acquired",
            "start the member or fix its network; if it is permanently lost, replace it in the \
             cluster and in the URL",
        )
    }));
    match alarms(client).await {
        Ok(alarms) => found.extend(alarms),
        // A user without this permission finds out about an alarm when a lock cannot be written.
        Err(Failure::Final(error)) if error.kind() == ErrorKind::Denied => {}
        Err(failure) => return Err(failure),
    }
    if !found.iter().any(|f| f.id == "full") {
        found.extend(shortest(shortest_lease(client).await?));
    }
    Ok(found)
}

fn version(members: usize, version: &str) -> Option<Finding> {
    // With one member, no other leader is possible.
    let is_old = members > 1 && !version.is_empty() && !ignores_old_leaders(version);
    is_old.then(|| {
        let shown: String = version.chars().filter(|c| !c.is_control()).take(40).collect();
        Finding::weak(
            "version",
            format!("a member runs etcd {shown}"),
            "a paused leader that resumes can revoke leases that its successor renewed, so two \
             clients can briefly hold the same lock; only token checks or etcd_compare are safe \
             then",
            "upgrade all members to 3.4.31, 3.5.13, 3.6 or later",
        )
    })
}

/// Requests a lease of one second, and returns how many seconds the cluster grants.
async fn shortest_lease(client: &Client) -> Result<i64, Failure> {
    let path = "/etcdserverpb.Lease/LeaseGrant";
    let grant = LeaseGrantRequest { ttl: 1 };
    let granted = client.call::<_, LeaseGrantResponse>(path, grant).await?.answer;
    let path = "/etcdserverpb.Lease/LeaseRevoke";
    let revoke = LeaseRevokeRequest { id: granted.id };
    // If this fails, the lease soon expires on its own.
    let _ = client.call::<_, LeaseRevokeResponse>(path, revoke).await;
    Ok(granted.ttl)
}

async fn alarms(client: &Client) -> Result<Vec<Finding>, Failure> {
    let path = "/etcdserverpb.Maintenance/Alarm";
    let answer = client.call::<_, AlarmResponse>(path, AlarmRequest {}).await?.answer;
    let finding = |full: bool| match full {
        true => Finding::broken(
            "full",
            "etcd's database is full (alarm NOSPACE)",
            "it rejects writes, so no lock can be acquired",
            "`etcdctl compact REVISION` and `etcdctl defrag --cluster`, or raise \
             --quota-backend-bytes; then `etcdctl alarm disarm`",
        ),
        false => Finding::broken(
            "damaged",
            "a member's data is damaged (alarm CORRUPT)",
            "members with different data can grant the same lock twice",
            "replace the member that `etcdctl alarm list` names",
        ),
    };
    Ok(answer.alarms.iter().map(|alarm| finding(alarm.alarm == NO_SPACE)).collect())
}

fn number(members: usize) -> Option<Finding> {
    match members {
        1 => Some(Finding::weak(
            "one-member",
            "the cluster has one member",
            "while it is down, no lock can be acquired; if its disk is lost, all locks are lost",
            "run three or five members",
        )),
        n if n % 2 == 0 => Some(Finding::weak(
            "even",
            format!("the cluster has {n} members"),
            "an even number tolerates no more failures than one member fewer",
            "run three or five members",
        )),
        _ => None,
    }
}

fn shortest(granted: i64) -> Option<Finding> {
    (granted > 1).then(|| {
        Finding::note(
            "shortest-lease",
            format!("the shortest lease that this cluster grants is {granted} s"),
            "the lock of a crashed holder stays taken for at least that long, even with a shorter \
             lease (etcd derives the minimum from --election-timeout)",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_reported_only_for_clusters() {
        let finding = version(3, "3.5.12").unwrap();
        assert!(finding.id == "version" && finding.what.contains("3.5.12"));
        assert!(version(1, "3.5.12").is_none());
        assert!(version(3, "3.5.13").is_none() && version(3, "").is_none());
    }

    #[test]
    fn cluster_size_and_shortest_lease_are_reported() {
        assert!(shortest(1).is_none());
        assert!(shortest(2).unwrap().what.contains("2 s"));
        let ids = [1, 2, 3, 4, 5].map(|n| number(n).map(|f| f.id));
        assert_eq!(ids, [Some("one-member"), Some("even"), None, Some("even"), None]);
    }
}
