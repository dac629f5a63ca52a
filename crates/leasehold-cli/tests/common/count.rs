//! An exact count by forty processes of `leasehold run`.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{LEASEHOLD, Place, eventually};

const PROCESSES: usize = 40;
/// How often each of them counts, unless the test says otherwise.
const ROUNDS: usize = 2;

/// What each process does: reads, thinks, writes, and says under which token.
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
    /// Starts them.
    pub(crate) fn start(store: &str) -> Self {
        Self::start_for(ROUNDS, store)
    }

    /// The same, and each counts so often: enough for all that is to happen in the midst of it.
    pub(crate) fn start_for(times: usize, store: &str) -> Self {
        // One such crowd at a time.
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let place = Place::new();
        let counter = place.path("counter");
        std::fs::write(&counter, "0\n").unwrap();
        let start = |_| -> Child {
            // 69: on a busy machine the server may be away for longer than is waited for; nothing
            // was done then. As a cron job would, again. 74: the hold was lost; it may have been when all was
            // done but the release, where the store forgets. Whoever has counted, has, and how often it says.
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

    /// The file that holds the number: others may count in it too, under the same lock.
    pub(crate) fn counter(&self) -> PathBuf {
        self.place.path("counter")
    }

    /// Does something once so many have been counted, and while others are still to be.
    pub(crate) fn in_the_midst(&self, counted: usize, what: impl FnOnce()) {
        let now = || self.place.read("counter.tokens").lines().count();
        eventually("they count", || now() >= counted);
        what();
        assert!(now() < PROCESSES * self.rounds, "all had counted before");
    }

    /// Waits for all, and [checks](Counted::check).
    pub(crate) fn finish(self, others: usize) {
        self.wait().check(others);
    }

    /// Waits for all.
    pub(crate) fn wait(mut self) -> Counted {
        eventually("all have counted", || {
            self.running.iter_mut().all(|child| child.try_wait().unwrap().is_some())
        });
        for child in self.running {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {said}", output.status);
        }
        Counted { place: self.place, count: PROCESSES * self.rounds }
    }
}

/// What forty processes have counted.
pub(crate) struct Counted {
    place: Place,
    count: usize,
}

impl Counted {
    /// Everybody was counted, `others` besides, under rising tokens.
    pub(crate) fn check(self, others: usize) {
        let counted = self.place.read("counter");
        assert_eq!(counted.trim(), (self.count + others).to_string());
        let tokens = self.place.read("counter.tokens");
        let tokens: Vec<u64> = tokens.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(tokens.len(), self.count);
        assert!(tokens.is_sorted_by(|a, b| a < b), "tokens do not rise: {tokens:?}");
    }
}
