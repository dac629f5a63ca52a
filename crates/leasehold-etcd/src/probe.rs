//! What a cluster is: whether it answers and lets us in, who votes, and which versions run.

use std::time::Duration;

use super::ask::range;
use super::client::Client;
use super::fault::{Failure, closed};
use super::proto::{MemberListRequest, MemberListResponse, RangeRequest, StatusResponse};
use super::queue::notices;
use super::url::EtcdUrl;
use super::watch;
use leasehold_core::{Error, ErrorKind, Result};

/// What a cluster is found to be.
pub(super) struct Found {
    /// Those that vote.
    pub(super) members: usize,
    /// Its own name for itself, if it told us.
    pub(super) cluster: Option<u64>,
    /// No leader that was stopped ends what its successor renewed, whichever member it is.
    pub(super) ignores_old_leaders: bool,
    /// We may read the keys in which is told who was evicted.
    pub(super) hears: bool,
}

/// Whether a majority answers and lets us in; and what it is.
pub(super) async fn probe(client: &Client, url: &EtcdUrl) -> Result<Found> {
    let (let_in, each) = tokio::join!(lets_us_in(client, url), told(client));
    let hears = let_in?;
    let path = "/etcdserverpb.Cluster/MemberList";
    let key = format!("{}leasehold", url.namespace).into_bytes();
    let (listed, renumbers) = tokio::join!(
        client.call::<_, MemberListResponse>(path, MemberListRequest {}),
        watch::renumbers(client, key),
    );
    // Not everybody may ask; then the URL names what there is.
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
    Ok(Found { members, cluster, ignores_old_leaders, hears })
}

/// Whether a majority answers and lets us in; and whether to these very keys.
async fn lets_us_in(client: &Client, url: &EtcdUrl) -> Result<bool> {
    let (from, end) = notices(&url.namespace);
    let one = RangeRequest { limit: 1, keys_only: true, ..range(from, end) };
    match client.range(one).await {
        Ok(_) => Ok(true),
        // A user may have a right to some locks and not to these keys.
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

/// What each member says of itself. The one that we began with is left at once where it says nothing and
/// another does: it would be waited for as if it had ever answered.
async fn told(client: &Client) -> Vec<(String, Option<StatusResponse>)> {
    let (began, at) = client.place();
    let each = client.each(VERSIONS).await;
    let silent = each.get(at).is_some_and(|(_, told)| told.is_none());
    if silent && each.iter().any(|(_, told)| told.is_some()) {
        client.condemn(began);
    }
    each
}

/// How long a client that connects waits to hear from all members which etcd they run.
const VERSIONS: Duration = Duration::from_millis(500);

/// A list of members that no cluster has answered: each member of one has a number.
fn is_a_proxys(listed: &MemberListResponse) -> bool {
    listed.header.is_none() || listed.members.iter().any(|member| member.id == 0)
}

/// `etcd grpc-proxy` keeps leases alive in its own rhythm and answers us with what it was told in that: an
/// answer to a request of ours may be older than the request. A lease counted from such an answer can
/// be over while its holder believes in it.
fn through_a_proxy() -> Error {
    let what = "the URL leads to etcd's grpc-proxy, whose replies to keep-alives can be stale: a \
                client could believe that it still holds a lock that it has lost";
    let hint = "name the etcd members themselves in the URL";
    Error::new(ErrorKind::Unsupported, what).with_hint(hint)
}

/// Whether every voter was heard, and runs a version that no stopped leader can harm: whichever leads next
/// may be the one.
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

/// Whether this version of etcd has <https://github.com/etcd-io/etcd/pull/17425>.
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

    #[test]
    fn f47_a_promise_of_all_members_is_asked_of_all() {
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
        // A learner does not lead.
        assert!(all_ignore_old_leaders(Some(&[1, 2]), &one_silent));
        assert!(!all_ignore_old_leaders(Some(&[1, 2, 3]), &all[..2]), "the URL names two of three");
    }

    #[test]
    fn f11_a_proxys_list_of_members_is_told_from_a_clusters() {
        let header = Some(proto::Header { cluster_id: 9, ..proto::Header::default() });
        let members = |id| vec![proto::Member { id, is_learner: false }];
        assert!(is_a_proxys(&MemberListResponse { header: None, members: members(7) }));
        assert!(is_a_proxys(&MemberListResponse { header: header.clone(), members: members(0) }));
        assert!(!is_a_proxys(&MemberListResponse { header, members: members(7) }));
    }

    #[test]
    fn versions_that_a_stopped_leader_cannot_harm() {
        for good in ["3.4.31", "3.5.13", "3.6.0", "3.6.0-rc.1", "4.0.0", "3.5.21+git"] {
            assert!(ignores_old_leaders(good), "{good}");
        }
        for bad in ["3.4.23", "3.5.12", "3.3.99", "", "x", "3", "3.5", "3.5.x"] {
            assert!(!ignores_old_leaders(bad), "{bad}");
        }
    }
}
