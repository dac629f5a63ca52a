//! What the tests of the stores share: time limits, clients, a witness of mutual exclusion, and checks that
//! every store must pass.

pub mod doctor;
mod pushes;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Error, ErrorKind, Guard, Leasehold};

pub use pushes::pushes_agree;

/// How long what must happen is waited for.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Runs a case; a hanging one fails. (Starting its servers is a part of it.)
pub fn run(case: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(3).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE * 5, case).await.expect("the case hangs");
    });
}

/// A client of this store.
pub async fn connect(url: &str) -> Leasehold {
    leasehold::connect(url).await.unwrap_or_else(|error| panic!("{error}"))
}

/// The same where sentinels or nodes must answer soon: on a busy machine they are asked again.
pub async fn connect_patiently(url: &str) -> Leasehold {
    let end = Instant::now() + PATIENCE;
    loop {
        match leasehold::connect(url).await {
            Ok(locks) => return locks,
            Err(e) if e.kind() == ErrorKind::Unreachable && Instant::now() < end => {}
            Err(e) => panic!("{e}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Sees that holders follow one another, with rising tokens.
#[derive(Debug, Default)]
pub struct Witness {
    inside: AtomicBool,
    last: AtomicU64,
    count: AtomicU64,
}

impl Witness {
    /// Records that this guard begins to hold.
    pub fn enter(&self, guard: &Guard) {
        assert!(!self.inside.swap(true, Ordering::SeqCst), "two hold at once");
        let token = guard.token().get();
        let before = self.last.swap(token, Ordering::SeqCst);
        assert!(before < token, "token {token} after {before}");
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that the holder is about to release.
    pub fn leave(&self) {
        assert!(self.inside.swap(false, Ordering::SeqCst), "somebody else has left");
    }

    /// Returns how many holds there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// Gives the lock back. The server may be away: then the client goes on with it in the background.
pub async fn release(guard: Guard) {
    match guard.release().await {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
    }
}

/// `tasks` tasks on each client take the mutex `rounds` times each; in the end the number of
/// holders must be exact.
pub async fn hammer(clients: &[Leasehold], name: &str, tasks: usize, rounds: u64) -> Arc<Witness> {
    let witness = Arc::<Witness>::default();
    let mut running = tokio::task::JoinSet::new();
    for client in clients {
        for _ in 0..tasks {
            // A store that is away for less than a lease is waited for.
            let mutex = client.mutex(name).lease(Duration::from_secs(60));
            let witness = witness.clone();
            running.spawn(async move {
                for _ in 0..rounds {
                    let guard = mutex.lock().await.unwrap_or_else(|error| panic!("{error}"));
                    witness.enter(&guard);
                    tokio::task::yield_now().await;
                    witness.leave();
                    release(guard).await;
                }
            });
        }
    }
    while let Some(done) = running.join_next().await {
        done.expect("no task panics");
    }
    assert_eq!(witness.count(), (clients.len() * tasks) as u64 * rounds);
    witness
}

/// Hammers in rounds until `breaking` is over, so that it cannot miss.
pub async fn hammer_while(
    clients: &[Leasehold],
    name: &str,
    tasks: usize,
    rounds: u64,
    breaking: impl FnOnce() + Send + 'static,
) {
    let breaking = tokio::task::spawn_blocking(breaking);
    loop {
        hammer(clients, name, tasks, rounds).await;
        if breaking.is_finished() {
            break;
        }
    }
    breaking.await.unwrap();
}

/// One line of this kind, without the secret in any of its forms.
#[track_caller]
pub fn assert_told(error: &Error, kind: ErrorKind, secret: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(format!("{error:#}").lines().count(), 1, "not one line: {error}");
    let mut all = format!("{error:#}\n{error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        all += &format!("{cause}\n{cause:?}");
        source = cause.source();
    }
    assert!(!all.contains(secret), "the password is shown: {all}");
}

/// S06: `ours` takes and releases through the proxy, which loses the replies from the first on, from the
/// second on, and so on; whatever was done is found to be done once, and `witness`, which sees all, comes
/// after it.
pub async fn lost_replies_are_recognised(
    proxy: &testbed::Proxy,
    ours: &Leasehold,
    witness: &Leasehold,
    most: usize,
) {
    let name = "s06-replies";
    let mut last = 0;
    for replies in 0..most {
        proxy.drop_replies_after(replies);
        let taking = {
            let lock = ours.mutex(name);
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        tokio::time::sleep(Duration::from_millis(60)).await;
        proxy.pass_replies();
        proxy.cut();
        let guard = taking.await.unwrap().unwrap();
        assert!(guard.token().get() > last);
        last = guard.token().get();
        let shown = witness.read(name).await.unwrap().unwrap();
        assert_eq!(shown.claims.len(), 1, "{shown:?}");
        proxy.drop_replies_after(0);
        let releasing = tokio::spawn(guard.release());
        tokio::time::sleep(Duration::from_millis(20)).await;
        proxy.pass_replies();
        proxy.cut();
        let _ = releasing.await.unwrap();
        let next = witness.mutex(name).lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token().get() > last);
        last = next.token().get();
        next.release().await.unwrap();
    }
}

/// Each of 32 clients takes the same lock again and again: nobody is kept out, and all get about as much. What happens
/// while they all come at once is over after `warm`; then it goes on for `time` at least, and for so many turns that
/// each is a small part, however few of them a busy machine has in a second.
pub async fn thirty_two_get_on(url: &str, warm: Duration, time: Duration) {
    const CLIENTS: usize = 32;
    const TURNS: u64 = 12 * CLIENTS as u64;
    let ready = Arc::new(tokio::sync::Barrier::new(CLIENTS));
    let (inside, all) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..CLIENTS {
        let locks = connect(url).await;
        let (ready, inside, all) = (ready.clone(), inside.clone(), all.clone());
        tasks.push(tokio::spawn(async move {
            ready.wait().await;
            let mut turns = 0_u32;
            let begin = Instant::now() + warm;
            while begin.elapsed() < time || all.load(Ordering::SeqCst) < TURNS {
                let guard = locks.mutex("r10").lock_timeout(PATIENCE).await.unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two hold");
                if Instant::now() > begin {
                    turns += 1;
                    all.fetch_add(1, Ordering::SeqCst);
                }
                inside.store(false, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
            f64::from(turns)
        }));
    }
    let mut turns = Vec::new();
    for task in tasks {
        turns.push(task.await.unwrap());
    }
    let (sum, squares) = (turns.iter().sum::<f64>(), turns.iter().map(|n| n * n).sum::<f64>());
    let jain = sum * sum / (CLIENTS as f64 * squares);
    println!("{sum} turns among {CLIENTS}, Jain {jain:.3}");
    let all_had_some = turns.iter().all(|n| *n >= 2.0) && sum >= 3.0 * CLIENTS as f64;
    assert!(all_had_some && jain >= 0.95, "{sum}, Jain {jain:.3}: {turns:?}");
}

/// Locks of these names are listed beside what somebody else has put there. They are held by what is returned.
pub async fn names_are_listed_beside(
    locks: &Leasehold,
    names: &[&str],
    foreign: &[&str],
) -> Vec<Guard> {
    let mut guards = Vec::new();
    for name in names {
        guards.push(locks.mutex(*name).try_lock().await.unwrap());
    }
    let listed = locks.list("").await.unwrap();
    let mut shown: Vec<&str> = listed.iter().map(|lock| lock.name.as_str()).collect();
    let mut wanted = [names, foreign].concat();
    shown.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(shown, wanted);
    guards
}
