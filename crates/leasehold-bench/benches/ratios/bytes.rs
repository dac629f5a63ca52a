//! Measures a lock's cost in the client's memory: for a held guard, and for a waiter.
//!
//! It counts the bytes that the program allocates and does not free during the measurement. The
//! store of `memory:` is in the same memory, so its part is included. A waiter is a complete tokio
//! task.

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use leasehold::Client;
use tokio::task::JoinSet;

use crate::measure::{Effort, Result, table};
use crate::pair::runtime;
use crate::scratch::Scratch;

/// The system's allocator, which counts bytes while counting is enabled.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);

fn count(bytes: usize, sign: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        LIVE.fetch_add(sign * bytes as i64, Ordering::Relaxed);
    }
}

// SAFETY: all calls are passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: the caller's guarantees are passed on, and the memory came from the same
        // allocator.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, 1);
        count(layout.size(), -1);
        // SAFETY: the caller's guarantees are passed on, and the memory came from the same
        // allocator.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the bytes that `work` allocated and did not free, divided by `many`.
async fn bytes_each<T>(many: usize, work: impl Future<Output = Result<T>>) -> Result<(T, f64)> {
    LIVE.store(0, Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    let made = work.await;
    let live = LIVE.load(Ordering::Relaxed);
    COUNTS.store(false, Ordering::Relaxed);
    Ok((made?, live as f64 / many as f64))
}

/// Measures all stores that need no server.
pub(crate) fn all(effort: Effort) -> Result<()> {
    let scratch = Scratch::new()?;
    let mut rows = Vec::new();
    for (name, url) in [("memory:", "memory:bytes".to_owned()), ("file:", scratch.url())] {
        let figures = runtime()?.block_on(async {
            let locks = leasehold::connect(url).await?;
            let guard = guard(&locks, effort.crowd).await?;
            let waiter = waiter(&locks, effort.crowd).await?;
            let future = size_of_val(&locks.mutex("a").lock()) as f64;
            Ok::<_, Box<dyn Error + Send + Sync>>([guard, waiter, future])
        })?;
        let shown = figures.map(|bytes| format!("{bytes:.0} B"));
        rows.push([vec![name.to_owned()], shown.to_vec()].concat());
    }
    let head = ["", "a guard", "a waiting task", "the future of lock()"];
    table(&format!("memory of a client, each of {}", effort.crowd), &head, rows);
    Ok(())
}

async fn guard(locks: &Client, many: usize) -> Result<f64> {
    let (held, each) = bytes_each(many, async {
        let mut held = Vec::with_capacity(many);
        for n in 0..many {
            held.push(locks.mutex(format!("held:{n}")).lock().await?);
        }
        Ok(held)
    })
    .await?;
    drop(held);
    Ok(each)
}

async fn waiter(locks: &Client, many: usize) -> Result<f64> {
    let held = locks.mutex("wanted").lock().await?;
    let (waiting, each) = bytes_each(many, async {
        let mut waiting = JoinSet::new();
        for _ in 0..many {
            let lock = locks.mutex("wanted");
            waiting.spawn(async move { lock.lock().await.map(drop) });
        }
        while queued(locks).await? < many {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(waiting)
    })
    .await?;
    drop(waiting);
    drop(held);
    Ok(each)
}

async fn queued(locks: &Client) -> Result<usize> {
    let wanted = locks.inspect("wanted").await?;
    Ok(wanted.map_or(0, |lock| lock.waiters().count()))
}
