//! Several hosts in the URL of PostgreSQL: a client follows a fail-over.

use crate::sql_common::*;
use leasehold::ErrorKind;
use testbed::{Postgres, Setup};

/// A primary, its asynchronous replica, and the URL that names the replica first.
fn pair() -> (Postgres, Postgres, String) {
    let primary = Postgres::with(Setup::new().fast());
    let url = Server::database(&primary);
    let replica = primary.replica(Setup::new().fast());
    let hosts = format!("@127.0.0.1:{},127.0.0.1:{}/", replica.port(), primary.port());
    let both = url.replace(&format!("@127.0.0.1:{}/", primary.port()), &hosts);
    (primary, replica, both + "?target_session_attrs=read-write")
}

/// Waits until the replica has everything that the primary has now.
async fn catch_up(primary: &Postgres, replica: &Postgres) {
    let written = primary.admin("postgres", "SELECT pg_current_wal_insert_lsn()");
    let has_all = format!("SELECT pg_last_wal_replay_lsn() >= '{written}'");
    until("the replica catches up", async || replica.admin("postgres", &has_all) == "t").await;
}

/// A waiter, once it is in the queue.
async fn queued(
    locks: &leasehold::Client,
) -> tokio::task::JoinHandle<leasehold::Result<leasehold::MutexGuard>> {
    let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
    let mutex = locks.mutex("job").lease(LONG).on_waiting(move |_| {
        let _ = queued.send(());
    });
    let waiter = tokio::spawn(async move { mutex.lock().await });
    in_queue.recv().await.unwrap();
    waiter
}

#[test]
fn holder_and_waiter_follow_the_primary_to_another_host() {
    run(async {
        let (primary, replica, url) = pair();
        let [holder, waits] = [connect(&url).await, connect(&url).await];
        let guard = holder.mutex("job").lease(LONG).lock().await.unwrap();
        let waiter = queued(&waits).await;
        catch_up(&primary, &replica).await;
        primary.kill();

        let error = refusal(&url).await;
        assert_told(&error, ErrorKind::Unreachable, "lh:lh");
        let shown = format!("{error:#}");
        assert!(shown.contains(&format!("{}: the server is read-only", replica.port())), "{shown}");
        assert!(shown.contains(&format!("{}: Connection refused", primary.port())), "{shown}");

        replica.promote();
        let token = guard.token();
        until("the holder uses the new primary", async || {
            holder.mutex("other").try_lock().await.is_ok()
        })
        .await;
        release(guard).await;
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(guard.token() > token);
        release(guard).await;
        release(connect(&url).await.mutex("job").lock().await.unwrap()).await;

        // The former primary starts again and accepts writes. Clients that know the new primary do
        // not use it.
        primary.restart();
        replica.kill();
        until("the former primary is refused", async || {
            let error = holder.mutex("job").try_lock().await.unwrap_err();
            assert_told(&error, ErrorKind::Unreachable, "lh:lh");
            format!("{error:#}").contains("is a former primary")
        })
        .await;
    });
}

/// As documented: a fail-over to an asynchronous replica can lose the latest grants.
#[test]
fn unreplicated_grant_is_lost_and_the_next_token_is_higher() {
    run(async {
        let (primary, replica, url) = pair();
        let [holder, waits] = [connect(&url).await, connect(&url).await];
        release(holder.mutex("job").lock().await.unwrap()).await;
        catch_up(&primary, &replica).await;
        replica.admin("postgres", "ALTER SYSTEM SET primary_conninfo = ''");
        replica.admin("postgres", "SELECT pg_reload_conf()");
        let receives = "SELECT count(*) FROM pg_stat_wal_receiver";
        until("replication ends", async || replica.admin("postgres", receives) == "0").await;

        let guard = holder.mutex("job").lock().await.unwrap();
        let waiter = queued(&waits).await;
        primary.kill();
        replica.promote();
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.token() > guard.token());
        until("the holder finds out", async || !guard.is_held()).await;
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
        assert!(next.is_held());
        release(next).await;
    });
}
