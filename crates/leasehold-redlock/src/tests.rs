//! Compares the scripts with the model. Random calls run on a real server and on [`Model`], and
//! every reply must be equal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::Value;
use tokio::runtime::{Builder, Runtime};

use super::RedlockStore;
use super::claims::Claims;
use super::node::{MEMORY_KEY, Node, Trouble};
use super::round::{Answer, Attempt, Known, Node as Model};
use super::scripts::{Elements, Scripts};
use super::url::RedlockUrl;
use leasehold_core::store::{Joined, Mode, Store};
use leasehold_core::{Claim, ClaimId, Kind, Name};
use testbed::SeededRng;

struct Bench {
    runtime: Runtime,
    node: Arc<Node>,
    scripts: Scripts,
}

impl Bench {
    fn new(server: &testbed::Redis) -> Self {
        Self::at(server.port())
    }

    fn at(port: u16) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let url = format!("redlock://127.0.0.1:{port},a,b?restart_delay_ms=0");
        let url = RedlockUrl::parse(&url).unwrap();
        let claims = Arc::new(Claims::new(3));
        let node = Node::all(&url, runtime.handle(), &claims, "test").unwrap().remove(0);
        Self { runtime, node, scripts: Scripts::new() }
    }

    fn keys(name: &str) -> [String; 5] {
        let beside = |what: &str| format!("{MEMORY_KEY}:{what}:{name}");
        [name.to_owned(), beside("lock"), MEMORY_KEY.to_owned(), beside("waiting"), beside("alive")]
    }

    fn restore(&self, token: u64) {
        let run = self.runtime.block_on(self.node.met(true)).unwrap();
        let mut call = self.scripts.tell.call(1);
        call.arg(MEMORY_KEY).arg(&run.id).arg(token).arg(0).arg(0).arg(0);
        let reply = self.runtime.block_on(self.node.ask(&self.scripts.tell, &call));
        assert_eq!(reply.unwrap().natural(), Some(1));
    }

    fn known(&self) -> Known {
        self.runtime.block_on(self.node.known(&self.scripts)).unwrap().0
    }

    fn take(&self, name: &str, voter: Attempt, proposal: u64) -> Result<Answer, Trouble> {
        let keys = Self::keys(name);
        let claim = ClaimId::from_u128(voter.claim).to_hex();
        let fill = |mut call: redis::Cmd| {
            call.arg(&keys[..]).arg("take").arg(&claim).arg(voter.number).arg(3_600_000);
            call.arg(proposal).arg("{}").arg(3_720_000);
            call
        };
        let taken = self.runtime.block_on(self.node.take(fill, || false));
        let mut answer = taken?;
        Ok(match answer.text().as_deref() {
            Some("stored") => Answer::Granted { stored: true, last: proposal },
            Some("granted") => Answer::Granted {
                stored: answer.natural() == Some(1),
                last: answer.natural().unwrap(),
            },
            Some("busy") => Answer::Refused,
            Some("forgot") => Answer::Abstained,
            other => panic!("{other:?}"),
        })
    }

    fn first(&self, script: &leasehold_redis::redis::connection::Script, call: &redis::Cmd) -> i64 {
        let mut answer: Elements = self.runtime.block_on(self.node.ask(script, call)).unwrap();
        answer.number().unwrap()
    }
}

fn value(voter: Attempt) -> String {
    format!("{}.{}", ClaimId::from_u128(voter.claim).to_hex(), voter.number)
}

#[test]
fn scripts_behave_like_the_model() {
    let bench = Bench::new(testbed::redis());
    bench.restore(1_000);
    let hour = "3600000";
    for seed in 1..=8 {
        let name = format!("parity-{seed}");
        let keys = Bench::keys(&name);
        let mut rng = SeededRng(seed * 7_919);
        // The initial state of the model includes what other names left in the node's memory.
        let (Known::Remembers(highest) | Known::Forgot(highest)) = bench.known() else { panic!() };
        let mut model = Model { highest, ..Model::new() };
        for step in 0..400 {
            let context = |what: &str| format!("seed {seed}, step {step}: {what}");
            let voter = Attempt { claim: u128::from(rng.below(2)) + 1, number: rng.below(3) + 1 };
            let token = 990 + rng.below(60) + step / 4;
            match rng.below(7) {
                0 | 1 => {
                    let expected = model.take(voter, u64::MAX, token);
                    let taken = bench.take(&name, voter, token);
                    assert_eq!(taken.unwrap(), expected, "{}", context("take"));
                }
                2 => {
                    let mut call = bench.scripts.write_back.call(3);
                    call.arg(&keys[..3]).arg(value(voter)).arg(token);
                    let stored = bench.first(&bench.scripts.write_back, &call) == 1;
                    assert_eq!(stored, model.write_back(voter, token), "{}", context("write back"));
                }
                3 => {
                    let mut call = bench.scripts.extend.call(2);
                    call.arg(&keys[..2]).arg(value(voter)).arg(hour);
                    let extended = bench.first(&bench.scripts.extend, &call) == 1;
                    assert_eq!(extended, model.extend(voter, u64::MAX), "{}", context("extend"));
                }
                4 => {
                    let mut call = bench.scripts.heal.call(2);
                    call.arg(&keys[..2]).arg(value(voter)).arg(hour).arg(token).arg("{}");
                    bench.first(&bench.scripts.heal, &call);
                    model.heal(voter, u64::MAX);
                }
                // The record expires, for example because the clock was set.
                5 => {
                    bench
                        .runtime
                        .block_on(bench.node.call(redis::cmd("DEL").arg(&keys[1])))
                        .unwrap();
                    model.last = None;
                }
                _ => {
                    let mut call = bench.scripts.release.call(4);
                    call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]);
                    call.arg(ClaimId::from_u128(voter.claim).to_hex()).arg(voter.number);
                    let released = bench.first(&bench.scripts.release, &call) == 1;
                    assert_eq!(released, model.release(voter), "{}", context("release"));
                }
            }
            let main = bench.runtime.block_on(bench.node.call(redis::cmd("GET").arg(&keys[0])));
            let held = match main.unwrap() {
                Value::BulkString(bytes) => Some(String::from_utf8(bytes).unwrap()),
                _ => None,
            };
            assert_eq!(held, model.key.map(|(voter, _)| value(voter)), "{}", context("the key"));
        }
    }
}

/// One server with waiting claims.
struct Kept<'a> {
    bench: &'a Bench,
    server: &'a testbed::Redis,
    keys: [String; 5],
}

impl Kept<'_> {
    fn entry(claim: u128) -> String {
        super::attempt::waiter(&ClaimId::from_u128(claim).to_hex(), "unused-inbox", "{}")
    }

    /// Requests the lock for a claim that has waited for `waited` milliseconds and continues to
    /// wait.
    fn take(&self, claim: u128, number: u64, waited: u64) -> String {
        let id = ClaimId::from_u128(claim).to_hex();
        let fill = |mut call: redis::Cmd| {
            call.arg(&self.keys[..]).arg("take").arg(&id).arg(number).arg(3_600_000);
            call.arg(1_000_000).arg("{}").arg(3_720_000);
            call.arg(Self::entry(claim)).arg(waited).arg(60_000);
            call
        };
        let bench = self.bench;
        bench.runtime.block_on(bench.node.take(fill, || false)).unwrap().text().unwrap()
    }

    fn release(&self, claim: u128, waits: bool) -> i64 {
        let mut call = self.bench.scripts.release.call(4);
        call.arg(&[&self.keys[0], &self.keys[1], &self.keys[3], &self.keys[4]]);
        call.arg(ClaimId::from_u128(claim).to_hex()).arg(1_000);
        if waits {
            call.arg(Self::entry(claim));
        }
        self.bench.first(&self.bench.scripts.release, &call)
    }

    /// Removes the vote for the first attempt of this claim, and returns how many votes were removed.
    fn evict(&self, claim: u128) -> i64 {
        let mut call = self.bench.scripts.evict.call(4);
        call.arg(&[&self.keys[0], &self.keys[1], &self.keys[3], &self.keys[4]]);
        call.arg("another value").arg(value(Attempt { claim, number: 1 }));
        self.bench.first(&self.bench.scripts.evict, &call)
    }

    /// Returns the claim for which the node is reserved.
    fn kept_for(&self) -> Option<u128> {
        let value = self.server.command(&["GET", &self.keys[0]]);
        let id = value.strip_suffix(".0")?;
        ClaimId::from_hex(id).map(|id| id.as_u128())
    }
}

/// The reply to an eviction can be lost, and the request is then repeated.
#[test]
fn repeated_eviction_does_not_remove_the_next_holder() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    let bench = Bench::new(&server);
    bench.restore(7);
    let lock = Kept { bench: &bench, server: &server, keys: Bench::keys("evicted twice") };
    assert_ne!(lock.take(1, 1, 0), "busy");
    assert_eq!(lock.evict(1), 1);
    assert_ne!(lock.take(2, 1, 0), "busy");
    assert_eq!(lock.evict(1), 0, "the next holder was removed");
    assert_eq!(lock.take(3, 1, 0), "busy");
}

#[test]
fn node_is_reserved_for_the_notified_waiter() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    // The reservation is longer than any pause of the machine.
    let long = || Bench { scripts: Scripts::keeping(3_600_000), ..Bench::new(&server) };
    let bench = long();
    bench.restore(7);
    let kept = |name: &str| Kept { bench: &bench, server: &server, keys: Bench::keys(name) };
    // Claim 1 holds the lock, and claim 2 has waited longer than claim 3.
    let held_and_waited_for = |name: &str| {
        let kept = kept(name);
        assert_ne!(kept.take(1, 1, 0), "busy");
        assert_eq!(kept.take(3, 1, 100), "busy");
        assert_eq!(kept.take(2, 1, 200), "busy");
        kept
    };

    let node = held_and_waited_for("notified");
    assert_eq!(node.release(1, false), 1);
    assert_eq!(node.kept_for(), Some(2));
    assert_eq!(node.take(4, 1, 0), "busy", "a new claim got the lock before the notified claim");
    assert_ne!(node.take(2, 2, 201), "busy", "the notified claim did not get the lock");
    assert_eq!(node.kept_for(), None);
    assert_eq!(node.release(2, false), 1);
    assert_eq!(node.kept_for(), Some(3));

    let disputed = held_and_waited_for("disputed");
    assert_eq!(disputed.release(1, false), 1);
    assert_ne!(
        disputed.take(3, 2, 101),
        "busy",
        "a waiter that may be first on another node did not get the lock"
    );

    let left = held_and_waited_for("left");
    assert_eq!(left.release(1, false), 1);
    assert_eq!(left.release(2, true), 1);
    assert_eq!(left.kept_for(), Some(3), "the next waiter was not notified");

    let evicted = held_and_waited_for("evicted");
    assert_eq!(evicted.release(1, false), 1);
    assert_eq!(evicted.evict(1), 0, "a holder is reported for a free lock");
    assert_eq!(evicted.kept_for(), Some(2));

    let mut call = bench.scripts.read.call(4);
    call.arg(&[&evicted.keys[0], &evicted.keys[1], &evicted.keys[3], &evicted.keys[4]])
        .arg(0)
        .arg(9);
    let mut view = bench.runtime.block_on(bench.node.ask(&bench.scripts.read, &call)).unwrap();
    assert_eq!(view.text().as_deref(), Some(""), "a holder is reported for a free lock");

    // The notified claim does not poll.
    let bench = Bench { scripts: Scripts::keeping(1), ..Bench::new(&server) };
    let alone = Kept { bench: &bench, ..held_and_waited_for("alone") };
    assert_eq!(alone.release(1, false), 1);
    std::thread::sleep(Duration::from_millis(1_100));
    assert_eq!(alone.kept_for(), None);
    assert_ne!(alone.take(5, 1, 0), "busy");
    let bench = long();
    let alone = Kept { bench: &bench, ..alone };
    assert_eq!(alone.release(5, false), 1);
    assert_eq!(alone.kept_for(), Some(3), "a notified claim that did not come must count as dead");
}

/// A name's record expires by the server's clock. Its tokens must still rise, however the clock is
/// set.
#[test]
fn tokens_rise_despite_expired_records_and_clock_steps() {
    let server = testbed::Redis::with(testbed::Setup::new().fast().movable_clock());
    let bench = Bench::new(&server);
    bench.restore(0);
    let keys = Bench::keys("stepped");
    let voter = |number| Attempt { claim: 1, number };
    let mut highest = 5_000;
    for (number, shift) in (1..).zip([0, 130, 70, 4_000, -4_000, -3_900, -3_770, 10, 400, 100]) {
        server.shift_clock(shift);
        // Another name advances the memory occasionally.
        if number % 2 == 0 {
            bench.take(&format!("other-{number}"), voter(1), 1).unwrap();
        }
        let low = bench.take("stepped", voter(2 * number), highest).unwrap();
        if number > 1 {
            let Answer::Granted { stored, last } = low else { panic!("{low:?}") };
            assert!(
                !stored && last >= highest,
                "step {number} ({shift} s): the last token {last} is lower than {highest}"
            );
        }
        highest += 10;
        let high = bench.take("stepped", voter(2 * number + 1), highest + 1_000).unwrap();
        let Answer::Granted { stored: true, last } = high else { panic!("{high:?}") };
        highest = last;
        let mut call = bench.scripts.release.call(4);
        call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]);
        call.arg(ClaimId::from_u128(1).to_hex()).arg(1_000);
        bench.first(&bench.scripts.release, &call);
    }
    assert_eq!(bench.known(), Known::Remembers(highest));
}

// F16
/// A step of the clock removes a record between two requests. The token must not fall back to an
/// older value that the node remembered.
#[test]
fn record_removed_by_a_clock_step_does_not_lower_tokens() {
    let server = testbed::Redis::with(testbed::Setup::new().fast().movable_clock());
    let bench = Bench::new(&server);
    bench.restore(1_000);
    let keys = Bench::keys("hour");
    let early = Attempt { claim: 1, number: 1 };
    let granted = bench.take("hour", early, 3_600_000_000).unwrap();
    assert_eq!(granted, Answer::Granted { stored: true, last: 3_600_000_000 });
    server.shift_clock(2 * 3_600);
    assert_eq!(server.command(&["EXISTS", &keys[0], &keys[1]]), "0");
    server.shift_clock(0);
    let late = Attempt { claim: 2, number: 1 };
    let refused = Answer::Granted { stored: false, last: 3_600_000_000 };
    assert_eq!(bench.take("hour", late, 2_000).unwrap(), refused);
}

#[test]
fn restarted_or_flushed_node_abstains() {
    // The server keeps its data, but that data may still be outdated.
    let server = testbed::Redis::start();
    let bench = Bench::new(&server);
    bench.restore(7);
    let voter = Attempt { claim: 1, number: 1 };
    let granted = Answer::Granted { stored: true, last: 9 };
    assert_eq!(bench.take("a", voter, 9).unwrap(), granted);
    server.restart();
    let again = Attempt { claim: 1, number: 2 };
    // The first call notices the broken connection.
    let taken = (0..20).find_map(|_| bench.take("a", again, 10).ok());
    assert_eq!(taken, Some(Answer::Abstained));
    assert_eq!(bench.known(), Known::Forgot(9));
    bench.restore(20);
    assert_eq!(bench.take("a", again, 10).unwrap(), Answer::Granted { stored: false, last: 20 });
    server.command(&["SCRIPT", "FLUSH"]);
    assert_eq!(bench.take("a", again, 21).unwrap(), Answer::Granted { stored: true, last: 21 });
    server.command(&["FLUSHALL"]);
    assert_eq!(bench.take("a", again, 22).unwrap(), Answer::Abstained);
    assert_eq!(bench.known(), Known::Forgot(0));
}

// S33
/// Redis before version 7 may restore the voting script of an earlier run from a snapshot, together
/// with the memory of that run.
#[test]
fn old_server_does_not_vote_with_a_script_of_an_earlier_run() {
    let server = testbed::Redis::start();
    let bench = Bench::new(&server);
    bench.restore(7);
    let before = bench.runtime.block_on(bench.node.met(true)).unwrap();
    let script = super::scripts::take_of_old(&before.id);
    let keys = Bench::keys("a");
    let vote = |number: u32| {
        let mut call = script.call(5);
        call.arg(&keys[..]).arg("take").arg(ClaimId::from_u128(1).to_hex()).arg(number);
        call.arg(60_000).arg(9).arg("{}").arg(180_000);
        bench.runtime.block_on(bench.node.ask(&script, &call)).map(|mut a| a.text().unwrap())
    };
    assert_eq!(vote(1).unwrap(), "granted");
    server.restart();
    assert_eq!((2..20).find_map(|number| vote(number).ok()).as_deref(), Some("forgot"));
}

// F17
/// The connection breaks, and the attempt ends while the client connects again. A vote that is
/// requested after that might never be released.
#[test]
fn no_vote_is_requested_if_the_attempt_ends_while_the_client_reconnects() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    let proxy = testbed::Proxy::before(server.port());
    let bench = Bench::at(proxy.port());
    bench.restore(7);
    proxy.refuse(true);
    assert!(bench.runtime.block_on(bench.node.call(&redis::cmd("PING"))).is_err());
    proxy.freeze();
    proxy.refuse(false);
    let keys = Bench::keys("late");
    let claim = ClaimId::from_u128(1).to_hex();
    let fill = |mut call: redis::Cmd| {
        call.arg(&keys[..]).arg("take").arg(&claim).arg(1).arg(3_600_000);
        call.arg(9).arg("{}").arg(3_720_000);
        call
    };
    let over = AtomicBool::new(false);
    let taken = bench.runtime.block_on(async {
        let end = async {
            while proxy.connections() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            over.store(true, Ordering::SeqCst);
            proxy.thaw();
        };
        tokio::join!(bench.node.take(fill, || over.load(Ordering::SeqCst)), end).0
    });
    let trouble = taken.err();
    assert!(matches!(trouble, Some(Trouble::Over)), "{trouble:?}");
    assert_eq!(server.command(&["EXISTS", "late"]), "0", "the vote was requested");
}

/// A client that polls with `try_lock` for years must not accumulate memory.
#[test]
fn claim_of_a_failed_try_is_forgotten() {
    let servers = testbed::Redlock::with(3, testbed::Setup::new().fast());
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("{}?restart_delay_ms=0&node_timeout_ms=5000", servers.url());
        let store = RedlockStore::open(&url, runtime.handle()).await.unwrap();
        let claim = || Claim::new(Name::new("polled").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let held = claim();
        let joined = store.join(&held, Mode::Try).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        for _ in 0..10 {
            let joined = store.join(&claim(), Mode::Try).await.unwrap();
            assert!(matches!(joined, Joined::Busy { .. }), "{joined:?}");
        }
        assert_eq!(store.shared.claims.count(), 1);
        assert!(store.leave(&held, None).await.unwrap());
        assert_eq!(store.shared.claims.count(), 0);
    });
}

#[test]
fn voting_script_of_another_run_invalidates_the_nodes_memory() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    let bench = Bench::new(&server);
    bench.restore(7);
    let other = super::scripts::take(&"0".repeat(40));
    let mut check = other.call(1);
    check.arg(MEMORY_KEY).arg("check");
    let asked = bench.runtime.block_on(bench.node.ask(&other, &check));
    assert_eq!(asked.unwrap().text().as_deref(), Some("CHANGED"));
    assert_eq!(bench.known(), Known::Forgot(7));
    assert!(
        bench
            .runtime
            .block_on(async {
                tokio::time::timeout(Duration::from_secs(20), bench.node.met(true)).await
            })
            .is_ok()
    );
}
