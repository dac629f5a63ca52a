//! Who is let in: users, passwords and rights, TLS, servers that cannot be used; and what is told to those
//! who are not.

#![cfg(feature = "etcd")]

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::etcd_common::*;
use leasehold::ErrorKind;
use leasehold::store::etcd::EtcdStore;
use leasehold::store::{Joined, Mode, Signal, Store};
use testbed::{Etcd, Setup};
use tokio::runtime::Handle;

/// What a client is told that is not let in: by connecting, or at the latest by its first lock.
async fn refusal(url: &str, name: &str) -> leasehold::Error {
    let error = match leasehold::connect(url).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex(name).try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was given on {}", locks.url()),
        },
    };
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
    error
}

#[test]
fn nobody_listens() {
    run(async {
        let error = refusal("etcd://127.0.0.1:1,127.0.0.1:2", "x").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(format!("{error:#}").contains("no member of etcd answers"), "{error}");
    });
}

/// What a proxy answers to a keep-alive may be older than the question, and it numbers watches itself.
#[test]
fn f11_etcds_grpc_proxy_is_recognised_and_refused() {
    run(async {
        let server = testbed::etcd();
        // The second shows the cluster's own list of members.
        for more in [&[][..], &["--advertise-client-url="]] {
            let proxy = server.grpc_proxy(more);
            let url = format!("etcd://127.0.0.1:{}", proxy.port());
            let mut told = None;
            until("the proxy", async || match leasehold::connect(&url).await {
                Err(e) if e.kind() == ErrorKind::Unreachable => false,
                other => {
                    told = Some(other.err());
                    true
                }
            })
            .await;
            let error = told.unwrap().unwrap_or_else(|| panic!("not recognised: {more:?}"));
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(format!("{error:#}").contains("grpc-proxy"), "{error}");
            assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
        }
    });
}

#[test]
fn tls_is_verified() {
    run(async {
        let server = Etcd::with(Setup::new().tls(), 1);
        let url = server.url();
        let authority = server.certificates().authority().display().to_string();
        let locks = connect(&format!("{url}?ca={authority}")).await;
        release(locks.mutex("tls").lock().await.unwrap()).await;
        let error = refusal(&url, "tls").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(format!("{error:#}").contains("certificate"), "{error}");
        let error = refusal(&url.replace("etcds:", "etcd:"), "tls").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        let error = refusal(&format!("{url}?ca=/no/such/file"), "tls").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let error = refusal(&format!("{url}?ca=/etc/hostname"), "tls").await;
        assert_ne!(error.kind(), ErrorKind::Corrupt, "{error}");
    });
}

#[test]
fn a_server_that_wants_to_know_its_clients_is_shown_a_certificate() {
    run(async {
        let server = Etcd::with(Setup::new().client_certificates(), 1);
        let (url, certificates) = (server.url(), server.certificates());
        let url = format!("{url}?ca={}", certificates.authority().display());
        let shows = |(cert, key): (&Path, &Path)| {
            format!("{url}&cert={}&key={}", cert.display(), key.display())
        };
        let ours = certificates.client();
        release(connect(&shows(ours)).await.mutex("tls").lock().await.unwrap()).await;
        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        for bad in [url.clone(), shows(other.client())] {
            let error = refusal(&bad, "tls").await;
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            assert!(format!("{error:#}").contains("ertificate"), "{error}");
        }
        let error = refusal(&shows((ours.0, other.client().1)), "tls").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    });
}

#[test]
fn s94_users_passwords_and_rights() {
    run(async {
        let server = Etcd::start();
        server.enable_auth("locks/");
        let port = server.port(0);
        let at = |user: &str, path: &str| format!("etcd://{user}127.0.0.1:{port}{path}");
        for (user, path, says) in [
            ("", "", "put one into the URL"),
            ("lh:wr0ng@", "", "refuses the user or the password"),
            ("nobody:lh@", "", "refuses the user or the password"),
            ("lh:lh@", "/secret", "secret/"),
            ("lh:lh@", "", "readwrite \"elsewhere/\" --prefix"),
            ("lh:wr0ng@", "/secret", "refuses the user or the password"),
        ] {
            let error = refusal(&at(user, path), "elsewhere").await;
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(format!("{error:#}").contains(says), "{error}");
            assert!(!format!("{error:#}").contains("wr0ng"), "{error}");
        }
        // Within what is granted, everything works; by namespace or by name.
        let locks = connect(&at("lh:lh@", "/locks")).await;
        let other = connect(&at("lh:lh@", "")).await;
        let guard = locks.mutex("mine").lock().await.unwrap();
        let lock = other.mutex("locks/mine");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&locks, "mine", 2).await;
        assert_eq!(locks.list("").await.unwrap().len(), 1);
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;
        // A server that forgets its tokens (they live in memory) is asked for new ones.
        let guard = locks.mutex("kept").lock().await.unwrap();
        server.kill(0);
        server.restart(0);
        release(locks.mutex("after").lock().await.unwrap()).await;
        assert!(guard.is_held());
        release(guard).await;
    });
}

/// The URL has always said who we are; now etcd asks.
#[test]
fn f12_users_are_enabled_while_locks_are_held_and_waited_for() {
    run(async {
        let server = Etcd::start();
        let url = format!("etcd://lh:lh@127.0.0.1:{}", server.port(0));
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let lease = Duration::from_secs(6);
        let held = locks.mutex("f12").lease(lease).lock().await.unwrap();
        let lock = other.mutex("f12").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "f12", 2).await;
        server.enable_auth("");
        tokio::time::sleep(lease * 2).await;
        assert!(held.is_held(), "{held:?}");
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        // And one who comes for the first time since.
        release(other.mutex("f12-new").lock().await.unwrap()).await;
        release(held).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

/// Tokens of two seconds, and leases of more.
#[test]
fn f12_a_users_token_may_end_while_locks_are_held_and_waited_for() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        std::fs::write(&key, "a secret of sixty-four bytes, so that nobody finds it too short!")
            .unwrap();
        let token = format!("jwt,sign-method=HS256,priv-key={},ttl=2s", key.display());
        let server = Etcd::with(Setup::new().arg(format!("--auth-token={token}")), 1);
        server.enable_auth("");
        let url = format!("etcd://lh:lh@127.0.0.1:{}", server.port(0));
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let lease = Duration::from_secs(6);
        let held = locks.mutex("f12-jwt").lease(lease).lock().await.unwrap();
        let lock = other.mutex("f12-jwt").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "f12-jwt", 2).await;
        tokio::time::sleep(lease * 2).await;
        assert!(held.is_held(), "{held:?}");
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        release(held).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

/// Sets a password, even the same one: etcd forgets the tokens of that user.
fn set_password(server: &Etcd, user: &str, password: &str) {
    let mut command = server.etcdctl_command();
    command.args(["--user", "root:root", "user", "passwd", user, "--interactive=false"]);
    let mut running = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut to = running.stdin.take().unwrap();
    writeln!(to, "{password}").unwrap();
    drop(to);
    assert!(running.wait().unwrap().success());
}

/// The stream of watches was opened with a token of our user that has ended since. Requests get a new
/// token; the stream refused every new watch, and whoever waited asked twice a second for ever.
#[test]
fn s84_a_stream_whose_token_has_ended_is_opened_anew() {
    run(async {
        let server = Etcd::start();
        server.enable_auth("");
        let url = format!("etcd://lh:lh@127.0.0.1:{}", server.port(0));
        let store = EtcdStore::open(&url, &Handle::current()).await.unwrap();
        let (first, second, third) = (patient("a"), patient("a"), patient("b"));
        let (fourth, other) =
            (patient("b"), EtcdStore::open(&url, &Handle::current()).await.unwrap());
        for held in [&first, &third] {
            let joined = other.join(held, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        }
        assert!(matches!(store.join(&second, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        quiet(&store).await;
        set_password(&server, "lh", "lh");
        assert!(matches!(store.join(&fourth, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        // It watches, and does not ask again and again.
        quiet(&store).await;
        for (held, waits) in [(&third, &fourth), (&first, &second)] {
            assert!(other.leave(held, None).await.unwrap());
            let told = tokio::time::timeout(PATIENCE, store.changed(waits)).await.unwrap().unwrap();
            assert!(matches!(told, Signal::Granted(_)), "{told:?}");
        }
    });
}
