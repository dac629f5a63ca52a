//! Probes a cluster: whether it responds and grants access, which members vote, and their versions.

use std::time::Duration;

use super::client::Client;
use super::fault::{Failure, closed};
use super::proto::{MemberListRequest, MemberListResponse, RangeRequest, StatusResponse};
use super::queue::notices;
use super::requests::range;
use super::url::EtcdUrl;
use super::watch;
use leasehold_core::{Error, ErrorKind, Result};

/// Properties of a cluster.
pub(super) struct Found {
    /// The number of voting members.
    pub(super) members: usize,
    /// The ID of the cluster, if it was reported.
    pub(super) cluster: Option<u64>,
    /// Whether no member that was paused while it was leader can revoke leases that its successor
    /// renewed.
    pub(super) ignores_old_leaders: bool,
    /// Whether this user may read the keys that announce evictions.
    pub(super) can_listen: bool,
}

/// Checks that a majority responds and grants access, and returns the properties of the cluster.
pub(super) async fn probe(client: &Client, url: &EtcdUrl) -> Result<Found> {
    let (let_in, each) = tokio::join!(lets_us_in(client, url), statuses(client));
    let can_listen = let_in?;
    let path = "/etcdserverpb.Cluster/MemberList";
    let key = format!("{}leasehold", url.namespace).into_bytes();
    let (listed, renumbers) = tokio::join!(
        client.call::<_, MemberListResponse>(path, MemberListRequest {}),
        watch::renumbers(client, key),
    );
    // Not every user may list the members. If this user may not, the members in the URL are used
    // instead.
    let listed = listed.ok().map(|listed| listed.answer);
    let is_proxy = renumbers.unwrap_or(false) || listed.as_ref().is_some_and(is_a_proxys);
    if is_proxy {
        return Err(through_a_proxy());
    }
    let voters: Option<Vec<u64>> = listed.as_ref().map(|listed| {
        listed.members.iter().filter(|member| !member.is_learner).map(|m| m.id).collect()
    });
    let cluster = listed.and_then(|listed| listed.header).map(|header| header.cluster_id);
    let ignores_old_leaders = all_ignore_old_leaders(voters.as_deref(), &each);
    let members = voters.map_or(url.endpoints.len(), |voters| voters.len());
    Ok(Found { members, cluster, ignores_old_leaders, can_listen })
}

/// Checks that a majority responds and grants access. Returns whether this user may read the keys
/// that announce evictions.
async fn lets_us_in(client: &Client, url: &EtcdUrl) -> Result<bool> {
    let (from, end) = notices(&url.namespace);
    let one = RangeRequest { limit: 1, keys_only: true, ..range(from, end) };
    match client.range(one).await {
        Ok(_) => Ok(true),
        // A user may have permissions for some locks, but not for these keys.
        Err(Failure::Final(error))
            if error.kind() == ErrorKind::Denied
                && url.namespace.is_empty()
                && error.reason().contains("permission denied") =>
        {
            Ok(false)
        }
        Err(failure) => Err(closed(failure, &url.namespace).into()),
    }
}

/// Returns the status of each member. If the current member does not respond but another one does,
/// the client leaves it immediately. Otherwise it would wait for this member as long as for one
/// that has answered before.
async fn statuses(client: &Client) -> Vec<(String, Option<StatusResponse>)> {
    let (began, at) = client.place();
    let each = client.each(VERSIONS).await;
    let silent = each.get(at).is_some_and(|(_, status)| status.is_none());
    if silent && each.iter().any(|(_, status)| status.is_some()) {
        client.condemn(began);
    }
    each
}

/// Time limit for the versions of all members when a client connects.
const VERSIONS: Duration = Duration::from_millis(500);

/// Returns whether this list of members comes from a proxy. In the list of a cluster, each member
/// has an ID.
fn is_a_proxys(listed: &MemberListResponse) -> bool {
    listed.header.is_none() || listed.members.iter().any(|member| member.id == 0)
}

/// Returns the error for a URL that leads to `etcd grpc-proxy`.
///
/// The proxy renews leases on its own schedule and replies with the last result. A reply may
/// therefore be older than its request. A lease counted from such a reply can already have expired
/// while its holder still relies on it.
fn through_a_proxy() -> Error {
    let what = "the URL leads to etcd's grpc-proxy, whose replies to keep-alives can be stale: a \
                client could believe that it still holds a lock that it has lost";
    let hint = "name the etcd members themselves in the URL";
    Error::new(ErrorKind::Unsupported, what).with_hint(hint)
}

/// Returns whether every voting member reported a version in which a paused leader is harmless. Any
/// of them may be the next leader.
fn all_ignore_old_leaders(
    voters: Option<&[u64]>,
    each: &[(String, Option<StatusResponse>)],
) -> bool {
    let new: Vec<u64> = each
        .iter()
        .filter_map(|(_, status)| status.as_ref())
        .filter(|status| ignores_old_leaders(&status.version))
        .filter_map(|status| status.header.as_ref())
        .map(|header| header.member_id)
        .collect();
    match voters {
        Some(voters) => voters.iter().all(|voter| new.contains(voter)),
        None => new.len() == each.len(),
    }
}

/// Returns whether members of this version of etcd no longer revoke leases after they have lost
/// leadership (<https://github.com/etcd-io/etcd/pull/17425>).
pub(super) fn ignores_old_leaders(version: &str) -> bool {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse::<u32>().ok());
    let mut next = || parts.next().flatten();
    match (next(), next(), next()) {
        (Some(3), Some(4), Some(patch)) => patch >= 31,
        (Some(3), Some(5), Some(patch)) => patch >= 13,
        (Some(major), Some(minor), _) => (major, minor) >= (3, 6),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto;
    use super::*;

    // F47
    #[test]
    fn guarantee_requires_new_versions_on_all_members() {
        let runs = |member_id, version: &str| {
            let header = Some(proto::Header { member_id, ..proto::Header::default() });
            (String::new(), Some(StatusResponse { header, version: version.into() }))
        };
        let all = [runs(1, "3.5.30"), runs(2, "3.5.30"), runs(3, "3.6.1")];
        assert!(all_ignore_old_leaders(Some(&[1, 2, 3]), &all));
        assert!(all_ignore_old_leaders(None, &all));
        let one_old = [runs(1, "3.5.30"), runs(2, "3.5.12"), runs(3, "3.6.1")];
        assert!(!all_ignore_old_leaders(Some(&[1, 2, 3]), &one_old));
        assert!(!all_ignore_old_leaders(None, &one_old));
        let one_silent = [runs(1, "3.5.30"), runs(2, "3.5.30"), (String::new(), None)];
        assert!(!all_ignore_old_leaders(Some(&[1, 2, 3]), &one_silent));
        // A learner cannot become leader.
        assert!(all_ignore_old_leaders(Some(&[1, 2]), &one_silent));
        assert!(
            !all_ignore_old_leaders(Some(&[1, 2, 3]), &all[..2]),
            "accepted a URL with two of three members"
        );
    }

    // F11
    #[test]
    fn member_list_of_a_proxy_is_recognized() {
        let header = Some(proto::Header { cluster_id: 9, ..proto::Header::default() });
        let members = |id| vec![proto::Member { id, is_learner: false }];
        assert!(is_a_proxys(&MemberListResponse { header: None, members: members(7) }));
        assert!(is_a_proxys(&MemberListResponse { header: header.clone(), members: members(0) }));
        assert!(!is_a_proxys(&MemberListResponse { header, members: members(7) }));
    }

    #[test]
    fn versions_safe_from_paused_leaders_are_recognized() {
        for good in ["3.4.31", "3.5.13", "3.6.0", "3.6.0-rc.1", "4.0.0", "3.5.21+git"] {
            assert!(ignores_old_leaders(good), "{good}");
        }
        for bad in ["3.4.23", "3.5.12", "3.3.99", "", "x", "3", "3.5", "3.5.x"] {
            assert!(!ignores_old_leaders(bad), "{bad}");
        }
    }
}
