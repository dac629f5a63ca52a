//! Runs the service as in production: two instances on one database, which are called, killed,
//! terminated and restarted.

mod dashboard;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::LockService;

const PATIENCE: Duration = Duration::from_secs(120);

/// Which program is tested: this one, or the one in clients/python/examples, which must behave the
/// same.
#[derive(Clone, Copy, PartialEq)]
enum Program {
    Rust,
    /// The locks are in a lock service instead of the database.
    RustWithLockService,
    Python,
}

impl Program {
    fn command(self) -> Command {
        if self != Self::Python {
            return Command::new(env!("CARGO_BIN_EXE_service"));
        }
        let leasehold = leasehold();
        let clients = workspace().join("clients/python");
        let mut command = Command::new(testbed::python());
        command.arg(clients.join("examples/bank.py")).env("PYTHONPATH", clients);
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("LEASEHOLD_COMMAND", leasehold);
        command
    }
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the path of the leasehold program, which is built if it does not exist.
fn leasehold() -> PathBuf {
    let leasehold = Path::new(env!("CARGO_BIN_EXE_service")).with_file_name("leasehold");
    if !leasehold.exists() {
        let mut build = Command::new(env!("CARGO"));
        let features = ["build", "-p", "leasehold-cli", "--features", "postgres,serve"];
        let build = build.args(features).current_dir(workspace());
        assert!(build.status().unwrap().success());
    }
    leasehold
}

/// The servers that the instances of a test use.
struct Servers {
    program: Program,
    database: String,
    locks: Option<LockService>,
}

impl Servers {
    fn start(program: Program) -> Self {
        let database = testbed::postgres().database();
        let locks = (program == Program::RustWithLockService)
            .then(|| LockService::start(&leasehold(), &database));
        Self { program, database, locks }
    }

    fn instance(&self) -> Instance {
        let mut command = self.program.command();
        command.env("DATABASE_URL", &self.database).env_remove("LEASEHOLD_STORE");
        match &self.locks {
            Some(locks) => command.env("LOCKS_URL", format!("http://127.0.0.1:{}/", locks.port())),
            None => command.env_remove("LOCKS_URL"),
        };
        Instance::start(command)
    }
}

struct Instance {
    child: Child,
    address: String,
}

impl Instance {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}"));
        Self { address: address.into(), child }
    }

    /// Sends a request and returns its status and text.
    fn ask(&self, request: &str, header: &str) -> (u16, String) {
        let mut connection = TcpStream::connect(&self.address).unwrap();
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        let ends = "Connection: close\r\nContent-Length: 0\r\n\r\n";
        write!(connection, "{request} HTTP/1.1\r\nHost: bank\r\n{header}{ends}").unwrap();
        let mut reply = String::new();
        connection.read_to_string(&mut reply).unwrap();
        let status = reply.split(' ').nth(1).and_then(|status| status.parse().ok());
        let text = reply.split_once("\r\n\r\n").map_or("", |(_, text)| text);
        (status.unwrap_or_else(|| panic!("{reply:?}")), text.to_owned())
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path}"), "")
    }

    fn post(&self, path: &str) -> (u16, String) {
        self.ask(&format!("POST {path}"), "")
    }

    fn term(&self) -> Option<u64> {
        let (status, text) = self.get("/leader");
        (status == 200).then(|| text.trim().parse().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn leader<'a>(all: &[&'a Instance]) -> (&'a Instance, u64) {
    eventually("one leads", || all.iter().find_map(|one| Some((*one, one.term()?))))
}

fn an_order_is_done_once_however_often_and_wherever_it_is_sent(program: Program) {
    let servers = Servers::start(program);
    let all = [servers.instance(), servers.instance()];
    let order = |n: usize| {
        let one = &all[n % 2];
        one.ask("POST /orders?item=tea", &format!("Idempotency-Key: k-{}\r\n", n / 8))
    };
    let mut replies: Vec<(u16, String)> = std::thread::scope(|scope| {
        let sent: Vec<_> = (0..16).map(|n| scope.spawn(move || order(n))).collect();
        sent.into_iter().map(|reply| reply.join().unwrap()).collect()
    });
    for (status, id) in &replies {
        assert!([200, 201].contains(status), "{status}: {id}");
    }
    assert_eq!(replies.iter().filter(|(status, _)| *status == 201).count(), 2);
    replies.sort_by(|a, b| a.1.cmp(&b.1));
    replies.dedup_by(|a, b| a.1 == b.1);
    assert_eq!(replies.len(), 2, "two orders");
    assert_eq!(all[0].post("/orders?item=tea").0, 400);
}

/// Runs each test with all programs.
macro_rules! in_all {
    ($($case:ident),* $(,)?) => {$(
        mod $case {
            use super::Program;

            #[test]
            fn in_rust() {
                super::$case(Program::Rust);
            }

            #[test]
            fn in_rust_with_a_lock_service() {
                super::$case(Program::RustWithLockService);
            }

            #[test]
            fn in_python() {
                super::$case(Program::Python);
            }
        }
    )*};
}

in_all!(
    an_order_is_done_once_however_often_and_wherever_it_is_sent,
    deposits_lose_nothing_and_reports_come_two_at_a_time,
    another_instance_leads_when_the_leader_is_killed_or_told_to_end,
);

fn deposits_lose_nothing_and_reports_come_two_at_a_time(program: Program) {
    let servers = Servers::start(program);
    let all = [servers.instance(), servers.instance()];
    let all = &all;
    let deposit = |n: usize| {
        // A request that did not get the lock in time is refused, and repeated.
        eventually("a turn", || match all[n % 2].post("/accounts/7/deposit?amount=5").0 {
            200 => Some(()),
            423 | 503 => None,
            other => panic!("{other}"),
        });
    };
    std::thread::scope(|scope| {
        for n in 0..20 {
            scope.spawn(move || deposit(n));
        }
    });
    assert_eq!(all[0].post("/accounts/7/deposit?amount=0"), (200, "100".into()));
    assert_eq!(all[0].post("/accounts/x/deposit?amount=1").0, 400);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let asked: Vec<_> =
            (0..3).map(|n| scope.spawn(move || all[n % 2].post("/reports").0)).collect();
        asked.into_iter().map(|reply| reply.join().unwrap()).collect()
    });
    // On a busy machine the third request may arrive when the first is done.
    assert!(statuses.iter().filter(|status| **status == 200).count() >= 2, "{statuses:?}");
    assert!(statuses.iter().all(|status| [200, 423].contains(status)), "{statuses:?}");
    if program == Program::Rust {
        let (status, metrics) = all[0].get("/metrics");
        assert_eq!(status, 200);
        assert!(metrics.contains("leasehold_acquired_total{kind=\"mutex\"}"), "{metrics}");
        let all_metrics = metrics + &dashboard::metrics_of_a_lock_service();
        dashboard::asks_for_what_is_there(&all_metrics);
    }
}

fn another_instance_leads_when_the_leader_is_killed_or_told_to_end(program: Program) {
    let servers = Servers::start(program);
    let (one, two) = (servers.instance(), servers.instance());
    assert_eq!(one.get("/ready").0, 200);
    let (first, term) = leader(&[&one, &two]);
    let other = if std::ptr::eq(first, &one) { &two } else { &one };
    assert_eq!(other.term(), None, "there is one leader");
    first.signal(Signal::SIGKILL);
    let (_, second) = leader(&[other]);
    assert!(second > term);
    let mut third = servers.instance();
    assert_eq!(third.term(), None);
    // A terminated leader steps down immediately, so its lease need not expire.
    other.signal(Signal::SIGTERM);
    let (_, last) = leader(&[&third]);
    assert!(last > second);
    third.signal(Signal::SIGTERM);
    let status = third.child.wait().unwrap();
    assert!(status.success(), "{status}");
    // The store is empty.
    let locks = leasehold::blocking::connect(&servers.database).unwrap();
    let left = locks.list("").unwrap();
    assert!(left.is_empty(), "{left:?}");
}
