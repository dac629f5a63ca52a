//! Who is let in, and what is refused: users, passwords and rights, TLS, servers that cannot be used,
//! commands that are disabled; and how the server's settings are graded.

use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee, Wakeup};
use leasehold::{Error, ErrorKind};
use leasehold_test_support::*;
use testbed::{Redis, Setup};

const PAGE: &str = include_str!("../../../../docs/stores/redis.md");

/// The rights of the user that docs/stores/redis.md makes, whose locks begin with `app:`.
fn rights() -> String {
    let (_, line) = PAGE.split_once("ACL SETUSER app on >secret ").expect("the line in the docs");
    let (line, _) = line.split_once("```").expect("its end");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What the page says beside that line, where it does.
fn and(more: &str) -> String {
    assert!(PAGE.contains(&format!("`{more}`")), "{more} is not in the docs");
    format!("{} {more}", rights())
}

/// What a client is told that is not let in: by connecting, or at the latest by its first lock.
async fn refusal(url: &str) -> Error {
    match leasehold::connect(url).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex("refused").try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was given on {}", locks.url()),
        },
    }
}

/// The same of sentinels, which must answer soon: on a busy machine they are asked again.
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
    let locks = connect_patiently(url).await;
    let (other, name) = (connect_patiently(url).await, "works");
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

fn with_user(rights: &str) -> Redis {
    let server = fast();
    add_user(&server, rights);
    server
}

fn add_user(server: &Redis, rights: &str) {
    let rule = format!("ACL SETUSER lh reset on >s3cret {rights}");
    server.command(&rule.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>());
}

/// Every deployment, with no right that the page does not list.
#[test]
fn the_rights_in_the_documentation_are_enough() {
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
        // And the right that only this needs is told of.
        let master = with_user(&rights());
        let url = user(format!("redis://127.0.0.1:{}/?prefix=app:&replicas=1", master.port()));
        assert_says(&refusal(&url).await, ErrorKind::Denied, "+wait");
    });
}

#[test]
fn s94_a_wrong_password() {
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
fn rights_that_are_missing_are_named() {
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
        // Only what is nice to know; locks work without it.
        let server = with_user(&rights().replace("+info", ""));
        works(&format!("redis://lh:s3cret@127.0.0.1:{}/?prefix=app:", server.port())).await;
        // Nobody is told what changes in queues, and nobody says so.
        for (rights, followed) in
            [(rights(), Wakeup::Push), (rights().replace("+client", ""), Wakeup::Poll)]
        {
            let server = with_user(&rights);
            let url = format!("redis://lh:s3cret@127.0.0.1:{}/?prefix=app:", server.port());
            works(&url).await;
            let locks = connect_patiently(&url).await;
            let promised = locks.guarantees();
            assert_eq!((promised.followed, promised.evicted), (followed, Wakeup::Push));
        }
    });
}

/// Others' keys are no reason for an error that lists the rights that one has.
#[test]
fn f63_a_user_lists_its_own_locks_beside_those_of_others() {
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
        // Asked for by name, it is said which right is missing.
        assert_says(&user.read("private").await.unwrap_err(), ErrorKind::Denied, "~lock-names*");
        // With a right too few the list is no list.
        add_user(&server, &rights().replace("+zrevrange", "").replace("+zrange ", ""));
        waiter.abort();
        let reader = connect(&format!("redis://lh:s3cret@127.0.0.1:{}/", server.port())).await;
        let permit_of_ours = all.semaphore("app:permits", 2).acquire().await.unwrap();
        assert!(reader.list("").await.is_err());
        for guard in [theirs, permit, ours, permit_of_ours] {
            release(guard).await;
        }
    });
}

#[test]
fn tls_is_verified() {
    run(async {
        let server = Redis::with(Setup::new().fast().tls());
        let authority = server.certificates().authority().display().to_string();
        works(&format!("{}?tls_ca={authority}", server.url())).await;
        // Nobody we trust has signed it.
        assert_says(&refusal(&server.url()).await, ErrorKind::Unreachable, "TLS");
        let plain = server.url().replace("rediss://", "redis://");
        assert_eq!(refusal(&plain).await.kind(), ErrorKind::Unreachable);
        let missing = format!("{}?tls_ca=/no/such/file", server.url());
        assert_says(&refusal(&missing).await, ErrorKind::Config, "tls_ca");
    });
}

/// As Redis with TLS does by default.
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
fn a_unix_socket() {
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
fn servers_that_cannot_be_used() {
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
        // A replica that does not tell this user so at once: by the first lock.
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

#[test]
fn f64_a_command_that_was_disabled_is_named() {
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
        // INFO tells what is promised, and locks work without it.
        let server = without("INFO");
        let locks = connect(&server.url()).await;
        assert!(locks.guarantees().notes.join("\n").contains("INFO"));
        release(locks.mutex("x").lock().await.unwrap()).await;
        assert!(locks.diagnose().await.is_ok());
    });
}

#[test]
fn f46_the_grade_is_what_the_settings_keep() {
    run(async {
        let server = Redis::start();
        let grade = async || connect(&server.url()).await.guarantees().clone();
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Disk, Durability::Disk));
        assert!(found.meets(Guarantee::ExclusiveOnStoreCrash));
        // Not synced while the file is written anew.
        server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "yes"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Machine, Durability::Machine));
        let ids: Vec<_> = connect(&server.url()).await.diagnose().await.unwrap();
        assert!(ids.iter().any(|f| f.id == "no-appendfsync-on-rewrite"), "{ids:?}");
        server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "no"]);
        server.command(&["CONFIG", "SET", "appendfsync", "everysec"]);
        let found = grade().await;
        assert_eq!((found.grant, found.token), (Durability::Machine, Durability::Machine));
        // kill -9 loses nothing that was written, synced or not; but the machine may go down with it.
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
                let error = error.map(drop).expect_err("locks may be thrown away");
                assert_told(&error, ErrorKind::Unsupported, "secret");
            }
        }
    });
}

#[tokio::test]
async fn f81_the_doctor_advises_the_delay_and_knows_it() {
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
