//! Compares the scripts that handle common cases first with the general scripts. Random calls run
//! on two locks, one with each kind of script, and every reply must be equal.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::{Builder, Runtime};

use super::answer::{self, Scripts};
use super::connection::{Node, Script};
use super::keys::{Keys, Keyspace};
use super::url::{Address, Login};
use super::{Member, RedisStore, join_of_mutex};
use leasehold_core::store::{Joined, Mode};
use leasehold_core::{Claim, ClaimId, Kind, Name};
use testbed::SeededRng;

/// One of the two locks.
struct Side {
    name: Name,
    keys: Keys,
    join: Arc<Script>,
    leave: Arc<Script>,
}

impl Side {
    fn new(name: &str, join: &Arc<Script>, leave: &Arc<Script>) -> Self {
        let name = Name::new(name).unwrap();
        let keys = Keyspace::new("", false).keys(&name).unwrap();
        Self { name, keys, join: join.clone(), leave: leave.clone() }
    }
}

struct Bench {
    runtime: Runtime,
    node: Arc<Node>,
}

impl Bench {
    fn new(server: &testbed::Redis) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let address = Address::Tcp("127.0.0.1".into(), server.port());
        let node = Node::new(address, &Login::default(), runtime.handle(), None, None).unwrap();
        Self { runtime, node }
    }

    fn run(&self, script: &Script, call: &Cmd) -> Value {
        let mut doubt = false;
        self.runtime.block_on(self.node.run_noting(script, call, &mut doubt)).unwrap()
    }

    fn ask(&self, words: &[&str]) -> Value {
        let mut cmd = Cmd::new();
        cmd.arg(words);
        self.runtime.block_on(self.node.call(&cmd)).unwrap()
    }

    fn texts(&self, words: &[&str]) -> Vec<String> {
        redis::from_redis_value(self.ask(words)).unwrap()
    }

    /// Returns the holder's value in the main key, and the waiters that have not expired.
    fn state(&self, side: &Side) -> (Option<String>, Vec<String>) {
        let main = side.name.as_str();
        let value: Option<String> = redis::from_redis_value(self.ask(&["GET", main])).unwrap();
        let (waiting, ends) = (format!("leasehold:w:{main}"), format!("leasehold:x:{main}"));
        let mut waiters = self.texts(&["ZRANGE", &waiting, "0", "-1"]);
        let living = self.texts(&["ZRANGEBYSCORE", &ends, "1", "+inf"]);
        waiters.retain(|member| living.contains(member));
        let cut = |text: &str| text.get(..33).unwrap_or(text).to_owned();
        (value.map(|value| cut(&value)), waiters.iter().map(|member| cut(member)).collect())
    }

    fn join(&self, side: &Side, who: u64, delay: u64, mode: Mode) -> String {
        let mut claim = Claim::new(side.name.clone(), Kind::Mutex, 1, 1).unwrap();
        claim.id = ClaimId::from_u128(u128::from(who));
        claim.lock_delay = Duration::from_secs(delay);
        claim.lease = Duration::from_secs(600);
        claim.waiter_lease = claim.lease;
        let member = Member {
            id: claim.id,
            delay: answer::millis(claim.lock_delay),
            inbox: "leasehold:inbox:test".into(),
            who: "{}".into(),
        };
        let request = join_of_mutex(&side.join, &claim, mode, &side.keys, &member);
        match answer::joined(&claim, self.run(&side.join, &request.call)) {
            Ok(Joined::Holding { .. }) => "holds".into(),
            Ok(Joined::Waiting(place)) => {
                format!("waits, {} ahead, asks: {}", place.ahead, place.head_remaining.is_some())
            }
            Ok(Joined::Busy { holders }) => format!("busy, {} hold", holders.len()),
            Err(error) => format!("{:?}", error.kind()),
        }
    }

    fn leave(&self, side: &Side, who: u64, delay: u64, keep: u64, knows: bool) -> String {
        let mut call = RedisStore::request(&side.leave, &side.keys, 0).call;
        let id = ClaimId::from_u128(u128::from(who)).to_hex();
        call.arg(&id);
        if keep > 0 || knows {
            call.arg(keep * 1_000);
        }
        if knows {
            call.arg(format!("{id} {} leasehold:inbox:test {{}}", delay * 1_000));
        }
        format!("left: {:?}", self.run(&side.leave, &call))
    }

    /// Applies a change that is not a leasehold call.
    fn happens(&self, side: &Side, what: u64, which: usize) {
        let main = side.name.as_str();
        let (waiting, ends) = (format!("leasehold:w:{main}"), format!("leasehold:x:{main}"));
        match what {
            0 => drop(self.ask(&["DEL", main])),
            1 => drop(self.ask(&["SET", main, "another library's value", "NX", "PX", "600000"])),
            2 => drop(self.ask(&["SET", main, "0", "NX"])),
            // One of the live waiters dies.
            _ => {
                let living = self.texts(&["ZRANGEBYSCORE", &ends, "1", "+inf"]);
                let ours = self.texts(&["ZRANGE", &waiting, "0", "-1"]);
                let of_queue: Vec<_> = ours.iter().filter(|m| living.contains(m)).collect();
                if let Some(member) = of_queue.get(which) {
                    self.ask(&["ZADD", &ends, "0", member]);
                }
            }
        }
    }
}

#[test]
fn fast_path_scripts_behave_like_the_full_scripts() {
    let bench = Bench::new(testbed::redis());
    let (usual, whole) = (Scripts::new(Duration::ZERO), Scripts::without_the_usual());
    for seed in 1..=12 {
        let sides = [
            Side::new(&format!("usual-{seed}"), &usual.join_mutex, &usual.leave_mutex),
            Side::new(&format!("whole-{seed}"), &whole.0, &whole.1),
        ];
        let mut rng = SeededRng(seed * 7_919);
        for step in 0..300 {
            let (who, what, extra) = (rng.below(5) + 1, rng.below(12), rng.below(6));
            let which = usize::try_from(rng.below(3)).unwrap();
            // The lock delay of a claim never changes.
            let delay = if who == 5 { 60 } else { 0 };
            let done = |side: &Side| match what {
                0..=3 => bench.join(side, who, delay, Mode::Wait),
                4..=5 => bench.join(side, who, delay, Mode::Try),
                6..=9 => bench.leave(side, who, delay, if extra == 0 { 60 } else { 0 }, extra > 3),
                _ => {
                    bench.happens(side, extra, which);
                    String::new()
                }
            };
            let outcomes = sides.each_ref().map(done);
            let context = format!("seed {seed}, step {step}: {what} of {who}, {extra}");
            assert_eq!(outcomes[0], outcomes[1], "{context}");
            let [a, b] = sides.each_ref().map(|side| bench.state(side));
            assert_eq!(a, b, "{context}: {}", outcomes[0]);
        }
    }
}
