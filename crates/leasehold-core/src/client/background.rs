//! The thread that each client has of its own: renewals, heartbeats and what drops still owe.
//!
//! It runs a small tokio runtime that shares nothing with the caller's, so a caller that blocks
//! its executor for minutes, or has none, still keeps its locks. It ends when the client and all
//! its guards are gone *and* what they owed to the store is paid (or can no longer matter).
//!
//! A process that ends takes this thread along, with whatever is still owed. So whoever drops the
//! last of a client waits for that, for [`AT_THE_END`] at most, and a guard dropped just before
//! `main` returns is released. In a forked child there is nothing to wait for.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use crate::base::world::process_id;
use crate::words::error::{Error, ErrorKind, Result};

/// How long the last of a client to be dropped waits for what is owed.
const AT_THE_END: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Background {
    handle: Handle,
    debts: Arc<PendingCleanups>,
    thread: ThreadId,
    process: u32,
    _ends_when_dropped: oneshot::Sender<()>,
    #[cfg(feature = "simulation")]
    world: Option<crate::base::world::World>,
}

/// How much clean-up is still under way.
#[derive(Debug, Default)]
struct PendingCleanups {
    count: AtomicUsize,
    paid: Notify,
    /// The same news for a thread that blocks.
    blocked: (Mutex<()>, Condvar),
}

impl PendingCleanups {
    async fn all_paid(&self) {
        loop {
            let paid = self.paid.notified();
            if self.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            paid.await;
        }
    }

    /// Blocks until all is paid, or for `limit`.
    fn wait_blocking(&self, limit: Duration) {
        let owes = |(): &mut ()| self.count.load(Ordering::SeqCst) > 0;
        let (lock, paid) = &self.blocked;
        let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        drop(paid.wait_timeout_while(held, limit, owes));
    }
}

struct PendingCleanup(Arc<PendingCleanups>);

impl PendingCleanup {
    fn new(debts: &Arc<PendingCleanups>) -> Self {
        debts.count.fetch_add(1, Ordering::SeqCst);
        Self(debts.clone())
    }
}

impl Drop for PendingCleanup {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.paid.notify_waiters();
            // Under the lock, or the news could fall between another's look and its sleep.
            let (lock, paid) = &self.0.blocked;
            let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
            paid.notify_all();
        }
    }
}

impl Background {
    pub(crate) fn start() -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::new(ErrorKind::Config, "cannot start the background thread").because(e)
        };
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (sender, ended) = oneshot::channel::<()>();
        let debts = Arc::<PendingCleanups>::default();
        let owed = debts.clone();
        let work = move || {
            runtime.block_on(async {
                let _ = ended.await;
                owed.all_paid().await;
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("leasehold".into());
        let thread = thread.spawn(work).map_err(failed)?.thread().id();
        let process = process_id();
        Ok(Self {
            handle,
            debts,
            thread,
            process,
            _ends_when_dropped: sender,
            #[cfg(feature = "simulation")]
            world: None,
        })
    }

    /// A part of a simulation, on the runtime around it; it has no thread of its own.
    #[cfg(feature = "simulation")]
    pub(crate) fn inside(world: crate::base::world::World) -> Self {
        Self {
            handle: Handle::current(),
            debts: Arc::default(),
            thread: std::thread::current().id(),
            process: process_id(),
            _ends_when_dropped: oneshot::channel().0,
            world: Some(world),
        }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `work` on the background thread, whatever becomes of the caller.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        #[cfg(feature = "simulation")]
        if let Some(world) = &self.world {
            drop(self.handle.spawn(world.process(work)));
            return;
        }
        drop(self.handle.spawn(work));
    }

    /// As [`spawn`](Self::spawn), and keeps the thread alive until it is done.
    pub(crate) fn spawn_cleanup(&self, work: impl Future<Output = ()> + Send + 'static) {
        let debt = PendingCleanup::new(&self.debts);
        let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            let _debt = debt;
            work.await;
        });
        self.spawn(work);
    }

    /// What comes of `work` here and now, which is not expected to wait. `None` if it does.
    pub(crate) fn at_once<F: Future + ?Sized>(&self, work: Pin<&mut F>) -> Option<F::Output> {
        // A thread that is just ending may have no context left to enter.
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

    pub(crate) async fn all_paid(&self) {
        self.debts.all_paid().await;
    }

    /// Sleeps on the background thread's timer: works in any executor.
    pub(crate) fn sleep(&self, d: Duration) -> tokio::time::Sleep {
        let _context = self.handle.enter();
        tokio::time::sleep(d)
    }

    /// Polls `work` inside the caller's tokio runtime, or inside ours where the caller has none. It is
    /// pinned by the caller: a future that is handed over takes its place twice in that of the caller.
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

    /// `work`, or `None` if it takes longer than `limit`. For work that is ready at once no timer is
    /// made, nor asked how long the limit is; and no caller's future has room for one.
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
        let ours = self.process == process_id();
        // Its own thread would wait for itself.
        if ours && std::thread::current().id() != self.thread {
            self.debts.wait_blocking(AT_THE_END);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debts_are_paid_after_the_last_owner_is_gone() {
        let background = Background::start().unwrap();
        let (sender, paid) = std::sync::mpsc::channel();
        let sleep = background.sleep(Duration::from_millis(20));
        let work = async move {
            sleep.await;
            sender.send(()).unwrap();
        };
        background.spawn_cleanup(work);
        drop(background);
        paid.recv_timeout(Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn limits_hold_without_a_runtime() {
        let background = Background::start().unwrap();
        let never = std::future::pending::<()>();
        assert_eq!(pollster::block_on(background.within(|| Duration::from_millis(5), never)), None);
        let ready = background.within(|| Duration::ZERO, std::future::ready(7));
        assert_eq!(pollster::block_on(ready), Some(7));
    }
}
