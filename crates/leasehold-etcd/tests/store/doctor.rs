//! The doctor finds each planted misconfiguration, and finds nothing on a well-configured server.

use leasehold::doctor::Severity::{Broken, Weak};
use leasehold::store::Survival;
use leasehold_test_support::doctor::{troubles, try_findings, until_troubles};
use leasehold_test_support::until;
use testbed::{Etcd, Setup};

#[tokio::test]
async fn doctor_reports_single_member_down_member_and_full_etcd() {
    let cluster = Etcd::cluster();
    // A new client gets no reply while a leader is elected.
    let mut old = None;
    until("a client connects", async || {
        let locks = leasehold::connect(cluster.url()).await.ok();
        old = locks.map(|locks| locks.guarantees().on_failover == Survival::Fenced);
        old.is_some()
    })
    .await;
    // The installed version determines which of the two it is.
    let version = [("version", Weak)];
    until_troubles(&cluster.url(), &version[..usize::from(old == Some(true))]).await;
    cluster.kill(0);
    until("doctor reports the member that is down", async || {
        let found = try_findings(&cluster.url()).await.unwrap_or_default();
        found.iter().any(|f| (f.id, f.severity) == ("member-down", Weak))
    })
    .await;
    let server = Etcd::with(Setup::new().arg("--quota-backend-bytes=200000"), 1);
    assert_eq!(troubles(&server.url()).await, [("one-member", Weak)]);
    let locks = leasehold::connect(server.url()).await.unwrap();
    let filling = "x".repeat(50_000);
    for n in 0..50 {
        let key = format!("filling{n}");
        let mut put = server.etcdctl_command();
        if !put.args(["put", &key, &filling]).output().unwrap().status.success() {
            break;
        }
    }
    let found = locks.diagnose().await.unwrap();
    let ids: Vec<_> = found.iter().filter(|f| f.severity == Broken).map(|f| f.id).collect();
    assert_eq!(ids, ["full"]);
}
