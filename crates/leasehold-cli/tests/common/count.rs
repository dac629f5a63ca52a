//! An exact count by forty concurrent processes of `leasehold run`.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{LEASEHOLD, Place, eventually};

const PROCESSES: usize = 40;
/// Counts of each process, unless the test specifies another number.
const ROUNDS: usize = 2;

/// The script of each process. It reads, sleeps, writes, and records its token.
const COUNT: &str = r#"
n=$(cat "$1"); sleep 0.01; echo $((n + 1)) > "$1"; echo "$LEASEHOLD_TOKEN" >> "$1.tokens"; echo >> "$1.by.$2"
"#;

/// Forty processes that count under the lock `counter`.
pub(crate) struct Counting {
    place: Place,
    rounds: usize,
    running: Vec<Child>,
    _turn: MutexGuard<'static, ()>,
}

impl Counting {
    /// Starts the processes with the default number of counts.
    pub(crate) fn start(store: &str) -> Self {
        Self::start_for(ROUNDS, store)
    }

    /// Starts the processes, each of which counts `times` times. The number must be large enough
    /// for everything that happens meanwhile.
    pub(crate) fn start_for(times: usize, store: &str) -> Self {
        // Only one such group runs at a time.
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let place = Place::new();
        let counter = place.path("counter");
        std::fs::write(&counter, "0\n").unwrap();
        let start = |_| -> Child {
            // Exit code 69 means that the server was unreachable for longer than the limit, which
            // can happen on a busy machine. Nothing was done, so the count is retried, as a cron
            // job would. Exit code 74 means that the hold was lost, perhaps after everything except
            // the release was done, on a store that forgets. The number of counts is in a file, so
            // nothing is counted twice.
            let rounds = "touch \"$2.by.$$\"; while [ $(wc -l < \"$2.by.$$\") -lt \"$3\" ]; do \
                          \"$0\" run --store \"$1\" counter -- sh -c \"$4\" sh \"$2\" $$; \
                          code=$?; case $code in 0|\"$5\") ;; 69) sleep 0.1 ;; \
                          *) exit $code ;; esac; done";
            let forgets = if store.starts_with("memcached:") { "74" } else { "0" };
            let mut command = std::process::Command::new("sh");
            command.args(["-c", rounds, LEASEHOLD, store]).arg(&counter);
            command.args([&times.to_string(), COUNT, forgets]);
            command.stdin(Stdio::null()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let running = (0..PROCESSES).map(start).collect();
        Self { place, rounds: times, running, _turn: turn }
    }

    /// Returns the file with the number. Other programs may count in it too, under the same lock.
    pub(crate) fn counter(&self) -> PathBuf {
        self.place.path("counter")
    }

    /// Calls `what` after `counted` counts, and checks that counts remain afterwards.
    pub(crate) fn in_the_midst(&self, counted: usize, what: impl FnOnce()) {
        let now = || self.place.read("counter.tokens").lines().count();
        eventually("the processes count", || now() >= counted);
        what();
        assert!(now() < PROCESSES * self.rounds, "all processes had ended too early");
    }

    /// Waits for all processes, and [checks](Counted::check) the result.
    pub(crate) fn finish(self, others: usize) {
        self.wait().check(others);
    }

    /// Waits for all processes.
    pub(crate) fn wait(mut self) -> Counted {
        eventually("all processes have counted", || {
            self.running.iter_mut().all(|child| child.try_wait().unwrap().is_some())
        });
        for child in self.running {
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {stderr}", output.status);
        }
        Counted { place: self.place, count: PROCESSES * self.rounds }
    }
}

/// The result of the forty processes.
pub(crate) struct Counted {
    place: Place,
    count: usize,
}

impl Counted {
    /// Checks that all counts and `others` more arrived, with increasing tokens.
    pub(crate) fn check(self, others: usize) {
        let counted = self.place.read("counter");
        assert_eq!(counted.trim(), (self.count + others).to_string());
        let tokens = self.place.read("counter.tokens");
        let tokens: Vec<u64> = tokens.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(tokens.len(), self.count);
        assert!(tokens.is_sorted_by(|a, b| a < b), "tokens are not in ascending order: {tokens:?}");
    }
}
