//! The background thread of a client: renewals, heartbeats and pending releases.
//!
//! It runs a small tokio runtime that shares nothing with the caller's, so a caller that blocks
//! its executor for minutes, or has none, still keeps its locks. It ends when the client and all
//! its guards are gone *and* their pending releases are done (or can no longer matter).
//!
//! The end of the process ends this thread and the releases that are still pending.
//! [`Client::close`](crate::Client::close) waits for these releases. Dropping the last handle of a
//! client does not, because it may run on the thread of an async executor. Only a client of the
//! blocking API waits, for [`LAST_DROP_WAIT`] at most, so a guard that is dropped just before
//! `main` returns is released. In a forked child there is nothing to wait for.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use crate::types::error::{Error, ErrorKind, Result};
use crate::util::world::process_id;

/// How long dropping the last handle of a blocking client waits for pending releases.
const LAST_DROP_WAIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Background {
    handle: Handle,
    cleanups: Arc<PendingCleanups>,
    thread: ThreadId,
    process: u32,
    /// Whether dropping the last handle may block.
    may_block: AtomicBool,
    _ends_when_dropped: oneshot::Sender<()>,
    #[cfg(feature = "simulation")]
    world: Option<crate::util::world::World>,
}

/// The number of pending releases, and the notification when it reaches zero.
#[derive(Debug, Default)]
struct PendingCleanups {
    count: AtomicUsize,
    done: Notify,
    /// The same notification, for a blocking thread.
    blocked: (Mutex<()>, Condvar),
}

impl PendingCleanups {
    async fn all_done(&self) {
        loop {
            let done = self.done.notified();
            if self.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            done.await;
        }
    }

    /// Blocks until nothing is pending, or for at most `limit`.
    fn wait_blocking(&self, limit: Duration) {
        let is_pending = |(): &mut ()| self.count.load(Ordering::SeqCst) > 0;
        let (lock, done) = &self.blocked;
        let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        drop(done.wait_timeout_while(held, limit, is_pending));
    }
}

struct PendingCleanup(Arc<PendingCleanups>);

impl PendingCleanup {
    fn new(cleanups: &Arc<PendingCleanups>) -> Self {
        cleanups.count.fetch_add(1, Ordering::SeqCst);
        Self(cleanups.clone())
    }
}

impl Drop for PendingCleanup {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.done.notify_waiters();
            // The mutex is locked, because otherwise the notification could fall between the check
            // and the sleep of a waiting thread.
            let (lock, done) = &self.0.blocked;
            let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
            done.notify_all();
        }
    }
}

impl Background {
    pub(crate) fn start() -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::new(ErrorKind::Config, "cannot start the background thread").with_source(e)
        };
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (sender, ended) = oneshot::channel::<()>();
        let cleanups = Arc::<PendingCleanups>::default();
        let pending = cleanups.clone();
        let work = move || {
            runtime.block_on(async {
                let _ = ended.await;
                pending.all_done().await;
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("leasehold".into());
        let thread = thread.spawn(work).map_err(failed)?.thread().id();
        let process = process_id();
        Ok(Self {
            handle,
            cleanups,
            thread,
            process,
            may_block: AtomicBool::new(false),
            _ends_when_dropped: sender,
            #[cfg(feature = "simulation")]
            world: None,
        })
    }

    /// Creates the background of a simulated process, on the surrounding runtime and without a
    /// thread.
    #[cfg(feature = "simulation")]
    pub(crate) fn inside(world: crate::util::world::World) -> Self {
        Self {
            handle: Handle::current(),
            cleanups: Arc::default(),
            thread: std::thread::current().id(),
            process: process_id(),
            may_block: AtomicBool::new(false),
            _ends_when_dropped: oneshot::channel().0,
            world: Some(world),
        }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Lets the drop of the last handle wait for pending releases.
    pub(crate) fn allow_blocking(&self) {
        self.may_block.store(true, Ordering::Relaxed);
    }

    /// Runs `work` on the background thread, independently of the caller.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        #[cfg(feature = "simulation")]
        if let Some(world) = &self.world {
            drop(self.handle.spawn(world.process(work)));
            return;
        }
        drop(self.handle.spawn(work));
    }

    /// Runs `work` like [`spawn`](Self::spawn), and keeps the thread alive until it is done.
    pub(crate) fn spawn_cleanup(&self, work: impl Future<Output = ()> + Send + 'static) {
        let cleanup = PendingCleanup::new(&self.cleanups);
        let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            let _cleanup = cleanup;
            work.await;
        });
        self.spawn(work);
    }

    /// Polls `work` once and returns its result, or `None` if it is not ready. Use it for work that
    /// is usually ready at the first poll.
    pub(crate) fn at_once<F: Future + ?Sized>(&self, work: Pin<&mut F>) -> Option<F::Output> {
        // A thread that is ending may no longer be able to enter a runtime context.
        let ending = Handle::try_current().is_err_and(|e| e.is_thread_local_destroyed());
        if ending {
            return None;
        }
        let _context = self.handle.enter();
        match work.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    pub(crate) async fn all_done(&self) {
        self.cleanups.all_done().await;
    }

    /// Sleeps on the background thread's timer. Works in any executor.
    pub(crate) fn sleep(&self, d: Duration) -> tokio::time::Sleep {
        let _context = self.handle.enter();
        tokio::time::sleep(d)
    }

    /// Polls `work` inside the caller's tokio runtime, or inside the background runtime if the
    /// caller has none.
    ///
    /// The caller pins the future. A future passed by value would take its space twice in the
    /// caller's future.
    pub(crate) async fn with_runtime<F: Future + ?Sized>(
        &self,
        mut work: Pin<&mut F>,
    ) -> F::Output {
        poll_fn(|cx| {
            let _context = Handle::try_current().is_err().then(|| self.handle.enter());
            work.as_mut().poll(cx)
        })
        .await
    }

    /// Returns the result of `work`, or `None` if it takes longer than `limit`.
    ///
    /// If `work` is ready at the first poll, no timer is created and `limit` is not called. The
    /// timer is boxed, so the caller's future needs no space for it.
    pub(crate) async fn within<F: Future>(
        &self,
        limit: impl FnOnce() -> Duration,
        work: F,
    ) -> Option<F::Output> {
        let mut work = pin!(work);
        let first = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
        if let Poll::Ready(done) = first {
            return Some(done);
        }
        let over = Box::pin(self.sleep(limit()));
        tokio::select! {
            biased;
            done = work => Some(done),
            () = over => None,
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let is_forked = self.process != process_id();
        let is_own_thread = std::thread::current().id() == self.thread;
        // An async task may also drop a blocking client.
        let is_async = Handle::try_current().is_ok();
        if *self.may_block.get_mut() && !is_forked && !is_own_thread && !is_async {
            self.cleanups.wait_blocking(LAST_DROP_WAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_cleanups_complete_after_the_last_handle_is_dropped() {
        let background = Background::start().unwrap();
        let (sender, done) = std::sync::mpsc::channel();
        let sleep = background.sleep(Duration::from_millis(20));
        let work = async move {
            sleep.await;
            sender.send(()).unwrap();
        };
        background.spawn_cleanup(work);
        drop(background);
        done.recv_timeout(Duration::from_secs(10)).unwrap();
    }

    /// Drops the last handle while a release is pending, and returns whether that blocked.
    fn drop_blocks(may_block: bool) -> bool {
        let background = Background::start().unwrap();
        if may_block {
            background.allow_blocking();
        }
        background.spawn_cleanup(std::future::pending());
        let start = std::time::Instant::now();
        drop(background);
        start.elapsed() >= LAST_DROP_WAIT
    }

    #[test]
    fn only_blocking_clients_wait_on_drop() {
        // On a loaded machine a drop may take that long without blocking, but not every time.
        assert!((0..5).any(|_| !drop_blocks(false)));
        assert!(drop_blocks(true));
    }

    #[test]
    fn drop_never_blocks_an_async_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!((0..5).any(|_| !runtime.block_on(async { drop_blocks(true) })));
    }

    #[test]
    fn time_limits_work_without_a_runtime() {
        let background = Background::start().unwrap();
        let never = std::future::pending::<()>();
        assert_eq!(pollster::block_on(background.within(|| Duration::from_millis(5), never)), None);
        let ready = background.within(|| Duration::ZERO, std::future::ready(7));
        assert_eq!(pollster::block_on(ready), Some(7));
    }
}
