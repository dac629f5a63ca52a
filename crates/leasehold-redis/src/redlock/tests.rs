//! The scripts beside the model: random calls on a real server and on [`Model`], answer by answer.

use std::sync::Arc;
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
use testbed::Dice;

struct Bench {
    runtime: Runtime,
    node: Arc<Node>,
    scripts: Scripts,
}

impl Bench {
    fn new(server: &testbed::Redis) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let url = format!("redlock://127.0.0.1:{},a,b?restart_delay_ms=0", server.port());
        let url = RedlockUrl::parse(&url).unwrap();
        let claims = Arc::new(Claims::new(3));
        let node = Node::all(&url, runtime.handle(), &claims, "test").unwrap().remove(0);
        Self { runtime, node, scripts: Scripts::new() }
    }

    fn keys(name: &str) -> [String; 5] {
        let beside = |what: &str| format!("{MEMORY_KEY}:{what}:{name}");
        [name.to_owned(), beside("lock"), MEMORY_KEY.to_owned(), beside("waiting"), beside("alive")]
    }

    fn tell(&self, token: u64) {
        let run = self.runtime.block_on(self.node.met(true)).unwrap();
        let mut call = self.scripts.tell.call(1);
        call.arg(MEMORY_KEY).arg(&run.id).arg(token).arg(0).arg(0).arg(0);
        let told = self.runtime.block_on(self.node.ask(&self.scripts.tell, &call));
        assert_eq!(told.unwrap().natural(), Some(1));
    }

    fn known(&self) -> Known {
        self.runtime.block_on(self.node.known(&self.scripts)).unwrap().0
    }

    fn take(&self, name: &str, who: Attempt, proposal: u64) -> Result<Answer, Trouble> {
        let keys = Self::keys(name);
        let claim = ClaimId::from_u128(who.claim).to_hex();
        let fill = |mut call: redis::Cmd| {
            call.arg(&keys[..]).arg("take").arg(&claim).arg(who.number).arg(3_600_000);
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

    fn first(&self, script: &crate::redis::connection::Script, call: &redis::Cmd) -> i64 {
        let mut answer: Elements = self.runtime.block_on(self.node.ask(script, call)).unwrap();
        answer.number().unwrap()
    }
}

fn value(who: Attempt) -> String {
    format!("{}.{}", ClaimId::from_u128(who.claim).to_hex(), who.number)
}

#[test]
fn the_scripts_do_what_the_model_does() {
    let bench = Bench::new(testbed::redis());
    bench.tell(1_000);
    let hour = "3600000";
    for seed in 1..=8 {
        let name = format!("parity-{seed}");
        let keys = Bench::keys(&name);
        let mut dice = Dice(seed * 7_919);
        // What other names have left in the node's memory is its beginning here.
        let (Known::Remembers(highest) | Known::Forgot(highest)) = bench.known() else { panic!() };
        let mut model = Model { highest, ..Model::new() };
        for step in 0..400 {
            let said = |what: &str| format!("seed {seed}, step {step}: {what}");
            let who = Attempt { claim: u128::from(dice.below(2)) + 1, number: dice.below(3) + 1 };
            let token = 990 + dice.below(60) + step / 4;
            match dice.below(7) {
                0 | 1 => {
                    let expected = model.take(who, u64::MAX, token);
                    let taken = bench.take(&name, who, token);
                    assert_eq!(taken.unwrap(), expected, "{}", said("take"));
                }
                2 => {
                    let mut call = bench.scripts.write_back.call(3);
                    call.arg(&keys[..3]).arg(value(who)).arg(token);
                    let stored = bench.first(&bench.scripts.write_back, &call) == 1;
                    assert_eq!(stored, model.write_back(who, token), "{}", said("write back"));
                }
                3 => {
                    let mut call = bench.scripts.extend.call(2);
                    call.arg(&keys[..2]).arg(value(who)).arg(hour);
                    let extended = bench.first(&bench.scripts.extend, &call) == 1;
                    assert_eq!(extended, model.extend(who, u64::MAX), "{}", said("extend"));
                }
                4 => {
                    let mut call = bench.scripts.heal.call(2);
                    call.arg(&keys[..2]).arg(value(who)).arg(hour).arg(token).arg("{}");
                    bench.first(&bench.scripts.heal, &call);
                    model.heal(who, u64::MAX);
                }
                // Its time is over, by whatever clock.
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
                    call.arg(ClaimId::from_u128(who.claim).to_hex()).arg(who.number);
                    let released = bench.first(&bench.scripts.release, &call) == 1;
                    assert_eq!(released, model.release(who), "{}", said("release"));
                }
            }
            let main = bench.runtime.block_on(bench.node.call(redis::cmd("GET").arg(&keys[0])));
            let held = match main.unwrap() {
                Value::BulkString(bytes) => Some(String::from_utf8(bytes).unwrap()),
                _ => None,
            };
            assert_eq!(held, model.key.map(|(who, _)| value(who)), "{}", said("the key"));
        }
    }
}

/// One server among those who wait for it.
struct Kept<'a> {
    bench: &'a Bench,
    server: &'a testbed::Redis,
    keys: [String; 5],
}

impl Kept<'_> {
    fn entry(claim: u128) -> String {
        super::attempt::waiter(&ClaimId::from_u128(claim).to_hex(), "nobody-listens", "{}")
    }

    /// Asks as one who has waited for so long, and would go on.
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

    /// For whom the node is kept.
    fn kept_for(&self) -> Option<u128> {
        let value = self.server.command(&["GET", &self.keys[0]]);
        let id = value.strip_suffix(".0")?;
        ClaimId::from_hex(id).map(|id| id.as_u128())
    }
}

#[test]
fn a_node_is_kept_for_who_is_told() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    // Longer than any machine stands still.
    let long = || Bench { scripts: Scripts::keeping(3_600_000), ..Bench::new(&server) };
    let bench = long();
    bench.tell(7);
    let kept = |name: &str| Kept { bench: &bench, server: &server, keys: Bench::keys(name) };
    // 1 holds; 2 has waited longer than 3.
    let held_and_waited_for = |name: &str| {
        let kept = kept(name);
        assert_ne!(kept.take(1, 1, 0), "busy");
        assert_eq!(kept.take(3, 1, 100), "busy");
        assert_eq!(kept.take(2, 1, 200), "busy");
        kept
    };

    let told = held_and_waited_for("told");
    assert_eq!(told.release(1, false), 1);
    assert_eq!(told.kept_for(), Some(2));
    assert_eq!(told.take(4, 1, 0), "busy", "a newcomer");
    assert_ne!(told.take(2, 2, 201), "busy", "who was told");
    assert_eq!(told.kept_for(), None);
    assert_eq!(told.release(2, false), 1);
    assert_eq!(told.kept_for(), Some(3));

    let disputed = held_and_waited_for("disputed");
    assert_eq!(disputed.release(1, false), 1);
    assert_ne!(disputed.take(3, 2, 101), "busy", "who waits may be another node's first");

    let left = held_and_waited_for("left");
    assert_eq!(left.release(1, false), 1);
    assert_eq!(left.release(2, true), 1);
    assert_eq!(left.kept_for(), Some(3), "who leaves passes it on");

    let evicted = held_and_waited_for("evicted");
    assert_eq!(evicted.release(1, false), 1);
    let mut call = bench.scripts.evict.call(4);
    call.arg(&[&evicted.keys[0], &evicted.keys[1], &evicted.keys[3], &evicted.keys[4]]);
    assert_eq!(bench.first(&bench.scripts.evict, &call), 0, "nobody holds");
    assert_eq!(evicted.kept_for(), Some(2));

    let mut call = bench.scripts.read.call(4);
    call.arg(&[&evicted.keys[0], &evicted.keys[1], &evicted.keys[3], &evicted.keys[4]])
        .arg(0)
        .arg(9);
    let mut view = bench.runtime.block_on(bench.node.ask(&bench.scripts.read, &call)).unwrap();
    assert_eq!(view.text().as_deref(), Some(""), "nobody holds");

    // Nobody comes.
    let bench = Bench { scripts: Scripts::keeping(1), ..Bench::new(&server) };
    let alone = Kept { bench: &bench, ..held_and_waited_for("alone") };
    assert_eq!(alone.release(1, false), 1);
    std::thread::sleep(Duration::from_millis(1_100));
    assert_eq!(alone.kept_for(), None);
    assert_ne!(alone.take(5, 1, 0), "busy");
    let bench = long();
    let alone = Kept { bench: &bench, ..alone };
    assert_eq!(alone.release(5, false), 1);
    assert_eq!(alone.kept_for(), Some(3), "who was told and did not come counts as alive no more");
}

/// A name's record goes away by the server's clock; its tokens must not, however that is stepped.
#[test]
fn tokens_rise_over_names_that_nobody_remembers_and_clocks_that_are_stepped() {
    let server = testbed::Redis::with(testbed::Setup::new().fast().movable_clock());
    let bench = Bench::new(&server);
    bench.tell(0);
    let keys = Bench::keys("stepped");
    let who = |number| Attempt { claim: 1, number };
    let mut highest = 5_000;
    for (number, shift) in (1..).zip([0, 130, 70, 4_000, -4_000, -3_900, -3_770, 10, 400, 100]) {
        server.shift_clock(shift);
        // Something else moves the memory on, now and then.
        if number % 2 == 0 {
            bench.take(&format!("other-{number}"), who(1), 1).unwrap();
        }
        let low = bench.take("stepped", who(2 * number), highest).unwrap();
        if number > 1 {
            let Answer::Granted { stored, last } = low else { panic!("{low:?}") };
            assert!(!stored && last >= highest, "step {number} ({shift} s): {last} < {highest}");
        }
        highest += 10;
        let high = bench.take("stepped", who(2 * number + 1), highest + 1_000).unwrap();
        let Answer::Granted { stored: true, last } = high else { panic!("{high:?}") };
        highest = last;
        let mut call = bench.scripts.release.call(4);
        call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]);
        call.arg(ClaimId::from_u128(1).to_hex()).arg(1_000);
        bench.first(&bench.scripts.release, &call);
    }
    assert_eq!(bench.known(), Known::Remembers(highest));
}

/// A record that was taken away by a step of the clock while nobody looked: what then counted was
/// what the node had remembered a minute before, and the token fell by an hour.
#[test]
fn f16_a_record_that_a_stepped_clock_takes_away_lets_no_token_fall() {
    let server = testbed::Redis::with(testbed::Setup::new().fast().movable_clock());
    let bench = Bench::new(&server);
    bench.tell(1_000);
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
fn a_node_that_restarted_or_was_flushed_has_forgotten() {
    // It keeps its data: and what was kept may be old all the same.
    let server = testbed::Redis::start();
    let bench = Bench::new(&server);
    bench.tell(7);
    let who = Attempt { claim: 1, number: 1 };
    let granted = Answer::Granted { stored: true, last: 9 };
    assert_eq!(bench.take("a", who, 9).unwrap(), granted);
    server.restart();
    let again = Attempt { claim: 1, number: 2 };
    // The connection that was cut is noticed by the first call.
    let taken = (0..20).find_map(|_| bench.take("a", again, 10).ok());
    assert_eq!(taken, Some(Answer::Abstained));
    assert_eq!(bench.known(), Known::Forgot(9));
    bench.tell(20);
    assert_eq!(bench.take("a", again, 10).unwrap(), Answer::Granted { stored: false, last: 20 });
    server.command(&["SCRIPT", "FLUSH"]);
    assert_eq!(bench.take("a", again, 21).unwrap(), Answer::Granted { stored: true, last: 21 });
    server.command(&["FLUSHALL"]);
    assert_eq!(bench.take("a", again, 22).unwrap(), Answer::Abstained);
    assert_eq!(bench.known(), Known::Forgot(0));
}

/// Redis before 7 may know the voting script of an earlier run from a snapshot, which has the memory
/// of that run as well.
#[test]
fn s33_an_old_server_that_remembers_the_script_of_an_earlier_run_does_not_vote() {
    let server = testbed::Redis::start();
    let bench = Bench::new(&server);
    bench.tell(7);
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

/// Who polls with `try_lock` for years leaves nothing behind in its own memory.
#[test]
fn a_claim_that_did_not_get_in_is_forgotten() {
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
fn a_voting_script_of_another_run_invalidates_the_memory() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    let bench = Bench::new(&server);
    bench.tell(7);
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
