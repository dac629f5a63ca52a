//! Masters that are killed, paused or demoted, with sentinels and in a cluster: the effects on
//! waiters and holders, and which server is trusted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::store::{Claim, Guarantee, Renew, Renewal};
use leasehold::{Client, ErrorKind, LostReason, Released};
use leasehold_test_support::*;
use testbed::{Cluster, Sentinel, Setup};

/// Counts under a lock while something is broken, until that ends. After a fail-over two clients
/// may hold until a lease expires. Only the tokens keep order, so they are checked.
async fn tokens_rise_while(
    clients: &[Client],
    name: &str,
    breaking: impl FnOnce() + Send + 'static,
) {
    let breaking = tokio::task::spawn_blocking(breaking);
    let mut last = 0;
    let mut rounds = 0;
    loop {
        for client in clients {
            let guard = client.mutex(name).lease(LEASE).lock().await;
            let guard = match guard {
                Ok(guard) => guard,
                // The servers took longer than a caller waits, and the error is correct.
                Err(error) if error.kind() == ErrorKind::Unreachable => continue,
                Err(error) => panic!("{error}"),
            };
            assert!(guard.token().get() > last, "token {} after {last}", guard.token());
            last = guard.token().get();
            rounds += 1;
            match guard.release().await {
                Ok(_) => {}
                // The grant was lost with the old master, and the release reports it.
                Err(error) if error.kind() == ErrorKind::Lost => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
            }
        }
        // On a slow machine it may end before anything was tried.
        if breaking.is_finished() && rounds > clients.len() {
            break;
        }
    }
    breaking.await.expect("the task that breaks the servers panicked");
}

// R42, S25
#[test]
fn sentinel_locks_survive_the_fail_over_from_a_killed_master() {
    run(async {
        let set = Arc::new(Sentinel::start());
        let url = set.url();
        let clients = [connect(&url).await, connect(&url).await];
        let guarantees = clients[0].guarantees();
        assert!(!guarantees.meets(Guarantee::ExclusiveOnFailover));
        let error = leasehold::builder().require(Guarantee::ExclusiveOnFailover);
        let error = error.connect(set.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let breaking = set.clone();
        tokens_rise_while(&clients, "counted", move || {
            std::thread::sleep(Duration::from_millis(200));
            breaking.servers()[0].kill();
            breaking.servers()[1].wait_for_master();
        })
        .await;
        assert_eq!(set.servers()[1].info("replication", "role"), "master");
        // One of the sentinels may be down.
        set.kill_sentinel(0);
        let third = connect(&url).await;
        hammer(&[clients, [third.clone(), third]].concat(), "after", 2, 10).await;
    });
}

/// The passwords for the servers and for the sentinels change before the fail-over, and each
/// sentinel closes its connections.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn changed_passwords_are_used_after_a_failover() {
    run(async {
        let set = Arc::new(Sentinel::start());
        let sentinels: Vec<_> = set
            .sentinel_ports()
            .into_iter()
            .map(|port| redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap())
            .collect();
        let set_password = |password: &str| {
            let user = ["SETUSER", "app", "on", "resetpass", password, "~*", "&*", "+@all"];
            for server in set.servers() {
                server.command(&[&["ACL"], &user[..]].concat());
            }
            for sentinel in &sentinels {
                let mut connection = sentinel.get_connection().unwrap();
                redis::cmd("ACL").arg(&user).exec(&mut connection).unwrap();
            }
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display();
        set_password(">old");
        std::fs::write(file.path(), "old").unwrap();
        let url = format!(
            "{}?password_file={path}&sentinel_user=app&sentinel_password_file={path}",
            set.url().replace("://", "://app@")
        );
        let clients = [connect(&url).await, connect(&url).await];
        hammer(&clients, "before", 1, 2).await;
        set_password(">new");
        std::fs::write(file.path(), "new").unwrap();
        for sentinel in &sentinels {
            let mut connection = sentinel.get_connection().unwrap();
            redis::cmd("CLIENT").arg(&["KILL", "USER", "app"]).exec(&mut connection).unwrap();
        }
        let breaking = set.clone();
        tokens_rise_while(&clients, "counted", move || {
            breaking.servers()[0].kill();
            breaking.servers()[1].wait_for_master();
        })
        .await;
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn cluster_locks_survive_the_fail_over_from_a_killed_master() {
    run(async {
        // Otherwise all nodes refuse all requests until the replica is promoted.
        let setup = Setup::new().fast().arg("--cluster-require-full-coverage").arg("no");
        let cluster = Arc::new(Cluster::with(3, 1, setup));
        let clients = [connect(&cluster.url()).await, connect(&cluster.url()).await];
        // One name is in the first third of the slots, on the node that is killed. The other one is
        // on another node.
        let (dying, living) = ("b", "a");
        let lease = Duration::from_secs(6);
        let steady = clients[0].mutex(living).lease(lease).lock().await.unwrap();
        let begun = Instant::now();
        let breaking = cluster.clone();
        tokens_rise_while(&clients, dying, move || {
            std::thread::sleep(Duration::from_millis(200));
            breaking.nodes()[0].kill();
            breaking.wait_for_failover(0);
        })
        .await;
        // However quick that was, every lock that is still held has been renewed.
        tokio::time::sleep((lease * 3 / 2).saturating_sub(begun.elapsed())).await;
        assert!(steady.is_held(), "the crash of one node cost a lease on another node");
        release(steady).await;
        hammer(&clients, dying, 4, 10).await;
    });
}

/// Connects during a fail-over. Connecting waits for it, but not forever. So a few attempts take
/// longer than the fail-over, however slow the machine is. Without that wait even many would not.
async fn connect_in_mid_failover(url: &str) -> Client {
    for _ in 0..20 {
        match leasehold::connect(url).await {
            Ok(locks) => return locks,
            Err(error) => assert_told(&error, ErrorKind::Unreachable, "secret"),
        }
    }
    panic!("the client did not wait for the fail-over");
}

// S25
#[test]
fn connecting_client_waits_for_the_end_of_a_failover() {
    run(async {
        let set = Sentinel::start();
        set.servers()[0].kill();
        // The sentinels still name the master, which is gone.
        let locks = connect_in_mid_failover(&set.url()).await;
        let lease = Duration::from_secs(60);
        release(locks.mutex("early").lease(lease).lock().await.unwrap()).await;
        let cluster = Cluster::with(3, 1, Setup::new().fast());
        cluster.nodes()[0].kill();
        let locks = connect_in_mid_failover(&cluster.url()).await;
        release(locks.mutex("b").lease(lease).lock().await.unwrap()).await;
        // If no sentinel responds, the error is returned immediately.
        let url = format!("redis+sentinel://127.0.0.1:{}/mymaster", unused_port());
        let begun = Instant::now();
        assert_told(&leasehold::connect(&url).await.unwrap_err(), ErrorKind::Unreachable, "secret");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    });
}

// S25
#[test]
#[ignore = "runs with ./test.sh --all"]
fn waiter_survives_the_fail_over_from_a_paused_master() {
    run(async {
        let set = Sentinel::start();
        let url = set.url();
        let (holder, waiting) = (connect(&url).await, connect(&url).await);
        let lease = Duration::from_secs(45);
        let guard = holder.mutex("held").lease(lease).lock().await.unwrap();
        let waiter = tokio::spawn(async move { waiting.mutex("held").lock().await });
        let end = Instant::now() + PATIENCE;
        // The replica has both the grant and the waiter's place.
        while set.servers()[1].command(&["EXISTS", "held", "leasehold:w:held"]) != "2" {
            assert!(Instant::now() < end, "the replica never received the lock");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let old = set.servers()[0].port();
        set.servers()[0].stop();
        set.wait_for_failover(old);
        // The master never replies. Clients that sent it requests must find the new master on their
        // own and renew there.
        let left = || set.servers()[1].command(&["PTTL", "held"]).parse::<u64>().unwrap();
        let mut before = left();
        while left() <= before {
            before = left();
            assert!(guard.is_held(), "the hold was lost, although the new master has it");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let first = guard.token();
        release(guard).await;
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.token() > first);
        release(next).await;
        set.servers()[0].cont();
    });
}

// F14
/// Redis 7 demotes a master on request. The name leads to another server, or to this one again.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn waiter_waits_for_the_end_of_a_demotion() {
    run(async {
        let (server, other) = (fast(), fast());
        let locks = connect(&server.url()).await;
        let held = locks.mutex("demoted").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = locks.mutex("demoted").lease(PATIENCE);
            async move { mutex.lock().await }
        });
        until_waiting(&locks, "demoted", 1).await;
        server.command(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        until("the replica is connected", async || {
            server.info("replication", "master_link_status") == "up"
        })
        .await;
        let lease = Duration::from_secs(3);
        let error = locks.mutex("tried").lease(lease).try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unreachable, "secret");
        assert!(format!("{error:#}").contains("replica"), "{error}");
        // The lock was released meanwhile, so the release is pending until there is a master again.
        match held.release().await {
            Ok(released) => assert_eq!(released, Released::Pending),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Lost, "{error}"),
        }
        server.command(&["REPLICAOF", "NO", "ONE"]);
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        release(guard.unwrap_or_else(|error| panic!("{error}"))).await;
    });
}

/// A server that is up immediately has the address of one that is gone.
#[test]
fn another_server_at_a_known_address_grants_nothing() {
    run(async {
        let (ours, theirs) = (fast(), fast());
        // Its id is older than the last reply that this client got from its own server.
        release(connect(&theirs.url()).await.mutex("job").lock().await.unwrap()).await;
        let locks = connect(&ours.url()).await;
        let held = locks.mutex("job").lock().await.unwrap();
        ours.kill();
        theirs.listen_at(ours.port());
        let refused = locks.mutex("other").lease(PATIENCE).try_lock().await.unwrap_err();
        assert_told(&refused, ErrorKind::Unreachable, "secret");
        let text = format!("{refused:#}");
        assert!(text.contains("leads to another Redis server"), "{text}");
        assert_eq!(theirs.command(&["EXISTS", "other"]), "0");
        theirs.listen_at(theirs.port());
        ours.restart();
        drop(held);
        release(locks.mutex("other").lock().await.unwrap()).await;
    });
}

/// A server that lost its data is not taken for another server.
#[test]
fn server_that_lost_its_data_is_not_mistaken_for_another() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        release(locks.mutex("job").lock().await.unwrap()).await;
        server.command(&["FLUSHALL"]);
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        release(locks.mutex("job").lock().await.unwrap()).await;
        let id = server.command(&["GET", "leasehold:store"]);
        for _ in 0..2 {
            server.restart_empty();
            release(locks.mutex("job").lock().await.unwrap()).await;
            assert_eq!(server.command(&["GET", "leasehold:store"]), id);
        }
        // Another client is the first to connect to it.
        server.restart_empty();
        release(connect(&server.url()).await.mutex("job").lock().await.unwrap()).await;
        release(locks.mutex("job").lock().await.unwrap()).await;
    });
}

/// Returns whether a master was available to renew the claim, and has it.
async fn renewed(locks: &Client, claim: &Claim) -> bool {
    let renewal = Renew { claim: claim.clone(), lease: claim.lease };
    let answers = locks.store().renew(&[renewal]).await;
    answers.is_ok_and(|answers| matches!(answers[..], [Renewal::Holding { .. }]))
}

// F49
/// A waiter that joined before the master was killed is notified of its grant by the promoted
/// replica.
#[test]
fn waiter_from_before_a_cluster_failover_is_notified_of_its_grant() {
    run(async {
        let setup = Setup::new().fast().arg("--cluster-require-full-coverage").arg("no");
        let cluster = Cluster::with(3, 1, setup);
        let locks = connect(&cluster.url()).await;
        let (holder, waiter) = (mutex("b"), mutex("b"));
        hold(&locks, &holder).await;
        wait(&locks, &waiter).await;
        // The four keys are the main key, the clock and the two sets of the queue.
        until("the replica has all keys", async || cluster.nodes()[3].command(&["DBSIZE"]) == "4")
            .await;
        cluster.nodes()[0].kill();
        cluster.wait_for_failover(0);
        let end = Instant::now() + PATIENCE;
        while !renewed(&locks, &holder).await {
            assert!(Instant::now() < end, "the client never found the new master");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let hearing = tokio::spawn({
            let (locks, waiter) = (locks.clone(), waiter.clone());
            async move { wait_for_grant(&locks, &waiter).await }
        });
        assert!(locks.store().leave(&holder, None).await.unwrap());
        let signal = tokio::time::timeout(PATIENCE / 2, hearing).await;
        signal.expect("no notification arrived").unwrap();
    });
}

/// Makes the sentinels promote the replica although the master works.
async fn fail_over(set: &Sentinel) {
    let [old, new] = [&set.servers()[0], &set.servers()[1]];
    let ports: Vec<String> = set.sentinel_ports().iter().map(u16::to_string).collect();
    let ask_of = |port: &str, words: &[&str]| {
        let mut cli = std::process::Command::new("redis-cli");
        let output = cli.args(["-p", port, "SENTINEL"]).args(words).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // This is the default. Otherwise the other sentinels demote the new master before the promoting
    // one has seen it.
    for port in &ports {
        ask_of(port, &["DEBUG", "publish-period", "2000"]);
    }
    let ask = |words: &[&str]| ask_of(&ports[0], words);
    let named = |port: u16| {
        ask(&["GET-MASTER-ADDR-BY-NAME", "mymaster"]).lines().nth(1) == Some(&port.to_string())
    };
    let end = Instant::now() + PATIENCE;
    // A fail-over that takes longer than two seconds is abandoned, and then requested again.
    while !named(new.port()) {
        assert!(Instant::now() < end, "the fail-over never happened");
        ask(&["FAILOVER", "mymaster"]);
        let pause = Instant::now() + Duration::from_secs(5);
        while !named(new.port()) && Instant::now() < pause {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    set.wait_for_failover(old.port());
}

// F49
/// A refused request was not executed. The release on the new master is therefore the first one
/// that is executed.
#[test]
fn release_refused_by_the_old_master_still_reports_a_loss() {
    run(async {
        let set = Sentinel::unbroken();
        let locks = connect(&set.url()).await;
        let holder = mutex("lost");
        hold(&locks, &holder).await;
        fail_over(&set).await;
        until("the old master is a replica", async || set.servers()[0].is_replica()).await;
        set.servers()[1].command(&["DEL", "lost"]);
        let end = Instant::now() + PATIENCE;
        let left = loop {
            match locks.store().leave(&holder, None).await {
                Ok(left) => break left,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
        };
        assert!(!left, "the release of a lost hold reports success");
    });
}

// F59
/// A master that cannot be demoted continues to run. Only the sentinels know that it is not the
/// master any more.
#[test]
fn sentinels_take_precedence_over_a_still_running_old_master() {
    run(async {
        let set = Sentinel::unbroken();
        let [old, new] = [&set.servers()[0], &set.servers()[1]];
        let locks = connect(&set.url()).await;
        let guard = locks.mutex("kept").lease(Duration::from_secs(6)).lock().await.unwrap();
        until("the replica has the lock", async || new.command(&["EXISTS", "kept"]) == "1").await;
        old.command(&["ACL", "SETUSER", "default", "-replicaof", "-slaveof"]);
        fail_over(&set).await;
        // The key is deleted as if it had been granted too late to be replicated.
        new.command(&["DEL", "kept"]);
        let lost = tokio::time::timeout(PATIENCE, guard.lost()).await;
        assert_eq!(lost.expect("the old master still renews the lock"), LostReason::Gone);
        assert_eq!(old.info("replication", "role"), "master");
        let next = locks.mutex("kept").lock().await.unwrap();
        assert!(new.command(&["EXISTS", "kept"]) == "1" && next.token() > guard.token());
        release(next).await;
    });
}
