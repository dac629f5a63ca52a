//! Measures a server's lock with many waiters in the queue.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use leasehold::{Client, Mutex};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::contention::{Outcome, Window};
use crate::measure::{Effort, Result, now};

/// A lease that is long enough for a crowd to enter the queue, so that none is renewed in the
/// window.
const LEASE: Duration = Duration::from_secs(60);

/// Runs `n` tasks on all clients except the first. The first client holds the lock until all tasks
/// are in the queue, so that the window shows turns and not the arrival of a crowd. Each task holds
/// for `hold`. `count` returns a server's number of requests.
pub(crate) async fn contend(
    clients: &[Client],
    n: usize,
    effort: Effort,
    hold: Duration,
    mut count: impl AsyncFnMut() -> Result<f64>,
) -> Result<Outcome> {
    let [first, others @ ..] = clients else { return Err("no clients".into()) };
    let held = first.mutex("contention").lease(LEASE).lock().await?;
    let joined = Arc::new(AtomicUsize::new(0));
    let (open, window) = watch::channel(None::<Window>);
    let mut running = JoinSet::new();
    for i in 0..n {
        let (joined, once) = (joined.clone(), Once::new());
        let lock = others[i % others.len()].mutex("contention").lease(LEASE);
        let lock = lock.on_waiting(move |_| {
            once.call_once(|| {
                joined.fetch_add(1, Ordering::SeqCst);
            });
        });
        running.spawn(turns_while(window.clone(), lock, hold));
    }
    while joined.load(Ordering::SeqCst) < n {
        if let Some(ended) = running.try_join_next() {
            return Err(format!("a contender gave up: {:?}", ended?.err()).into());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = count().await?;
    let window = Window::next(effort);
    tokio::time::sleep(window.opens_in()).await;
    open.send_replace(Some(window));
    held.release().await?;
    tokio::time::sleep(Duration::from_nanos(window.until.saturating_sub(now()))).await;
    let after = count().await?;
    // The other tasks finish their turns, so that nothing of this round remains in the next.
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    let mut outcome = Outcome::of(&notes?, effort.time);
    let turns = outcome.turns_per_second * effort.time.as_secs_f64();
    outcome.statements_per_turn = (after - before) / turns;
    Ok(outcome)
}

/// Takes turns until the window is closed.
async fn turns_while(
    window: watch::Receiver<Option<Window>>,
    lock: Mutex,
    hold: Duration,
) -> Result<Vec<u64>> {
    let mut notes = Vec::new();
    loop {
        let guard = lock.lock().await?;
        let note = now();
        if !hold.is_zero() {
            tokio::time::sleep(hold).await;
        }
        guard.release().await?;
        match *window.borrow() {
            Some(window) if note >= window.until => return Ok(notes),
            _ => notes.push(note),
        }
    }
}
