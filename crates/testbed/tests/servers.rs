//! The servers start, break and recover on command, and leave nothing behind.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use testbed::{Etcd, MariaDb, Memcached, Nats, NatsCluster, PgBouncer, Postgres, Proxy, Setup};

/// Time limit that is longer than anything here takes. It is only reached if a test fails.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn postgres_keeps_what_it_acknowledged_when_killed() {
    let server = Postgres::start();
    server.admin("postgres", "CREATE TABLE kept (n int)");
    server.admin("postgres", "INSERT INTO kept VALUES (7)");
    let (pid, port) = (server.pid(), server.port());
    server.kill();
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
    server.restart();
    assert_eq!(server.admin("postgres", "SELECT n FROM kept"), "7");
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    assert!(server.log().contains("database system was not properly shut down"));
}

#[test]
fn memcached_forgets_all_when_killed() {
    let server = Memcached::start();
    assert_eq!(server.say("set a 0 0 1\r\n7"), ["STORED"]);
    assert_eq!(server.say("get a"), ["VALUE a 0 1", "7", "END"]);
    assert_eq!(server.figure("curr_items"), 1);
    let (pid, port) = (server.pid(), server.port());
    server.kill();
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
    server.restart();
    assert_eq!(server.say("get a"), ["END"]);
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
}

const STREAM: &str = r#"{"name":"S","subjects":["s"],"storage":"file","num_replicas":N}"#;

#[test]
fn killed_nats_keeps_acknowledged_messages() {
    let server = Nats::start();
    assert!(server.ask("$JS.API.STREAM.CREATE.S", &STREAM.replace('N', "1")).contains("created"));
    assert_eq!(server.ask("s", "7"), r#"{"stream":"S","seq":1}"#);
    let (pid, port) = (server.pid(), server.port());
    server.kill();
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
    server.restart();
    assert_eq!(server.ask("s", "8"), r#"{"stream":"S","seq":2}"#);
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    let without = Nats::without_jetstream();
    assert!(
        without.ask("$JS.API.INFO", "").starts_with("NATS/1.0 503"),
        "a server without JetStream replied"
    );
}

#[test]
fn nats_elects_another_leader() {
    let cluster = NatsCluster::start();
    let first = cluster.ask(0, "$JS.API.STREAM.CREATE.S", &STREAM.replace('N', "3"));
    assert!(first.contains("created"), "{first}");
    let leader = cluster.leader("S");
    cluster.kill(leader);
    let next = cluster.leader("S");
    assert_ne!(next, leader);
    cluster.restart(leader);
    assert!(cluster.ask(leader, "s", "7").contains(r#""seq":1"#));
}

#[test]
fn mariadb_keeps_what_it_acknowledged_when_killed() {
    let server = MariaDb::start();
    server.admin("CREATE DATABASE testk; CREATE TABLE testk.kept (n int) ENGINE=InnoDB");
    server.admin("INSERT INTO testk.kept VALUES (7)");
    let port = server.port();
    server.kill();
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
    server.restart();
    assert_eq!(server.admin("SELECT n FROM testk.kept"), "7");
}

/// Runs a query in a thread, and notifies the receiver when it is answered.
fn ask(query: impl FnOnce() + Send + 'static) -> mpsc::Receiver<()> {
    let (answered, answer) = mpsc::channel();
    std::thread::spawn(move || {
        query();
        // The receiver may be gone.
        let _ = answered.send(());
    });
    answer
}

#[test]
fn paused_server_answers_after_it_resumes() {
    let (postgres, mariadb) = (Postgres::start(), MariaDb::start());
    let (postgres, mariadb): (&'static _, &'static _) =
        (Box::leak(Box::new(postgres)), Box::leak(Box::new(mariadb)));
    postgres.stop();
    mariadb.stop();
    let answers = [
        ask(|| drop(postgres.admin("postgres", "SELECT 1"))),
        ask(|| drop(mariadb.admin("SELECT 1"))),
    ];
    for answer in &answers {
        answer.recv_timeout(Duration::from_millis(300)).expect_err("a stopped server replied");
    }
    postgres.cont();
    mariadb.cont();
    for answer in &answers {
        answer.recv_timeout(LONG).expect("the resumed server does not reply");
    }
}

#[test]
fn wall_clock_of_a_running_server_can_be_shifted() {
    let near = |text: &str, expected: i64| {
        let text: f64 = text.parse().expect("seconds");
        assert!((text - expected as f64).abs() < 60.0, "{text}, not {expected}");
    };
    let now = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.expect("after 1970").as_secs().cast_signed()
    };
    let postgres = Postgres::with(Setup::new().fast().movable_clock());
    let mariadb = MariaDb::with(Setup::new().fast().movable_clock());
    for shift in [0, 86_400, -3_600] {
        postgres.shift_clock(shift);
        mariadb.shift_clock(shift);
        let text = postgres.admin("postgres", "SELECT extract(epoch FROM clock_timestamp())");
        near(&text, now() + shift);
        near(&mariadb.admin("SELECT UNIX_TIMESTAMP(SYSDATE(6))"), now() + shift);
    }
}

#[test]
fn databases_are_owned_by_a_user_without_other_rights() {
    let psql = |url: &str, sql: &str| {
        let output = Command::new("psql").args(["-X", "-q", "-A", "-t", url, "-c", sql]).output();
        let output = output.expect("psql is installed");
        output.status.success()
    };
    let url = testbed::postgres().database();
    assert_ne!(url, testbed::postgres().database());
    assert!(psql(&url, "CREATE TABLE t (n int)"));
    assert!(!psql(&url, "CREATE ROLE other"));
    assert!(!psql(&url.replace("lh:lh@", "lh:wrong@"), "SELECT 1"));

    let url = testbed::mariadb().database();
    let database = url.rsplit('/').next().expect("a database");
    let mariadb = |password: &str, sql: &str| {
        let mut client = Command::new("mariadb");
        client.args(["--no-defaults", "-h127.0.0.1", "-ulh", "-D", database, "-e", sql]);
        client.arg(format!("-P{}", testbed::mariadb().port())).env("MYSQL_PWD", password);
        client.stderr(Stdio::null()).status().expect("mariadb is installed").success()
    };
    assert!(mariadb("lh", "CREATE TABLE t (n int)"));
    assert!(!mariadb("lh", "CREATE DATABASE elsewhere"));
    assert!(!mariadb("wrong", "SELECT 1"));
}

#[test]
fn servers_use_tls_certificates_of_the_test_authority() {
    let server = Postgres::with(Setup::new().fast().tls());
    let authority = server.certificates().authority().display().to_string();
    let url = server.database();
    let url = format!("{url}?sslmode=verify-full&sslrootcert={authority}");
    let question = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let output = Command::new("psql").args(["-X", "-A", "-t", &url, "-c", question]).output();
    let output = output.expect("psql is installed");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "t\n", "{output:?}");

    let server = MariaDb::with(Setup::new().fast().tls());
    let mut client = Command::new("mariadb");
    client.args(["--no-defaults", "-h127.0.0.1", "-ulh", "--ssl-verify-server-cert", "-N", "-B"]);
    client.arg(format!("--ssl-ca={}", server.certificates().authority().display()));
    client.arg(format!("-P{}", server.port())).env("MYSQL_PWD", "lh");
    let output = client.args(["-e", "SHOW STATUS LIKE 'Ssl_version'"]).output();
    let output = output.expect("mariadb is installed");
    assert!(String::from_utf8_lossy(&output.stdout).contains("TLSv1"), "{output:?}");
}

#[test]
fn pooler_forwards_queries_to_the_server() {
    let server = testbed::postgres();
    let pooler = PgBouncer::before(server);
    let url = pooler.in_front_of(server, &server.database());
    let output = Command::new("psql").args(["-X", "-A", "-t", &url, "-c", "SELECT 1"]).output();
    let output = output.expect("psql is installed");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n", "{output:?}\n{}", pooler.log());
}

/// Starts an echo server for single bytes, behind a proxy.
fn echo() -> (Proxy, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            std::thread::spawn(move || {
                let mut copy = stream.try_clone().expect("a descriptor");
                // This ends when the client does.
                let _ = std::io::copy(&mut stream, &mut copy);
            });
        }
    });
    let proxy = Proxy::before(port);
    let client = std::net::TcpStream::connect(("127.0.0.1", proxy.port()))
        .expect("the proxy does not listen");
    client.set_read_timeout(Some(LONG)).expect("the timeout is zero");
    (proxy, client)
}

fn send(mut client: &std::net::TcpStream, byte: u8) {
    std::io::Write::write_all(&mut client, &[byte]).expect("connected");
}

fn receive(mut client: &std::net::TcpStream) -> std::io::Result<u8> {
    let mut byte = [0];
    std::io::Read::read_exact(&mut client, &mut byte).map(|()| byte[0])
}

#[test]
fn the_proxy_counts_round_trips() {
    let (proxy, client) = echo();
    for n in 1..=5 {
        send(&client, n);
        assert_eq!(receive(&client).expect("no echo arrived"), n);
        assert_eq!(proxy.round_trips(), usize::from(n));
    }
}

#[test]
fn the_proxy_holds_delays_and_drops() {
    let (proxy, client) = echo();
    let short = Some(Duration::from_millis(100));
    for freeze in [Proxy::freeze as fn(&Proxy), Proxy::hold_replies] {
        freeze(&proxy);
        send(&client, 1);
        client.set_read_timeout(short).expect("the timeout is zero");
        assert!(receive(&client).is_err(), "a frozen proxy passed data");
        client.set_read_timeout(Some(LONG)).expect("the timeout is zero");
        proxy.thaw();
        assert_eq!(receive(&client).expect("the proxy lost data"), 1);
    }
    proxy.delay(Duration::from_millis(40));
    let before = Instant::now();
    send(&client, 2);
    assert_eq!(receive(&client).expect("no echo arrived"), 2);
    assert!(
        before.elapsed() >= Duration::from_millis(80),
        "the delay is not applied in both directions"
    );
    proxy.delay(Duration::ZERO);
    proxy.drop_replies_after(1);
    send(&client, 3);
    assert_eq!(receive(&client).expect("no echo arrived"), 3);
    assert!(!proxy.has_dropped());
    send(&client, 3);
    let end = Instant::now() + LONG;
    while !proxy.has_dropped() {
        assert!(Instant::now() < end, "the reply was not dropped");
        std::thread::sleep(Duration::from_millis(1));
    }
    client.set_read_timeout(short).expect("the timeout is zero");
    assert!(receive(&client).is_err(), "the reply was not dropped");
    client.set_read_timeout(Some(LONG)).expect("the timeout is zero");
    proxy.pass_replies();
    send(&client, 4);
    assert_eq!(receive(&client).expect("no echo arrived"), 4);
}

#[test]
fn the_proxy_cuts_and_refuses() {
    let (proxy, client) = echo();
    send(&client, 1);
    assert_eq!(receive(&client).expect("no echo arrived"), 1);
    proxy.cut();
    assert!(receive(&client).is_err());
    let connect = || {
        let client = std::net::TcpStream::connect(("127.0.0.1", proxy.port())).ok()?;
        std::io::Write::write_all(&mut (&client), &[2]).ok()?;
        receive(&client).ok()
    };
    assert_eq!(connect(), Some(2), "a new connection is served");
    proxy.refuse(true);
    assert_eq!(connect(), None);
    proxy.refuse(false);
    assert_eq!(connect(), Some(2));
}

/// The child process of the test below. It starts servers, prints where they are, and waits to be
/// killed.
#[test]
fn child_that_is_killed() {
    if std::env::var_os("TESTBED_CHILD").is_none() {
        return;
    }
    let (postgres, mariadb) = (Postgres::start(), testbed::mariadb());
    // A paused server must be removed as well.
    postgres.stop();
    for pid in [postgres.pid(), mariadb.pid()] {
        let directory =
            std::fs::read_link(format!("/proc/{pid}/cwd")).expect("the process does not run");
        println!("server {pid} {}", directory.display());
    }
    println!("server end");
    std::thread::sleep(LONG);
}

#[test]
fn nothing_is_left_when_the_test_process_is_killed() {
    let mut child =
        Command::new(std::env::current_exe().expect("the path of this program is unknown"))
            .args(["--exact", "child_that_is_killed", "--nocapture", "--test-threads=1"])
            .env("TESTBED_CHILD", "1")
            .stdout(Stdio::piped())
            .spawn()
            .expect("cannot start this program again");
    let lines =
        BufReader::new(child.stdout.take().expect("the child has no pipe for stdout")).lines();
    let mut servers = Vec::new();
    for line in lines.map_while(Result::ok) {
        // The test harness prints its own text at the beginning of the line.
        let Some((_, server)) = line.split_once("server ") else { continue };
        let Some((pid, directory)) = server.split_once(' ') else { break };
        servers.push((pid.to_owned(), directory.to_owned()));
    }
    assert_eq!(servers.len(), 2, "the child has not printed both servers");
    child.kill().expect("the process does not run");
    child.wait().expect("cannot wait for the child");
    let end = Instant::now() + LONG;
    for (pid, directory) in servers {
        // The process that inherits a dead process may take long to reap it, so a dead process
        // counts as gone.
        let alive = || std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok();
        while alive() || Path::new(&directory).exists() {
            assert!(Instant::now() < end, "{pid} in {directory} is still there");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn etcd_cluster_keeps_acknowledged_writes_and_elects_a_new_leader() {
    let cluster = Etcd::cluster();
    cluster.etcdctl(&["put", "kept", "7"]);
    let leader = cluster.leader();
    cluster.kill(leader);
    assert_ne!(cluster.leader(), leader);
    assert_eq!(cluster.etcdctl(&["get", "--print-value-only", "kept"]), "7");
    cluster.restart(leader);
    cluster.restart_all();
    assert_eq!(cluster.etcdctl(&["get", "--print-value-only", "kept"]), "7");
}

#[test]
fn etcd_enforces_user_permissions_over_tls() {
    let server = Etcd::with(Setup::new().tls(), 1);
    server.enable_auth("locks/");
    let refused = server.etcdctl_command().args(["get", "locks/a"]).output().unwrap();
    assert!(!refused.status.success());
    server.etcdctl(&["--user=lh:lh", "put", "locks/a", "1"]);
    let outside = server.etcdctl_command().args(["--user=lh:lh", "put", "b", "1"]).output();
    assert!(!outside.unwrap().status.success());
}
