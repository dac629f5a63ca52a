//! NATS: what people get wrong as they connect, each told in one line that says what to do; what is wrong
//! with a bucket; what is found by `doctor`.

use std::io::Write;
use std::net::TcpListener;

use crate::nats_common::*;
use leasehold::ErrorKind;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee};
use leasehold_test_support::*;
use testbed::{Nats, NatsCluster, Setup};

/// What is told to whoever connects so.
async fn told(url: String) -> (ErrorKind, String) {
    let error = leasehold::connect(&url).await.expect_err(&url);
    let text = format!("{error:#}");
    assert!(!text.contains("sekret") && text.lines().count() == 1, "{text}");
    assert!(!format!("{error:?}").contains("sekret"), "{error:?}");
    (error.kind(), text)
}

async fn assert_config(url: String, says: &str) {
    let (kind, text) = told(url).await;
    assert!(kind == ErrorKind::Config && text.contains(says), "{says}: {text}");
}

/// A server of that version, which says no more than that.
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

#[test]
fn s94_connection_mistakes_at_nats_name_the_fix() {
    run(async {
        let closed = Nats::start();
        closed.kill();
        let (kind, text) = told(closed.url()).await;
        assert!(
            kind == ErrorKind::Unreachable && text.contains("check that it is running"),
            "{text}"
        );
        // Something else listens there, which says nothing.
        let (kind, text) = told(format!("nats://127.0.0.1:{}", testbed::redis().port())).await;
        assert!(kind == ErrorKind::Unreachable && text.contains("host and port"), "{text}");
        assert_config(Nats::without_jetstream().url(), "-js").await;
        assert_config(of_version("2.9.10"), "upgrade to NATS 2.11 or later").await;
        let server = Nats::start();
        assert_config(server.url() + "/none?create=no", "nats kv add none --replicas=1").await;
        assert_config(server.url() + "/many?replicas=3", "?replicas=1").await;
        connect(&(server.url() + "/one")).await;
        assert_config(server.url() + "/one?replicas=3", "nats stream edit KV_one").await;

        let token = Nats::with(Setup::new().arg("--auth").arg("sekret"));
        let (kind, text) = told(token.url()).await;
        assert!(kind == ErrorKind::Denied && text.contains("token@host"), "{text}");
        let with = |server: &Nats, who: &str| server.url().replace("//", &format!("//{who}@"));
        let (kind, _) = told(with(&token, "sekret2")).await;
        assert_eq!(kind, ErrorKind::Denied);
        connect(&with(&token, "sekret")).await;

        // Users with less than they need.
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
        let (kind, text) = told(with(&server, "lh:wrong-sekret")).await;
        assert!(kind == ErrorKind::Denied && text.contains("user:password@"), "{text}");
        // The bucket is not there, and it may not make it.
        let (kind, text) = told(with(&server, "lh:sekret") + "/locks").await;
        assert!(kind == ErrorKind::Denied && text.contains("$KV.locks.>"), "{text}");
        connect(&(with(&server, "maker:sekret") + "/locks")).await;
        let locks = connect(&(with(&server, "lh:sekret") + "/locks")).await;
        assert!(locks.mutex("a").lock().await.unwrap().is_held());
        assert!(!format!("{locks:?}").contains("sekret"));
        let reader = connect(&(with(&server, "reader:sekret") + "/locks")).await;
        assert!(reader.read("a").await.is_ok());
        let error = reader.mutex("b").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(format!("{error:#}").contains("allow it to publish"), "{error}");
    });
}

#[test]
fn a_bucket_that_breaks_locks_is_refused_by_the_name_of_the_setting() {
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
        // What `nats kv add --marker-ttl=1m` makes.
        make(
            "good",
            &format!(r#"{ends},"subject_delete_marker_ttl":60000000000,"allow_direct":true"#),
        );
        let locks = connect(&(server.url() + "/good?create=no")).await;
        let guard = locks.mutex("a").lock().await.unwrap();
        // It is made worse while it is in use.
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
        // It is full.
        let error = locks.mutex("b").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        drop(guard);
    });
}

#[test]
fn require_and_doctor_say_what_nats_cannot_keep() {
    run(async {
        let server = testbed::nats();
        for wanted in [
            Guarantee::GrantDurability(Durability::Disk),
            Guarantee::TokenDurability(Durability::Majority),
            Guarantee::AtLeast,
            Guarantee::LockDelay,
        ] {
            let refused = leasehold::builder().require(wanted).connect(server.url()).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported, "{wanted}");
        }
        for wanted in [Guarantee::ExclusiveOnStoreCrash, Guarantee::Push, Guarantee::Fifo] {
            leasehold::builder().require(wanted).connect(server.url()).await.unwrap();
        }
        let cluster = NatsCluster::start();
        let locks = connect_patiently(&cluster.url()).await;
        let guard = locks.mutex("a").lock_timeout(PATIENCE).await.unwrap();
        let ids = async || {
            let found = locks.diagnose().await.unwrap_or_default();
            found.iter().map(|found| found.id).collect::<Vec<_>>()
        };
        until("all are well", async || ids().await == ["sync-interval"]).await;
        let leader = cluster.leader("KV_leasehold");
        cluster.kill((leader + 1) % 3);
        until("doctor names who is away", async || ids().await.contains(&"members")).await;
        drop(guard);
    });
}

/// New names and new clients are refused before the bucket is so full that nobody could renew.
#[test]
fn a_bucket_that_fills_up_keeps_room_for_those_who_hold() {
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
        assert!(bytes < 60_000 / 100 * 95, "{bytes} are used");
        // For longer than a session.
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        assert!(guard.is_held() && held.iter().all(|guard| guard.is_held()));
        let found = locks.diagnose().await.unwrap();
        let after = stream.info().await.unwrap().state.bytes;
        assert!(found.iter().any(|found| found.id == "room"), "{bytes}, then {after}: {found:?}");
        guard.release().await.unwrap();
    });
}
