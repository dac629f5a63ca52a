//! Measures many tasks at once, each with its own lock: how many pairs they complete together.

use std::pin::Pin;

use leasehold::{Client, Mutex};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::contention::Window;
use crate::measure::{Effort, Result, Subject, now};

pub(crate) const TASKS: usize = 32;

type Pairing = Pin<Box<dyn Future<Output = Result<()>> + Send>>;
/// The operation that one task repeats.
pub(crate) type Pair = Box<dyn FnMut() -> Pairing + Send>;

/// Returns a task's operation, which clones `with` for each pair.
pub(crate) fn task<T, F>(with: T, pair: fn(T) -> F) -> Pair
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<()>> + Send + 'static,
{
    Box::new(move || Box::pin(pair(with.clone())))
}

/// Measures another subject, in nanoseconds per pair of all tasks together.
pub(crate) fn subject<'a>(
    name: &'a str,
    runtime: &'a Runtime,
    effort: Effort,
    each: impl Fn(usize) -> Pair + 'a,
) -> Subject<'a, f64> {
    Subject::new(name, move || runtime.block_on(spread(effort, &each)))
}

pub(crate) fn ours<'a>(
    runtime: &'a Runtime,
    effort: Effort,
    locks: &'a Client,
) -> Subject<'a, f64> {
    subject("leasehold", runtime, effort, |i| {
        task(locks.mutex(format!("ours {i}")), |mutex: Mutex| async move {
            Ok(mutex.lock().await?.release().await.map(drop)?)
        })
    })
}

async fn spread(effort: Effort, each: impl Fn(usize) -> Pair) -> Result<f64> {
    let window = Window::next(effort);
    let mut running: JoinSet<Result<u64>> = JoinSet::new();
    for i in 0..TASKS {
        let mut pair = each(i);
        running.spawn(async move {
            tokio::time::sleep(window.opens_in()).await;
            let mut pairs = 0_u64;
            while now() < window.until {
                pair().await?;
                pairs += 1;
            }
            Ok(pairs)
        });
    }
    let mut all = 0;
    for pairs in running.join_all().await {
        all += pairs?;
    }
    Ok(effort.time.as_nanos() as f64 / all as f64)
}
