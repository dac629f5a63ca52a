//! NATS: mistakes of users when they connect, unsuitable buckets, and findings of `doctor`. Each
//! error is one line that names the fix.

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold::ErrorKind;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee};
use leasehold_test_support::*;
use testbed::{Nats, NatsCluster, Setup};

/// Returns the error of a failed connection.
async fn refusal(url: String) -> (ErrorKind, String) {
    let error = leasehold::connect(&url).await.expect_err(&url);
    let text = format!("{error:#}");
    assert!(!text.contains("sekret") && text.lines().count() == 1, "{text}");
    assert!(!format!("{error:?}").contains("sekret"), "{error:?}");
    (error.kind(), text)
}

async fn assert_config(url: String, says: &str) {
    let (kind, text) = refusal(url).await;
    assert!(kind == ErrorKind::Config && text.contains(says), "{says}: {text}");
}

/// Starts a server that only sends a greeting with this version.
fn of_version(version: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("nats://127.0.0.1:{}", listener.local_addr().unwrap().port());
    let hello = format!(
        "INFO {{\"server_id\":\"x\",\"version\":\"{version}\",\"proto\":1,\"max_payload\":1048576,\
         \"headers\":true,\"jetstream\":true}}\r\nPONG\r\n"
    );
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.write_all(hello.as_bytes());
            open.push(stream);
        }
    });
    url
}

// S94
#[test]
fn connection_mistakes_at_nats_name_the_fix() {
    run(async {
        let closed = Nats::start();
        closed.kill();
        let (kind, text) = refusal(closed.url()).await;
        assert!(
            kind == ErrorKind::Unreachable && text.contains("check that it is running"),
            "{text}"
        );
        // Another program listens there and sends nothing.
        let (kind, text) = refusal(format!("nats://127.0.0.1:{}", testbed::redis().port())).await;
        assert!(kind == ErrorKind::Unreachable && text.contains("host and port"), "{text}");
        assert_config(Nats::without_jetstream().url(), "-js").await;
        assert_config(of_version("2.9.10"), "upgrade to NATS 2.11 or later").await;
        let server = Nats::start();
        assert_config(server.url() + "/none?create=no", "nats kv add none --replicas=1").await;
        assert_config(server.url() + "/none?create=no", "no store found").await;
        assert_config(server.url() + "/many?replicas=3", "?replicas=1").await;
        connect(&(server.url() + "/one")).await;
        assert_config(server.url() + "/one?replicas=3", "nats stream edit KV_one").await;

        let token = Nats::with(Setup::new().arg("--auth").arg("sekret"));
        let (kind, text) = refusal(token.url()).await;
        assert!(kind == ErrorKind::Denied && text.contains("token@host"), "{text}");
        let with = |server: &Nats, user: &str| server.url().replace("//", &format!("//{user}@"));
        let (kind, _) = refusal(with(&token, "sekret2")).await;
        assert_eq!(kind, ErrorKind::Denied);
        connect(&with(&token, "sekret")).await;

        // Users without some of the permissions.
        let rules = r#"
            authorization { users: [
                { user: "lh", password: "sekret", permissions: {
                    publish: ["$KV.locks.>", "$JS.API.STREAM.INFO.KV_locks",
                        "$JS.API.STREAM.MSG.GET.KV_locks", "leasehold.locks.>"],
                    subscribe: ["_INBOX.>", "leasehold.locks.>"]
                } }
                { user: "maker", password: "sekret" }
                { user: "reader", password: "sekret", permissions: {
                    publish: ["$JS.API.STREAM.INFO.KV_locks", "$JS.API.STREAM.MSG.GET.KV_locks"],
                    subscribe: ["_INBOX.>"]
                } }
            ] }
        "#;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        let server = Nats::with(Setup::new().arg("-c").arg(file.path().to_str().unwrap()));
        let (kind, text) = refusal(with(&server, "lh:wrong-sekret")).await;
        assert!(kind == ErrorKind::Denied && text.contains("user:password@"), "{text}");
        // The bucket does not exist, and this user may not create it.
        let (kind, text) = refusal(with(&server, "lh:sekret") + "/locks").await;
        assert!(kind == ErrorKind::Denied && text.contains("$KV.locks.>"), "{text}");
        connect(&(with(&server, "maker:sekret") + "/locks")).await;
        let locks = connect(&(with(&server, "lh:sekret") + "/locks")).await;
        assert!(locks.mutex("a").lock().await.unwrap().is_held());
        assert!(!format!("{locks:?}").contains("sekret"));
        let reader = connect(&(with(&server, "reader:sekret") + "/locks")).await;
        assert!(reader.inspect("a").await.is_ok());
        let error = reader.mutex("b").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(format!("{error:#}").contains("allow it to publish"), "{error}");
    });
}

#[test]
fn unsafe_bucket_is_refused_with_the_name_of_the_setting() {
    run(async {
        let server = Nats::start();
        let make = |bucket: &str, more: &str| {
            let config = format!(
                "{{\"name\":\"KV_{bucket}\",\"subjects\":[\"$KV.{bucket}.>\"],\"num_replicas\":1,\
                 \"discard\":\"new\",\"max_msgs_per_subject\":1,\"storage\":\"file\",{more}}}"
            );
            let made = server.ask(&format!("$JS.API.STREAM.CREATE.KV_{bucket}"), &config);
            assert!(made.contains("\"created\""), "{bucket}: {made}");
        };
        let ends = r#""allow_msg_ttl":true"#;
        for (bucket, more, says) in [
            ("plain", r#""allow_direct":true"#.to_owned(), "--allow-msg-ttl"),
            ("aged", format!(r#"{ends},"max_age":3600000000000"#), "max_age"),
            ("history", format!(r#"{ends},"max_msgs_per_subject":5"#), "history"),
            ("memory", format!(r#"{ends},"storage":"memory""#), "storage"),
            ("old", format!(r#"{ends},"discard":"old","max_bytes":1000000"#), "discard"),
            ("foreign", format!(r#"{ends},"subjects":["foreign.>"]"#), "subjects"),
            ("sources", format!(r#"{ends},"sources":[{{"name":"KV_plain"}}]"#), "sources"),
        ] {
            make(bucket, &more);
            assert_config(format!("{}/{bucket}", server.url()), says).await;
        }
        // As created by `nats kv add --marker-ttl=1m`.
        make(
            "good",
            &format!(r#"{ends},"subject_delete_marker_ttl":60000000000,"allow_direct":true"#),
        );
        let locks = connect(&(server.url() + "/good?create=no")).await;
        let guard = locks.mutex("a").lock().await.unwrap();
        // The settings become worse while the bucket is in use.
        let found = async || {
            let found = locks.diagnose().await.unwrap();
            found.iter().map(|found| (found.id, found.severity)).collect::<Vec<_>>()
        };
        let (one, sync) = (("replicas", Severity::Weak), ("sync-interval", Severity::Note));
        assert_eq!(found().await, [one, sync]);
        let worse = r#"{"name":"KV_good","subjects":["$KV.good.>"],"num_replicas":1,"discard":"new",
            "max_msgs_per_subject":1,"storage":"file","allow_msg_ttl":true,"max_age":600000000000,
            "subject_delete_marker_ttl":60000000000,"max_bytes":100}"#;
        let edited = server.ask("$JS.API.STREAM.UPDATE.KV_good", worse);
        assert!(edited.contains("\"max_age\":600000000000"), "{edited}");
        let (broken, room) = (("bucket", Severity::Broken), ("room", Severity::Broken));
        assert_eq!(found().await, [broken, room, one, sync]);
        // The bucket is full.
        let error = locks.mutex("b").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        drop(guard);
    });
}

#[test]
fn require_and_doctor_report_guarantees_missing_in_nats() {
    run(async {
        let server = testbed::nats();
        for wanted in [
            Guarantee::GrantDurability(Durability::Disk),
            Guarantee::TokenDurability(Durability::Majority),
            Guarantee::MinHold,
            Guarantee::LockDelay,
        ] {
            let refused = leasehold::builder().require(wanted).connect(server.url()).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported, "{wanted}");
        }
        for wanted in [Guarantee::ExclusiveOnStoreCrash, Guarantee::Push, Guarantee::Fifo] {
            leasehold::builder().require(wanted).connect(server.url()).await.unwrap();
        }
        let cluster = NatsCluster::start();
        let locks = connect(&cluster.url()).await;
        let guard = locks.mutex("a").lock_timeout(PATIENCE).await.unwrap();
        let ids = async || {
            let found = locks.diagnose().await.unwrap_or_default();
            found.iter().map(|found| found.id).collect::<Vec<_>>()
        };
        until("all members are well", async || ids().await == ["sync-interval"]).await;
        let leader = cluster.leader("KV_leasehold");
        cluster.kill((leader + 1) % 3);
        until("doctor reports the unreachable member", async || ids().await.contains(&"members"))
            .await;
        drop(guard);
    });
}

/// New names and new clients get an error before the bucket is so full that no client could renew.
#[test]
fn filling_bucket_keeps_room_for_renewals_of_holders() {
    run(async {
        let server = Nats::start();
        let url = server.url() + "/full?session_ms=2000";
        connect(&url).await;
        let context =
            leasehold::store::cell::nats::async_nats::connect(server.url()).await.unwrap();
        let context = leasehold::store::cell::nats::async_nats::jetstream::new(context);
        let mut stream = context.get_stream("KV_full").await.unwrap();
        let mut config = stream.cached_info().config.clone();
        config.max_bytes = 60_000;
        context.update_stream(config).await.unwrap();
        let locks = connect(&url).await;
        let guard = locks.mutex("first").lock().await.unwrap();
        let mut held = Vec::new();
        let error = loop {
            match locks.mutex(format!("name-{}", held.len())).try_lock().await {
                Ok(guard) => held.push(guard),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(error.to_string().contains("four fifths"), "{error}");
        let bytes = stream.info().await.unwrap().state.bytes;
        assert!(bytes < 60_000 / 100 * 95, "{bytes} bytes are used");
        // Longer than a session.
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        assert!(guard.is_held() && held.iter().all(|guard| guard.is_held()));
        let found = locks.diagnose().await.unwrap();
        let after = stream.info().await.unwrap().state.bytes;
        assert!(
            found.iter().any(|found| found.id == "room"),
            "{bytes} bytes used, then {after}: {found:?}"
        );
        guard.release().await.unwrap();
    });
}

#[test]
fn a_server_may_require_a_client_certificate() {
    run(async {
        let server = Nats::with(Setup::new().client_certificates());
        let certificates = server.certificates();
        let url = format!("{}?ca={}", server.url(), certificates.authority().display());
        let shows = |(cert, key): (&Path, &Path)| {
            format!("{url}&cert={}&key={}", cert.display(), key.display())
        };
        let locks = connect(&shows(certificates.client())).await;
        release(locks.mutex("tls").lock().await.unwrap()).await;
        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        for bad in [url.clone(), shows(other.client())] {
            let (kind, text) = refusal(bad).await;
            assert!(kind == ErrorKind::Denied && text.contains("cert=FILE"), "{text}");
        }
        let (cert, _) = certificates.client();
        assert_config(format!("{url}&cert={}", cert.display()), "given together").await;
        assert_config(shows((cert, Path::new("/no/such/file"))), "key=").await;
        assert_config(shows((cert, other.client().1)), "TLS handshake").await;
        // The server's own certificate is checked.
        let unknown = url.replace(
            &certificates.authority().display().to_string(),
            &other.authority().display().to_string(),
        );
        assert_config(unknown, "ca=FILE").await;
    });
}

/// An attacker on the path can offer a connection without TLS.
#[test]
fn client_that_requires_tls_never_connects_without_it() {
    run(async {
        let plain = Nats::start();
        assert_config(plain.url().replace("nats:", "natss:"), "does not use TLS").await;
        let server = Nats::with(Setup::new().tls());
        let url = server.url().replace("nats:", "natss:");
        let locks =
            connect(&format!("{url}?ca={}", server.certificates().authority().display())).await;
        release(locks.mutex("tls").lock().await.unwrap()).await;
    });
}

/// A grant is accepted if it names the claim, which is a random number of 128 bits, and its token.
/// Both are in the bucket, and messages contain them only when the claim already holds.
#[test]
fn user_that_may_only_notify_cannot_fake_a_grant() {
    use futures_util::StreamExt;
    use leasehold::store::cell::nats::async_nats::ConnectOptions;
    run(async {
        let rules = r#"
            authorization { users: [
                { user: "lh", password: "lh" }
                { user: "spy", password: "spy", permissions: {
                    publish: ["leasehold.locks.>"], subscribe: ["leasehold.locks.>"]
                } }
            ] }
        "#;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        let server = Nats::with(Setup::new().arg("-c").arg(file.path().to_str().unwrap()));
        let spy = ConnectOptions::with_user_and_password("spy".into(), "spy".into());
        let spy = spy.connect(server.url()).await.unwrap();
        let mut subscription = spy.subscribe("leasehold.locks.>").await.unwrap();
        spy.flush().await.unwrap();
        let url = server.url().replace("//", "//lh:lh@") + "/locks";
        let clients = [connect(&url).await, connect(&url).await];
        let released = Arc::new(AtomicBool::new(true));
        let waits = |client: usize| lock_in_task(&clients[client], "app", &released);
        let mut guard = clients[0].mutex("app").lock().await.unwrap();
        let mut published: Vec<(String, String)> = Vec::new();
        for turn in 1..=4 {
            let waiter = waits(turn % 2);
            until_queued(&clients[0], "app", 2).await;
            release(guard).await;
            guard = waiter.await.unwrap().0;
        }
        while published.iter().filter(|(_, published)| published.starts_with("granted ")).count()
            < 4
        {
            let message =
                tokio::time::timeout(PATIENCE, subscription.next()).await.unwrap().unwrap();
            let text = String::from_utf8(message.payload.to_vec()).unwrap();
            published.push((message.subject.to_string(), text));
        }
        released.store(false, Ordering::SeqCst);
        let waiter = waits(1);
        until_queued(&clients[0], "app", 2).await;
        for (subject, _) in &published {
            for (_, text) in &published {
                spy.publish(subject.clone(), text.clone().into()).await.unwrap();
                let Some((id, token)) = text.rsplit_once(' ') else { continue };
                for more in 1..50 {
                    let Ok(token) = token.parse::<u64>() else { continue };
                    let text = format!("{id} {}", token + more);
                    spy.publish(subject.clone(), text.into()).await.unwrap();
                }
            }
        }
        // The server delivers all of these messages before the next grant.
        spy.flush().await.unwrap();
        released.store(true, Ordering::SeqCst);
        release(guard).await;
        let (granted, was_released) = waiter.await.unwrap();
        assert!(was_released, "a forged message caused a grant");
        release(granted).await;
    });
}

/// The server closes the connections of a user whose password is changed.
#[test]
fn changed_password_is_reread_for_the_next_connection() {
    run(async {
        let (settings, file) =
            (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let change = |password: &str| {
            let users = format!("authorization {{ user: lh, password: {password} }}\n");
            std::fs::write(settings.path(), users).unwrap();
        };
        change("old");
        std::fs::write(file.path(), "old").unwrap();
        let server = Nats::with(Setup::new().arg("-c").arg(settings.path().to_str().unwrap()));
        let url = server.url().replace("//", "//lh@");
        let url = format!("{url}/locks?password_file={}", file.path().display());
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let guard = locks.mutex("changed").lock().await.unwrap();
        let lock = other.mutex("changed");
        let waiter = tokio::spawn(async move { lock.lock().await });
        until_queued(&locks, "changed", 2).await;
        change("new");
        server.reload();
        until("the old password is refused", async || server.log().contains("uthentication error"))
            .await;
        std::fs::write(file.path(), "new").unwrap();
        until("the client is connected again", async || {
            locks.inspect("changed").await.is_ok_and(|shown| shown.is_some())
        })
        .await;
        release(guard).await;
        release(waiter.await.unwrap().unwrap()).await;
    });
}
