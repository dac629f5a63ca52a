//! Selects the thread that reads this client's inbox: the waiting thread, or the client's own.
//!
//! A message is for one of the waiters of this process. If the process has only one waiter, and the
//! waiter's thread is blocked ([`listen`]), that thread sleeps on the FIFO and reads the message
//! itself. All other waiters are notified by the client's thread, which reads for all of them.
//!
//! # Why no message is missed
//! - *Every waiter has a reader.* Each poll of a waiter either listens itself or makes the client's
//!   thread read. A message without a reader stays in the pipe until the next reader, and the
//!   pipe's capacity is the limit.
//! - *There may be two readers* while one takes over from the other. Each line is delivered by the
//!   thread that reads it. Both read and split lines under one mutex, so that a line that arrives
//!   in two pieces is joined.
//! - *The thread's task is aborted* only between two messages, by a waiter that reads from then on.
//! - *A holder is notified of its eviction.* The client's thread reads whenever no other thread
//!   does ([`Reader::on_eviction`]). After a thread has read itself, the client's thread takes over
//!   a moment later. So it does not disturb a thread that acquires locks repeatedly, and messages
//!   in that moment stay in the pipe.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Context;
use std::time::Duration;

use tokio::net::unix::pipe::Receiver;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::session::Lines;
use super::waiters::Waiters;
use leasehold_core::ClaimId;
use leasehold_core::kit::{listen, locked};
use leasehold_core::store::{EvictionListener, EvictionListeners, Signal};

/// Maximum time without a reader.
const UNREAD: Duration = Duration::from_millis(20);

pub(super) struct Reader {
    fifo: Arc<File>,
    fifo_descriptor: Arc<dyn AsFd + Send + Sync>,
    waiters: Weak<Waiters>,
    lines: Mutex<Lines>,
    runtime: Handle,
    /// Task on the client's thread, while it reads.
    task: Mutex<Option<AbortHandle>>,
    listeners: EvictionListeners,
    /// Whether a listener for evictions is registered.
    listens: AtomicBool,
    /// Number of waiters. If there is only one, that waiter may read the inbox itself.
    waiting: AtomicUsize,
    /// Whether the client's thread is about to take over.
    taking_over: AtomicBool,
}

/// Registration of a waiter, until it is dropped.
pub(super) struct Waiting<'a>(&'a Arc<Reader>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.take_over();
    }
}

impl Reader {
    pub(super) fn new(fifo: Arc<File>, waiters: &Arc<Waiters>, runtime: &Handle) -> Arc<Self> {
        let (fifo_descriptor, waiters) = (fifo.clone(), Arc::downgrade(waiters));
        let (runtime, lines, task) = (runtime.clone(), Mutex::default(), Mutex::default());
        let (listeners, listens, waiting, taking_over) = Default::default();
        Arc::new(Self {
            fifo,
            fifo_descriptor,
            waiters,
            lines,
            runtime,
            task,
            listeners,
            listens,
            waiting,
            taking_over,
        })
    }

    /// Registers a listener for claims that must be polled, from now on.
    pub(super) fn on_eviction(self: &Arc<Self>, listener: Weak<dyn EvictionListener>) {
        self.listeners.add(listener);
        self.listens.store(true, Ordering::SeqCst);
        self.take_over();
    }

    /// Reports a claim of this client that this client itself evicted.
    pub(super) fn evicted(&self, id: ClaimId) {
        self.listeners.ask(id);
    }

    /// Registers a waiter. The caller keeps the result as long as it waits.
    pub(super) fn waiting(self: &Arc<Self>) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(self)
    }

    /// Makes the client's thread read soon, unless a waiter then does so itself.
    fn take_over(self: &Arc<Self>) {
        let reads = || locked(&self.task).is_some();
        if !self.listens.load(Ordering::SeqCst) || reads() {
            return;
        }
        if self.taking_over.swap(true, Ordering::SeqCst) {
            return;
        }
        let reader = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(UNREAD).await;
            let Some(reader) = reader.upgrade() else { return };
            // This is reset before the check, so that a waiter that stops after the check starts
            // the takeover again.
            reader.taking_over.store(false, Ordering::SeqCst);
            if reader.waiting.load(Ordering::SeqCst) == 0 {
                // If this fails, an eviction is found at the next renewal.
                let _ = reader.read_on_the_client_s_thread();
            }
        });
    }

    /// Makes sure that a reader exists. Each poll of a waiter must call this before checking for
    /// notifications. If this fails, the waiter polls at its next heartbeat instead.
    pub(super) fn read_or_listen(self: &Arc<Self>, context: &Context<'_>) -> io::Result<()> {
        let alone = self.waiters.upgrade().is_some_and(|waiters| waiters.has_but_one());
        if !alone || !listen(context, &self.fifo_descriptor) {
            return self.read_on_the_client_s_thread();
        }
        if let Some(task) = locked(&self.task).take() {
            task.abort();
        }
        // After a full page there may be more data.
        while self.read_with(|bytes| Ok(rustix::io::read(&*self.fifo, bytes)?))? == PAGE {}
        Ok(())
    }

    fn read_on_the_client_s_thread(self: &Arc<Self>) -> io::Result<()> {
        let mut task = locked(&self.task);
        if task.is_some() {
            return Ok(());
        }
        let _context = self.runtime.enter();
        let inbox = self.fifo.try_clone().and_then(Receiver::from_file)?;
        let reader = Arc::downgrade(self);
        let reading = self.runtime.spawn(async move {
            while let Ok(()) = inbox.readable().await {
                let Some(reader) = reader.upgrade() else { return };
                if reader.read_with(|bytes| inbox.try_read(bytes)).is_err() {
                    return;
                }
            }
        });
        *task = Some(reading.abort_handle());
        Ok(())
    }

    /// Reads once and delivers the messages. Returns the number of bytes read.
    fn read_with(&self, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let mut bytes = [0; PAGE];
        let mut held = Vec::new();
        let mut lines = locked(&self.lines);
        let n = match read(&mut bytes) {
            Ok(n) => n,
            Err(e) => match e.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(0),
                // A FIFO that is also open for writing here has no end and no errors.
                _ => return Err(e),
            },
        };
        if let Some(waiters) = self.waiters.upgrade() {
            lines.feed(&bytes[..n], &mut |id, signal| {
                if !waiters.notify(id, signal) && signal == Signal::Ask {
                    held.push(id);
                }
            });
        }
        drop(lines);
        held.into_iter().for_each(|id| self.listeners.ask(id));
        Ok(n)
    }
}

const PAGE: usize = 4096;

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(task) = locked(&self.task).take() {
            task.abort();
        }
    }
}
