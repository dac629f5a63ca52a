//! Access: users, passwords, permissions, TLS, servers that cannot be used, and the errors for
//! clients that are refused.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::etcd_common::*;
use leasehold::ErrorKind;
use leasehold::store::etcd::EtcdStore;
use leasehold::store::{Joined, Mode, Signal, Store};
use testbed::{Etcd, Setup, TWO_ADDRESSES, drop_ipv6, in_own_network};
use tokio::runtime::Handle;

/// Returns the error of a client that is refused when it connects, or at the latest when it takes
/// its first lock.
async fn refusal(url: &str, name: &str) -> leasehold::Error {
    let error = match leasehold::connect(url).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex(name).try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was granted on {}", locks.url()),
        },
    };
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
    error
}

#[test]
fn unreachable_server_is_reported() {
    run(async {
        let error = refusal("etcd://127.0.0.1:1,127.0.0.1:2", "x").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(format!("{error:#}").contains("no etcd member responds"), "{error}");
    });
}

// F11
/// A proxy may answer a keep-alive with a result from before the request, and it assigns its own
/// watch IDs.
#[test]
fn etcd_grpc_proxy_is_recognized_and_refused() {
    run(async {
        let server = testbed::etcd();
        // The second proxy returns the cluster's own list of members.
        for more in [&[][..], &["--advertise-client-url="]] {
            let proxy = server.grpc_proxy(more);
            let url = format!("etcd://127.0.0.1:{}", proxy.port());
            let mut refusal = None;
            until("the proxy is ready", async || match leasehold::connect(&url).await {
                Err(e) if e.kind() == ErrorKind::Unreachable => false,
                other => {
                    refusal = Some(other.err());
                    true
                }
            })
            .await;
            let error = refusal
                .unwrap()
                .unwrap_or_else(|| panic!("the proxy was not recognized: {more:?}"));
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
fn client_certificate_is_presented_if_the_server_requires_it() {
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

// S94
#[test]
fn wrong_users_passwords_and_permissions_are_reported() {
    run(async {
        let server = Etcd::start();
        server.enable_auth("locks/");
        let port = server.port(0);
        let at = |user: &str, path: &str| format!("etcd://{user}127.0.0.1:{port}{path}");
        for (user, path, says) in [
            ("", "", "put the user name and password into the URL"),
            ("lh:wr0ng@", "", "rejected the user name or the password"),
            ("nobody:lh@", "", "rejected the user name or the password"),
            ("lh:lh@", "/secret", "secret/"),
            ("lh:lh@", "", "readwrite \"elsewhere/\" --prefix"),
            ("lh:wr0ng@", "/secret", "rejected the user name or the password"),
        ] {
            let error = refusal(&at(user, path), "elsewhere").await;
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(format!("{error:#}").contains(says), "{error}");
            assert!(!format!("{error:#}").contains("wr0ng"), "{error}");
        }
        // Everything works within the granted permissions, by namespace or by name.
        let locks = connect(&at("lh:lh@", "/locks")).await;
        let other = connect(&at("lh:lh@", "")).await;
        let guard = locks.mutex("mine").lock().await.unwrap();
        let lock = other.mutex("locks/mine");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&locks, "mine", 2).await;
        assert_eq!(locks.list("").await.unwrap().len(), 1);
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;
        // A server that has lost its tokens (they are in memory) issues new ones.
        let guard = locks.mutex("kept").lock().await.unwrap();
        server.kill(0);
        server.restart(0);
        release(locks.mutex("after").lock().await.unwrap()).await;
        assert!(guard.is_held());
        release(guard).await;
    });
}

/// A lease is revoked only by a user that may write its keys, so a reader cannot end a hold.
#[test]
fn user_with_read_access_can_neither_end_nor_fake_a_hold() {
    run(async {
        let server = Etcd::start();
        for spy in ["reader", "stranger"] {
            server.etcdctl(&["user", "add", &format!("{spy}:spy")]);
        }
        server.etcdctl(&["role", "add", "reads"]);
        let read = ["role", "grant-permission", "reads", "read", "locks/", "--prefix=true"];
        server.etcdctl(&read);
        server.etcdctl(&["user", "grant-role", "reader", "reads"]);
        server.enable_auth("locks/");
        let url = format!("etcd://lh:lh@127.0.0.1:{}/locks", server.port(0));
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let guard = locks.mutex("a").lock().await.unwrap();
        let lock = other.mutex("a");
        let waiter = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "a", 2).await;
        let root = |args: &[&str]| server.etcdctl(&[&["--user=root:root"], args].concat());
        let keys = root(&["get", "--prefix", "--keys-only", "locks/"]);
        let keys: Vec<&str> = keys.split_whitespace().collect();
        let leases = root(&["lease", "list"]);
        let leases: Vec<&str> = leases.lines().skip(1).collect();
        assert!(keys.len() >= 2 && leases.len() >= 2, "{keys:?} {leases:?}");
        let may = |user: &str, args: &[&str]| {
            let user = format!("--user={user}:spy");
            let output = server.etcdctl_command().arg(user).args(args).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() || stderr.contains("permission denied"), "{stderr}");
            output.status.success()
        };
        for user in ["reader", "stranger"] {
            assert_eq!(may(user, &["get", "--prefix", "locks/"]), user == "reader", "{user}");
            for key in &keys {
                assert!(!may(user, &["del", key]) && !may(user, &["put", key, "x"]), "{user}");
            }
            for lease in &leases {
                assert!(!may(user, &["lease", "revoke", lease]), "{user}");
            }
        }
        assert!(guard.is_held() && !waiter.is_finished());
        release(guard).await;
        release(waiter.await.unwrap().unwrap()).await;
    });
}

// F12
/// The URL names a user from the beginning, and only later does etcd require one.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn authentication_may_be_enabled_while_locks_are_held_and_awaited() {
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
        // A name that is used for the first time since then works too.
        release(other.mutex("f12-new").lock().await.unwrap()).await;
        release(held).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

// F12
/// The tokens last two seconds, and the leases longer.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn auth_token_may_expire_while_locks_are_held_and_awaited() {
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

/// Sets a password, which may be the same one. etcd then forgets the tokens of that user.
fn set_password(server: &Etcd, user: &str, password: &str) {
    let mut command = server.etcdctl_command();
    command.args(["--user", "root:root", "user", "passwd", user, "--interactive=false"]);
    let mut running = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut to = running.stdin.take().unwrap();
    writeln!(to, "{password}").unwrap();
    drop(to);
    assert!(running.wait().unwrap().success());
}

// S84
/// The stream of watches was opened with an auth token that has expired since. Requests get a new
/// token. The stream used to refuse every new watch, so waiters polled twice a second forever.
#[test]
fn watch_stream_is_reopened_after_its_token_expired() {
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
        // The waiter watches, and does not poll again and again.
        quiet(&store).await;
        for (held, waits) in [(&third, &fourth), (&first, &second)] {
            assert!(other.leave(held, None).await.unwrap());
            let signal =
                tokio::time::timeout(PATIENCE, store.changed(waits)).await.unwrap().unwrap();
            assert!(matches!(signal, Signal::Granted(_)), "{signal:?}");
        }
    });
}

/// etcd forgets a user's tokens together with the old password.
#[test]
fn changed_password_is_reread_for_the_next_token() {
    run(async {
        let server = Etcd::start();
        server.enable_auth("");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "lh").unwrap();
        let at = format!("etcd://lh@127.0.0.1:{}", server.port(0));
        let url = format!("{at}?password_file={}", file.path().display());
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let guard = locks.mutex("changed").lock().await.unwrap();
        let lock = other.mutex("changed");
        let waiter = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "changed", 2).await;
        set_password(&server, "lh", "new");
        until("the old password is rejected", async || match locks.inspect("changed").await {
            Err(error) => error.to_string().contains("accepted before"),
            Ok(_) => false,
        })
        .await;
        std::fs::write(file.path(), "new").unwrap();
        until("the client uses the new password", async || locks.inspect("changed").await.is_ok())
            .await;
        release(guard).await;
        release(waiter.await.unwrap().unwrap()).await;
    });
}

#[test]
fn etcd_connects_to_the_address_that_responds() {
    in_own_network("etcd_access::etcd_connects_to_the_address_that_responds", || {
        run(async {
            let server = Etcd::start();
            drop_ipv6();
            let locks = connect(&server.url().replace("127.0.0.1", TWO_ADDRESSES)).await;
            release(locks.mutex("a").lock_timeout(PATIENCE).await.unwrap()).await;
        });
    });
}
