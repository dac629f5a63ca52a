//! Access: passwords and permissions, missing databases, servers that are read-only or too old,
//! TLS, and invalid parameters.

use std::time::Duration;

use crate::sql_common::*;
use leasehold::ErrorKind;
use testbed::Setup;

on_all![
    limited_permissions_suffice,
    wrong_password_is_denied,
    missing_database_is_reported,
    read_only_user_is_denied_with_the_fix,
    read_only_server_is_refused,
    tls_is_verified,
];

async fn limited_permissions_suffice<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let owner = connect(&url).await;
    release(owner.mutex("first").lock().await.unwrap()).await;
    server.user(&url, "limited", "SELECT, INSERT, UPDATE, DELETE");
    let limited = url.replace("lh:lh@", "limited:limited@");
    let clients = [connect(&limited).await, connect(&limited).await, owner];
    hammer(&clients, "shared", 4, 5).await;
    // The poller, the listener and the sweeper need no more permissions either.
    let permits = clients[0].semaphore("permits", 2);
    let guards = [permits.acquire().await.unwrap(), permits.acquire().await.unwrap()];
    assert_eq!(clients[1].inspect("permits").await.unwrap().unwrap().holders().count(), 2);
    guards.into_iter().for_each(drop);
}

// S94
async fn wrong_password_is_denied<S: Server>() {
    let url = S::shared().database();
    let secret = "hush-hush-7";
    let error = refusal(&url.replace("lh:lh@", &format!("lh:{secret}@"))).await;
    assert_told(&error, ErrorKind::Denied, secret);
    // URLs without a valid host or port, which a driver may quote in its error.
    let scheme = url.split(':').next().unwrap();
    for odd in [
        format!("{scheme}://lh:{secret}@127.0.0.1:notaport/x"),
        format!("{scheme}://lh:{secret}@/?pool=x"),
    ] {
        let error = refusal(&odd).await;
        assert_told(&error, ErrorKind::Config, secret);
    }
}

async fn missing_database_is_reported<S: Server>() {
    let url = S::shared().database();
    let error = refusal(&url.replace("/test", "/testnosuch")).await;
    assert_told(&error, ErrorKind::Config, "lh:lh");
}

async fn read_only_user_is_denied_with_the_fix<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    release(connect(&url).await.mutex("first").lock().await.unwrap()).await;
    server.user(&url, "reader", "SELECT");
    let error = refusal(&url.replace("lh:lh@", "reader:reader@")).await;
    assert_told(&error, ErrorKind::Denied, "reader:reader");
    assert!(format!("{error:#}").contains("GRANT SELECT, INSERT, UPDATE, DELETE"), "{error}");
}

async fn read_only_server_is_refused<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let before = connect(&url).await;
    release(before.mutex("first").lock().await.unwrap()).await;
    server.read_only(&url, true);
    let error = refusal(&url).await;
    assert_told(&error, ErrorKind::Denied, "lh:lh");
    assert!(format!("{error:#}").contains("read-only"), "{error}");
    // For a client that has written there before, this is a fail-over. A try gets no answer, and a
    // wait continues. (A session that is being ended may still serve a try.)
    let mut tried = before.mutex("next").try_lock().await;
    while let Ok(guard) = tried {
        release(guard).await;
        tried = before.mutex("next").try_lock().await;
    }
    let error = tried.unwrap_err();
    assert_told(&error, ErrorKind::Unreachable, "lh:lh");
    assert!(format!("{error:#}").contains("read-only"), "{error}");
    let waiting = tokio::spawn({
        let mutex = before.mutex("next").lease(PATIENCE);
        async move { mutex.lock().await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.read_only(&url, false);
    release(waiting.await.unwrap().unwrap()).await;
}

async fn tls_is_verified<S: Server>() {
    // Two servers have two authorities, and each is the wrong one for the other.
    let servers = [testbed_tls::<S>(), testbed_tls::<S>()];
    for (server, wrong) in [(0, 1), (1, 0)] {
        let url = servers[server].0.database();
        let right = servers[server].0.verified(&servers[server].1);
        let locks = connect(&format!("{url}?{right}")).await;
        release(locks.mutex("private").lock().await.unwrap()).await;
        let wrong = servers[server].0.verified(&servers[wrong].1);
        let error = refusal(&format!("{url}?{wrong}")).await;
        assert_eq!(format!("{error:#}").lines().count(), 1);
        assert!(format!("{error:#}").to_lowercase().contains("certificate"), "{error}");
    }
}

fn testbed_tls<S: Server>() -> (S, std::path::PathBuf) {
    let server = S::with(Setup::new().fast().tls());
    let authority = server.authority();
    (server, authority)
}

#[cfg(feature = "mysql")]
#[test]
fn wrong_server_version_is_refused_at_connect() {
    run(async {
        for (version, least) in [("5.7.44-log", "MySQL 8.0"), ("10.3.39-MariaDB", "MariaDB 10.6")] {
            let argument = format!("--version={version}");
            let server = testbed::MariaDb::with(Setup::new().fast().arg(argument));
            let error = refusal(&server.database()).await;
            assert_told(&error, ErrorKind::Config, "lh:lh");
            assert!(error.reason().contains(&format!("{version} is too old")), "{error}");
            assert_eq!(error.hint(), Some(&*format!("upgrade to {least} or later")), "{error}");
        }
    });
}

/// Only the reported version is changed.
#[cfg(all(feature = "mysql", feature = "postgres"))]
#[test]
fn other_database_product_is_refused_at_connect() {
    run(async {
        let version = "8.0.11-TiDB-v7.5.1";
        let mysql = testbed::MariaDb::with(Setup::new().fast().arg(format!("--version={version}")));
        let error = refusal(&mysql.database()).await;
        assert_told(&error, ErrorKind::Config, "lh:lh");
        assert!(error.reason().contains("the server is TiDB"), "{error}");
        assert!(error.reason().contains(version), "{error}");

        let server = testbed::postgres();
        let url = server.database();
        let version = "CockroachDB CCL v24.3.5 (x86_64-pc-linux-gnu, built 2025/02/03 17:28:15)";
        Server::admin(
            server,
            &url,
            &format!(
                "SET allow_system_table_mods = on; \
                 ALTER FUNCTION pg_catalog.version() RENAME TO version_of_postgres; \
                 CREATE FUNCTION pg_catalog.version() RETURNS text LANGUAGE sql \
                 AS $$ SELECT '{version}' $$"
            ),
        );
        let error = refusal(&url).await;
        assert_told(&error, ErrorKind::Config, "lh:lh");
        assert!(error.reason().contains("the server is CockroachDB"), "{error}");
    });
}
