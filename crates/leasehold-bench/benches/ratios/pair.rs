//! Measures an uncontended pair: one task alone acquires and releases a free lock.

use std::time::{Duration, Instant};

use leasehold::Client;
use tokio::runtime::{Builder, Runtime};

use crate::figures::Kind;
use crate::measure::{
    Effort, Measured, Result, Subject, alternate, digits, duration, keep, rate, table,
};
use crate::raw::{Flock, open_flock_close};
use crate::scratch::Scratch;

/// Compares `memory:` with tokio's mutex.
pub(crate) fn memory(effort: Effort) -> Result<()> {
    let runtime = runtime()?;
    let raw = tokio::sync::Mutex::new(());
    let locks = runtime.block_on(leasehold::connect("memory:pair"))?;
    let bare = time_pairs(&runtime, effort, async || {
        drop(raw.lock().await);
        Ok(())
    });
    let mut subjects = vec![Subject::new("tokio::sync::Mutex", bare)];
    subjects.extend(ours(&runtime, effort, &locks));
    let measured = alternate(effort, subjects)?;
    show("memory:, uncontended pair", &measured, 1);
    Ok(())
}

/// Compares `file:` with a bare flock, both on a file that stays open and on one that is opened and
/// closed.
pub(crate) fn file(effort: Effort) -> Result<()> {
    let runtime = runtime()?;
    let scratch = Scratch::new()?;
    let raw = Flock::open(scratch.path())?;
    let locks = runtime.block_on(leasehold::connect(scratch.url()))?;
    let bare = time_pairs(&runtime, effort, async || Ok(raw.with(|| ())?));
    let whole = time_pairs(&runtime, effort, async || Ok(open_flock_close(scratch.path())?));
    let mut subjects = vec![
        Subject::new("flock + unlock on an open file", bare),
        Subject::new("open + flock + close", whole),
    ];
    subjects.extend(ours(&runtime, effort, &locks));
    let measured = alternate(effort, subjects)?;
    show("file:, uncontended pair", &measured, 2);
    Ok(())
}

pub(crate) fn ours<'a>(
    runtime: &'a Runtime,
    effort: Effort,
    locks: &'a Client,
) -> [Subject<'a, f64>; 2] {
    let released = locks.mutex("pair");
    let dropped = locks.mutex("pair");
    let release = time_pairs(runtime, effort, async move || {
        Ok(released.lock().await?.release().await.map(drop)?)
    });
    let drop = time_pairs(runtime, effort, async move || {
        drop(dropped.lock().await?);
        Ok(())
    });
    [
        Subject::new("leasehold, lock + release", release),
        Subject::new("leasehold, lock + drop", drop),
    ]
}

/// Returns nanoseconds per pair.
pub(crate) fn time_pairs<'a>(
    runtime: &'a Runtime,
    effort: Effort,
    pair: impl AsyncFn() -> Result<()> + 'a,
) -> impl FnMut() -> Result<f64> + 'a {
    // Reading the clock costs as much as the fastest pair, so it is read once per hundred pairs.
    const BETWEEN_LOOKS: u32 = 100;
    move || {
        runtime.block_on(async {
            let (started, mut pairs) = (Instant::now(), 0_u32);
            let mut spent = Duration::ZERO;
            while spent < effort.time / 2 {
                for _ in 0..BETWEEN_LOOKS {
                    pair().await?;
                }
                pairs += BETWEEN_LOOKS;
                spent = started.elapsed();
            }
            Ok(spent.as_nanos() as f64 / f64::from(pairs))
        })
    }
}

pub(crate) fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Prints the results. The first `raws` subjects are the references for the others.
pub(crate) fn show(title: &str, measured: &[Measured<'_, f64>], raws: usize) {
    keep(Kind::Pair, title, measured, |nanos| *nanos);
    let mut head = vec!["", "time", "pairs/s"];
    let against: Vec<String> =
        measured[..raws].iter().map(|raw| format!("speed relative to {}", raw.name)).collect();
    head.extend(against.iter().map(String::as_str));
    let row = |m: &Measured<'_, f64>| {
        let nanos = m.median(|n| *n);
        let mut row = vec![m.name.to_owned(), duration(nanos), rate(1e9 / nanos)];
        row.extend(measured[..raws].iter().map(|raw| digits(raw.ratio(m, |n| *n))));
        row
    };
    table(title, &head, measured.iter().map(row).collect());
}
