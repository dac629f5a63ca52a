//! What is wrong with an etcd cluster: see [`leasehold_core::doctor`].

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

/// Asks the cluster. `members`: how many it has that vote.
pub(super) async fn diagnose(client: &Client, members: usize) -> Result<Vec<Finding>, Failure> {
    let mut found: Vec<Finding> = number(members).into_iter().collect();
    let each = client.each(ANSWER).await;
    let told = each.iter().filter_map(|(_, status)| status.as_ref());
    // One that is too old is enough, whichever it is.
    found.extend(told.filter_map(|status| version(members, &status.version)).next());
    let silent = each.into_iter().filter(|(_, status)| status.is_none());
    found.extend(silent.map(|(member, _)| {
        Finding::weak(
            "member-down",
            format!("the member {member} does not answer, or has no leader"),
            "the next one that fails may leave no majority, and then nothing can be locked",
            "start it or mend its network; replace it in the cluster and in the URL if it is gone",
        )
    }));
    match alarms(client).await {
        Ok(alarms) => found.extend(alarms),
        // Who may not ask learns of it when a lock cannot be written.
        Err(Failure::Final(error)) if error.kind() == ErrorKind::Denied => {}
        Err(failure) => return Err(failure),
    }
    if !found.iter().any(|f| f.id == "full") {
        found.extend(shortest(shortest_lease(client).await?));
    }
    Ok(found)
}

fn version(members: usize, version: &str) -> Option<Finding> {
    // With one member there is no other leader.
    let is_old = members > 1 && !version.is_empty() && !ignores_old_leaders(version);
    is_old.then(|| {
        let shown: String = version.chars().filter(|c| !c.is_control()).take(40).collect();
        Finding::weak(
            "version",
            format!("a member runs etcd {shown}"),
            "a leader that was stopped and goes on can end leases that its successor renewed, so two \
             may hold for a while: only checked tokens or etcd_compare are safe",
            "run 3.4.31, 3.5.13, 3.6 or later",
        )
    })
}

/// Asks for a lease of a second, to see what it becomes.
async fn shortest_lease(client: &Client) -> Result<i64, Failure> {
    let path = "/etcdserverpb.Lease/LeaseGrant";
    let grant = LeaseGrantRequest { ttl: 1 };
    let granted = client.call::<_, LeaseGrantResponse>(path, grant).await?.answer;
    let path = "/etcdserverpb.Lease/LeaseRevoke";
    let revoke = LeaseRevokeRequest { id: granted.id };
    // It ends by itself in a moment.
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
            "it takes no writes, so nothing can be locked",
            "compact and defragment it, raise --quota-backend-bytes, then etcdctl alarm disarm",
        ),
        false => Finding::broken(
            "damaged",
            "a member's data is damaged (alarm CORRUPT)",
            "members that disagree may each grant a lock",
            "replace the member that etcdctl alarm list names",
        ),
    };
    Ok(answer.alarms.iter().map(|alarm| finding(alarm.alarm == NO_SPACE)).collect())
}

fn number(members: usize) -> Option<Finding> {
    match members {
        1 => Some(Finding::weak(
            "one-member",
            "the cluster has one member",
            "when it is down, nothing can be locked; when its disk is lost, so is every lock",
            "run three members or five",
        )),
        n if n % 2 == 0 => Some(Finding::weak(
            "even",
            format!("the cluster has {n} members"),
            "an even number survives no more failures than one member less",
            "run three members or five",
        )),
        _ => None,
    }
}

fn shortest(granted: i64) -> Option<Finding> {
    (granted > 1).then(|| {
        Finding::note(
            "shortest-lease",
            format!("the shortest lease that this cluster grants is {granted} s"),
            "a dead holder's lock stays taken for at least that long, whatever lease was asked for \
             (it comes from --election-timeout)",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_told_where_there_are_other_leaders() {
        let told = version(3, "3.5.12").unwrap();
        assert!(told.id == "version" && told.what.contains("3.5.12"));
        assert!(version(1, "3.5.12").is_none());
        assert!(version(3, "3.5.13").is_none() && version(3, "").is_none());
    }

    #[test]
    fn what_a_cluster_makes_of_a_second_is_told() {
        assert!(shortest(1).is_none());
        assert!(shortest(2).unwrap().what.contains("2 s"));
        let ids = [1, 2, 3, 4, 5].map(|n| number(n).map(|f| f.id));
        assert_eq!(ids, [Some("one-member"), Some("even"), None, Some("even"), None]);
    }
}
