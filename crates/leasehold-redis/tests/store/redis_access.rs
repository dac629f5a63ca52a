//! Access and refusals: users, passwords and permissions, TLS, unusable servers and disabled
//! commands. Also the assessment of the server's settings.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee, Wakeup};
use leasehold::{Error, ErrorKind, Hold};
use leasehold_test_support::*;
use testbed::{Redis, Setup, TWO_ADDRESSES, drop_ipv6, in_own_network};

const PAGE: &str = include_str!("../../../../docs/stores/redis.md");

/// Returns the permissions of the user in docs/stores/redis.md, whose locks begin with `app:`.
fn rights() -> String {
    let (_, line) =
        PAGE.split_once("ACL SETUSER app on >secret ").expect("the documentation has no such line");
    let (line, _) = line.split_once("```").expect("the code block in the documentation has no end");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns these permissions with additional ones that the page mentions.
fn and(more: &str) -> String {
    assert!(PAGE.contains(&format!("`{more}`")), "{more} is not in the docs");
    format!("{} {more}", rights())
}

/// Returns the error of a client that is refused when it connects, or at its first lock.
async fn refusal(url: &str) -> Error {
    match leasehold::connect(url).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex("refused").try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was granted on {}", locks.url()),
        },
    }
}

/// Returns the same error of sentinels. On a busy machine they are queried again, because they must
/// respond soon.
async fn refusal_of_sentinels(url: &str) -> Error {
    let end = Instant::now() + PATIENCE;
    loop {
        let error = refusal(url).await;
        if error.kind() != ErrorKind::Unreachable || Instant::now() > end {
            return error;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn works(url: &str) {
    let locks = connect(url).await;
    let (other, name) = (connect(url).await, "works");
    let guard =
        locks.mutex(name).lease(PATIENCE).lock().await.unwrap_or_else(|error| panic!("{error}"));
    let waiter = tokio::spawn(async move { other.mutex(name).lease(PATIENCE).lock().await });
    until_waiting(&locks, name, 1).await;
    release(guard).await;
    release(waiter.await.unwrap().unwrap()).await;
    release(locks.semaphore("permits", 3).lease(PATIENCE).acquire().await.unwrap()).await;
    release(locks.rwlock("read").lease(PATIENCE).read().await.unwrap()).await;
    assert!(locks.list("").await.unwrap().is_empty());
    assert_eq!(locks.evict(name, leasehold::store::Evict::Holders).await.unwrap(), 0);
}

#[test]
fn a_server_that_is_no_sentinel_is_recognized() {
    run(async {
        let server = fast();
        let url = format!("redis+sentinel://127.0.0.1:{}/m", server.port());
        let error = refusal_of_sentinels(&url).await;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("this Redis server is not a sentinel"), "{error}");
    });
}

fn with_user(rights: &str) -> Redis {
    let server = fast();
    add_user(&server, rights);
    server
}

fn add_user(server: &Redis, rights: &str) {
    let rule = format!("ACL SETUSER lh reset on >s3cret {rights}");
    server.command(&rule.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>());
}

/// The permissions of the page suffice for every deployment.
#[test]
fn documented_permissions_are_sufficient() {
    run(async {
        let cluster = testbed::cluster();
        for node in cluster.nodes() {
            add_user(node, &and("+cluster|slots +asking"));
        }
        let user = |url: String| url.replacen("://", "://lh:s3cret@", 1);
        works(&format!("{}?prefix=app:", user(cluster.url()))).await;

        let set = testbed::sentinel();
        for server in set.servers() {
            add_user(server, &and("+role"));
        }
        works(&format!("{}?prefix=app:", user(set.url()))).await;

        let master = with_user(&and("+wait"));
        let _replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let url = user(format!("redis://127.0.0.1:{}/", master.port()));
        works(&format!("{url}?prefix=app:&replicas=1&replicas_ms=20000")).await;
        // The error names the permission that only this needs.
        let master = with_user(&rights());
        let url = user(format!("redis://127.0.0.1:{}/?prefix=app:&replicas=1", master.port()));
        assert_says(&refusal(&url).await, ErrorKind::Denied, "+wait");
    });
}

// S94
#[test]
fn wrong_password_is_denied() {
    run(async {
        let server = with_user(&rights());
        let port = server.port();
        let url = format!("redis://lh:wrongs3cret@127.0.0.1:{port}/");
        assert_says(&refusal(&url).await, ErrorKind::Denied, "check the URL");
        works(&format!("redis://lh:s3cret@127.0.0.1:{port}/1?prefix=app:")).await;
        let asks = Redis::with(Setup::new().fast().arg("--requirepass").arg("s3cret"));
        let url = format!("redis://127.0.0.1:{}/", asks.port());
        assert_says(&refusal(&url).await, ErrorKind::Denied, "password");
        works(&asks.url()).await;
    });
}

#[test]
fn missing_permissions_are_named() {
    run(async {
        for (rights, what) in [
            (rights().replace("+getset", ""), "getset"),
            (rights().replace("+evalsha", ""), "evalsha"),
            (rights().replace("~app:*", "~else:*"), "~lock-names*"),
            (rights().replace("&leasehold:*", ""), "&leasehold:*"),
        ] {
            let server = with_user(&rights);
            let url = format!("redis://lh:s3cret@127.0.0.1:{}/?prefix=app:", server.port());
            let error = refusal(&url).await;
            assert_says(&error, ErrorKind::Denied, "ACL SETUSER");
            assert!(format!("{error:#}").contains(what), "{what} is not in: {error}");
        }
        // This permission is optional, and locks work without it.
        let server = with_user(&rights().replace("+info", ""));
        works(&format!("redis://lh:s3cret@127.0.0.1:{}/?prefix=app:", server.port())).await;
        // Without it, the server reports no changes of queues, and the store states that.
        for (rights, followed) in
            [(rights(), Wakeup::Push), (rights().replace("+client", ""), Wakeup::Poll)]
        {
            let server = with_user(&rights);
            let url = format!("redis://lh:s3cret@127.0.0.1:{}/?prefix=app:", server.port());
            works(&url).await;
            let locks = connect(&url).await;
            let promised = locks.guarantees();
            assert_eq!((promised.followed, promised.evicted), (followed, Wakeup::Push));
        }
    });
}

// F63
/// Other users' keys must not cause an error that lists permissions that the user already has.
#[test]
fn user_can_list_its_locks_among_locks_of_others() {
    run(async {
        let server = with_user(&rights());
        let all = connect(&server.url()).await;
        let theirs = all.mutex("private").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = all.mutex("private");
            async move { mutex.lock().await }
        });
        let permit = all.semaphore("private permits", 2).acquire().await.unwrap();
        until_waiting(&all, "private", 1).await;
        let ours = all.mutex("app:ours").lock().await.unwrap();
        let user = connect(&format!("redis://lh:s3cret@127.0.0.1:{}/", server.port())).await;
        let listed = user.list("").await.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(listed.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["app:ours"]);
        // A direct request for such a lock names the missing permission.
        assert_says(&user.inspect("private").await.unwrap_err(), ErrorKind::Denied, "~lock-names*");
        // Without a needed permission the list fails.
        add_user(&server, &rights().replace("+zrevrange", "").replace("+zrange ", ""));
        waiter.abort();
        let reader = connect(&format!("redis://lh:s3cret@127.0.0.1:{}/", server.port())).await;
        let permit_of_ours = all.semaphore("app:permits", 2).acquire().await.unwrap();
        assert!(reader.list("").await.is_err());
        for hold in [theirs.into(), permit.into(), ours.into(), Hold::from(permit_of_ours)] {
            release(hold).await;
        }
    });
}

#[test]
fn tls_is_verified() {
    run(async {
        let server = Redis::with(Setup::new().fast().tls());
        let authority = server.certificates().authority().display().to_string();
        works(&format!("{}?tls_ca={authority}", server.url())).await;
        // The certificate is not signed by a trusted authority.
        assert_says(&refusal(&server.url()).await, ErrorKind::Unreachable, "TLS");
        let plain = server.url().replace("rediss://", "redis://");
        assert_eq!(refusal(&plain).await.kind(), ErrorKind::Unreachable);
        let missing = format!("{}?tls_ca=/no/such/file", server.url());
        assert_says(&refusal(&missing).await, ErrorKind::Config, "tls_ca");
    });
}

/// This is the default of Redis with TLS.
#[test]
fn a_server_may_require_a_client_certificate() {
    run(async {
        let setup = Setup::new().fast().tls().arg("--tls-auth-clients").arg("yes");
        let server = Redis::with(setup);
        let certificates = server.certificates();
        let authority = certificates.authority().display();
        let (cert, key) = certificates.client();
        let url = format!("{}?tls_ca={authority}", server.url());
        let both = format!("&cert={}&key={}", cert.display(), key.display());
        works(&format!("{url}{both}")).await;
        assert_says(&refusal(&url).await, ErrorKind::Denied, "requires a client certificate");
        let half = format!("{url}&cert={}", cert.display());
        assert_says(&refusal(&half).await, ErrorKind::Config, "given together");
        let missing = format!("{url}&cert=/no/such/file&key={}", key.display());
        assert_says(&refusal(&missing).await, ErrorKind::Config, "cert");
    });
}

#[test]
fn a_password_is_read_from_a_file() {
    run(async {
        let server = Redis::with(Setup::new().fast().arg("--requirepass").arg("s3:cr@t/%"));
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a password");
        std::fs::write(&file, "s3:cr@t/%\n").unwrap();
        let path = file.display().to_string().replace(' ', "%20");
        works(&format!("redis://127.0.0.1:{}/0?password_file={path}", server.port())).await;
        works(&format!("redis://default@127.0.0.1:{}/0?password_file={path}", server.port())).await;
        let socket = server.socket().display().to_string();
        works(&format!("redis+unix://{socket}?password_file={path}")).await;
        std::fs::write(&file, "").unwrap();
        let url = format!("redis://127.0.0.1:{}/?password_file={path}", server.port());
        assert_says(&refusal(&url).await, ErrorKind::Config, "the file is empty");
        std::fs::write(&file, "wrong").unwrap();
        assert_says(&refusal(&url).await, ErrorKind::Denied, "password");
    });
}

#[test]
fn changed_password_is_reread_for_the_next_connection() {
    run(async {
        let server = Redis::with(Setup::new().fast());
        let rights = rights();
        let mut user: Vec<&str> = vec!["ACL", "SETUSER", "app", "on", ">old"];
        user.extend(rights.split_whitespace());
        server.command(&user);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "old").unwrap();
        let path = file.path().display();
        let url = format!("redis://app@127.0.0.1:{}/0?password_file={path}", server.port());
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let guard = locks.mutex("app:changed").lock().await.unwrap();
        let lock = other.mutex("app:changed");
        let waiter = tokio::spawn(async move { lock.lock().await });
        until_waiting(&locks, "app:changed", 1).await;
        server.command(&["ACL", "SETUSER", "app", "resetpass", ">new"]);
        server.command(&["CLIENT", "KILL", "USER", "app"]);
        until("the old password is refused", async || match locks.inspect("app:changed").await {
            Err(error) => error.to_string().contains("accepted before"),
            Ok(_) => false,
        })
        .await;
        std::fs::write(file.path(), "new").unwrap();
        until("the new password is used", async || locks.inspect("app:changed").await.is_ok())
            .await;
        release(guard).await;
        release(waiter.await.unwrap().unwrap()).await;
    });
}

/// Collects the messages that a user with access to all channels of leasehold receives.
fn heard_by(spy: &redis::Client) -> Arc<Mutex<Vec<String>>> {
    let published = Arc::<Mutex<Vec<String>>>::default();
    let mut connection = spy.get_connection().unwrap();
    let (recorded, (ready, begun)) = (published.clone(), std::sync::mpsc::channel());
    std::thread::spawn(move || {
        let mut messages = connection.as_pubsub();
        messages.psubscribe("leasehold:*").unwrap();
        ready.send(()).unwrap();
        while let Ok(message) = messages.get_message() {
            recorded.lock().unwrap().push(message.get_payload().unwrap());
        }
    });
    begun.recv().unwrap();
    published
}

/// A notification is accepted if it contains the claim's id, a random number of 128 bits, and its
/// token. Both are in the store. The channels carry them only when the claim already holds.
#[test]
fn publisher_cannot_fake_a_grant_without_reading_the_queue() {
    run(async {
        let server = Redis::with(Setup::new().fast());
        server.command(&[
            "ACL",
            "SETUSER",
            "spy",
            "on",
            ">spy",
            "resetkeys",
            "&leasehold:*",
            "-@all",
            "+publish",
            "+psubscribe",
            "+pubsub",
            "+hello",
            "+client",
            "+get",
        ]);
        let url = format!("redis://spy:spy@127.0.0.1:{}/", server.port());
        let spy = redis::Client::open(url).unwrap();
        let messages = heard_by(&spy);
        let mut attack = spy.get_connection().unwrap();
        let denied = redis::cmd("GET").arg("app").query::<String>(&mut attack).unwrap_err();
        assert!(denied.to_string().contains("NOPERM") || denied.code() == Some("NOPERM"));
        let clients = [connect(&server.url()).await, connect(&server.url()).await];
        let released = Arc::new(AtomicBool::new(true));
        let waits = |client: usize| lock_in_task(&clients[client], "app", &released);
        let mut guard = clients[0].mutex("app").lock().await.unwrap();
        for turn in 1..=4 {
            let waiter = waits(turn % 2);
            until_waiting(&clients[0], "app", 1).await;
            release(guard).await;
            guard = waiter.await.unwrap().0;
        }
        until("the spy has seen the grants", async || messages.lock().unwrap().len() >= 4).await;
        released.store(false, Ordering::SeqCst);
        let waiter = waits(1);
        until_waiting(&clients[0], "app", 1).await;
        let mut published = messages.lock().unwrap().clone();
        for (id, token) in
            messages.lock().unwrap().iter().filter_map(|published| published.split_once(' '))
        {
            let token: u64 = token.parse().unwrap();
            published.extend((1..50).map(|more| format!("{id} {}", token + more)));
        }
        let channels = redis::cmd("PUBSUB").arg("CHANNELS").query(&mut attack);
        let channels: Vec<String> = channels.unwrap();
        assert!(channels.len() >= 2, "{channels:?}");
        let mut publish = |channel: &str, published: &str| {
            let sent = redis::cmd("PUBLISH").arg(channel).arg(published).query::<u64>(&mut attack);
            // The receivers are the spy and a client.
            assert!(sent.unwrap() > 1, "{channel}");
        };
        for channel in &channels {
            published.iter().for_each(|published| publish(channel, published));
        }
        // The next grant follows all these messages on the same channel.
        released.store(true, Ordering::SeqCst);
        release(guard).await;
        let (guard, was_released) = waiter.await.unwrap();
        assert!(was_released, "a forged message caused a grant");
        released.store(false, Ordering::SeqCst);
        let waiter = waits(0);
        until_waiting(&clients[1], "app", 1).await;
        // A publisher that can read the queue knows both, and is trusted until the first renewal.
        let queue = server.command(&["ZRANGE", "leasehold:w:app", "0", "-1", "WITHSCORES"]);
        let lines: Vec<&str> = queue.lines().collect();
        let words: Vec<&str> = lines[0].split(' ').collect();
        publish(words[2], &format!("{} {}", words[0], lines[1]));
        let (faked, was_released) = waiter.await.unwrap();
        assert!(!was_released && guard.is_held());
        faked.lost().await;
        assert!(guard.is_held());
        release(guard).await;
    });
}

#[test]
fn client_connects_over_a_unix_socket() {
    run(async {
        let server = Redis::with(Setup::new().fast().arg("--requirepass").arg("s3cret"));
        let path = server.socket().display().to_string();
        works(&format!("redis+unix://{path}?db=2&password=s3cret")).await;
        assert_says(
            &refusal("redis+unix:///no/such/socket").await,
            ErrorKind::Unreachable,
            "cannot reach",
        );
    });
}

#[test]
fn unusable_servers_are_refused_with_the_fix() {
    run(async {
        let server = fast();
        let replica = Redis::replica_of(server.port(), Setup::new().fast());
        assert_says(&refusal(&replica.url()).await, ErrorKind::Denied, "replica");
        let url = format!("{}99", server.url());
        assert_says(&refusal(&url).await, ErrorKind::Config, "does not have the database");
        let port = server.port();
        let url = format!("redis+cluster://127.0.0.1:{port}/");
        assert_says(&refusal(&url).await, ErrorKind::Config, "redis://");
        let url = format!("redis+sentinel://127.0.0.1:{port}/mymaster");
        assert_eq!(refusal_of_sentinels(&url).await.kind(), ErrorKind::Unsupported);
        let node = testbed::cluster().nodes()[0].url();
        assert_says(&refusal(&node).await, ErrorKind::Config, "redis+cluster://");
        let set = testbed::sentinel();
        let sentinel = format!("redis://127.0.0.1:{}/", set.sentinel_ports()[0]);
        assert_says(&refusal(&sentinel).await, ErrorKind::Config, "redis+sentinel://");
        let no_info = with_user(&rights().replace("+info", ""));
        no_info.command(&["REPLICAOF", "127.0.0.1", &port.to_string()]);
        // If a replica hides its role from this user, the first lock detects it.
        let hides = format!("redis://lh:s3cret@127.0.0.1:{}/?prefix=app:", no_info.port());
        assert_says(&refusal(&hides).await, ErrorKind::Denied, "replica");
        let other = set.url().replace("mymaster", "another");
        let refused = refusal_of_sentinels(&other).await;
        assert_says(&refused, ErrorKind::Config, "do not know the master \"another\"");
        let nobody = format!("redis://127.0.0.1:{}/", unused_port());
        assert_says(&refusal(&nobody).await, ErrorKind::Unreachable, "check that it is running");
        assert_says(
            &refusal("redis://no.such.host.invalid/").await,
            ErrorKind::Unreachable,
            "host",
        );
    });
}

fn without(command: &str) -> Redis {
    Redis::with(Setup::new().fast().arg("--rename-command").arg(command).arg(""))
}

// F64
#[test]
fn disabled_command_is_named() {
    run(async {
        for command in ["EVALSHA", "SUBSCRIBE"] {
            let server = without(command);
            let refused = match leasehold::connect(&server.url()).await {
                Err(error) => error,
                Ok(locks) => locks.mutex("x").try_lock().await.unwrap_err(),
            };
            assert_told(&refused, ErrorKind::Unsupported, "secret");
            let text = refused.to_string();
            assert!(text.contains(command) && text.contains("rename-command"), "{text}");
            assert!(!text.contains("upgrade"), "{text}");
        }
        // INFO determines the guarantees, but locks work without it.
        let server = without("INFO");
        let locks = connect(&server.url()).await;
        assert!(locks.guarantees().notes.join("\n").contains("INFO"));
        release(locks.mutex("x").lock().await.unwrap()).await;
        assert!(locks.diagnose().await.is_ok());
    });
}

// F46
#[test]
fn guarantees_match_the_persistence_settings() {
    run(async {
        let server = Redis::start();
        let grade = async || connect(&server.url()).await.guarantees().clone();
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Disk, Durability::Disk));
        assert!(found.meets(Guarantee::ExclusiveOnStoreCrash));
        // The append-only file is not synced while it is rewritten.
        server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "yes"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Machine, Durability::Machine));
        let ids: Vec<_> = connect(&server.url()).await.diagnose().await.unwrap();
        assert!(ids.iter().any(|f| f.id == "no-appendfsync-on-rewrite"), "{ids:?}");
        server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "no"]);
        server.command(&["CONFIG", "SET", "appendfsync", "everysec"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Machine, Durability::Machine));
        // kill -9 loses nothing that was written, synced or not. But the machine may crash together
        // with the server.
        assert!(!found.meets(Guarantee::ExclusiveOnStoreCrash));
        server.command(&["CONFIG", "SET", "appendonly", "no"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Process, Durability::Process));
        server.command(&["CONFIG", "SET", "appendonly", "yes"]);
        server.command(&["CONFIG", "SET", "appendfsync", "always"]);
        server.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
        for policy in ["allkeys-lru", "volatile-ttl"] {
            server.command(&["CONFIG", "SET", "maxmemory-policy", policy]);
            for wanted in [
                Guarantee::ExclusiveOnStoreCrash,
                Guarantee::ExclusiveOnFailover,
                Guarantee::ExclusiveOnClockStep,
                Guarantee::GrantDurability(Durability::Machine),
            ] {
                let error = leasehold::builder().require(wanted).connect(server.url()).await;
                let error = error
                    .map(drop)
                    .expect_err("the guarantee was accepted, although the server may evict locks");
                assert_told(&error, ErrorKind::Unsupported, "secret");
            }
        }
    });
}

// F81
#[tokio::test]
async fn doctor_recommends_restart_delay_and_recognizes_it() {
    let server = fast();
    for (url, severity) in [
        (server.url(), Severity::Broken),
        (format!("{}?restart_delay_ms=60000", server.url()), Severity::Weak),
    ] {
        let found = connect(&url).await.diagnose().await.unwrap();
        let found = found.iter().find(|finding| finding.id == "persistence").expect("found");
        assert_eq!(found.severity, severity, "{found:?}");
        let text = format!("{} {}", found.why, found.fix);
        assert!(text.contains("restart_delay_ms"), "{text}");
    }
}

#[test]
fn redis_connects_to_the_address_that_responds() {
    in_own_network("redis_access::redis_connects_to_the_address_that_responds", || {
        run(async {
            let server = Redis::with(Setup::new().fast());
            drop_ipv6();
            works(&server.url().replace("127.0.0.1", TWO_ADDRESSES)).await;
        });
    });
}
