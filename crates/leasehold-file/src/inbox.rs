//! Who reads this client's inbox: the thread that waits, or the client's own.
//!
//! A message is for one of the waiters here. Where that is the only one, and its thread is blocked until it
//! is told ([`listen`]), the thread sleeps on the FIFO and reads it itself. Any other waiter is told by
//! the client's thread, which reads for all of them.
//!
//! # Why nothing is missed
//! - *Whoever waits has a reader*: each poll of a waiter either listens itself or sees to it that the client's
//!   thread does. What nobody reads is for nobody; it stays in the pipe until the next reader, and the
//!   pipe's length is the bound.
//! - *Two readers*, while the one takes over from the other: each line is told by whoever reads it. Both read
//!   and cut into lines under one mutex, so that a line in two pieces is put together.
//! - *The thread's task is aborted* only between two messages, by a waiter that reads from then on.
//! - *Whoever holds hears that it was evicted*: the client's thread reads whenever nobody else does ([`Reader::hear`]).
//!   After a thread has read itself it takes over a moment later: who takes a lock again and again is not in its way,
//!   and what comes in that moment is in the pipe.

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
use leasehold_core::store::{Ear, Ears, Signal};

/// How long nobody reads, at most.
const UNREAD: Duration = Duration::from_millis(20);

pub(super) struct Reader {
    fifo: Arc<File>,
    ear: Arc<dyn AsFd + Send + Sync>,
    waiters: Weak<Waiters>,
    lines: Mutex<Lines>,
    runtime: Handle,
    /// The task on the client's thread, while it reads.
    task: Mutex<Option<AbortHandle>>,
    ears: Ears,
    /// Somebody wants to hear of evictions.
    hears: AtomicBool,
    /// How many wait, of whom one may read itself.
    waiting: AtomicUsize,
    /// The client's thread is about to take over.
    taking_over: AtomicBool,
}

/// One that waits, until it is dropped.
pub(super) struct Waiting<'a>(&'a Arc<Reader>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.take_over();
    }
}

impl Reader {
    pub(super) fn new(fifo: Arc<File>, waiters: &Arc<Waiters>, runtime: &Handle) -> Arc<Self> {
        let (ear, waiters) = (fifo.clone(), Arc::downgrade(waiters));
        let (runtime, lines, task) = (runtime.clone(), Mutex::default(), Mutex::default());
        let (ears, hears, waiting, taking_over) = Default::default();
        Arc::new(Self {
            fifo,
            ear,
            waiters,
            lines,
            runtime,
            task,
            ears,
            hears,
            waiting,
            taking_over,
        })
    }

    /// Tells this one of claims that are to be asked about, from now on.
    pub(super) fn hear(self: &Arc<Self>, ear: Weak<dyn Ear>) {
        self.ears.add(ear);
        self.hears.store(true, Ordering::SeqCst);
        self.take_over();
    }

    /// A claim of this client's was evicted by this client.
    pub(super) fn evicted(&self, id: ClaimId) {
        self.ears.ask(id);
    }

    /// To be kept by one that waits for as long as it does.
    pub(super) fn waiting(self: &Arc<Self>) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(self)
    }

    /// Has the client's thread read, soon, unless somebody waits then, who sees to it himself.
    fn take_over(self: &Arc<Self>) {
        let reads = || locked(&self.task).is_some();
        if !self.hears.load(Ordering::SeqCst) || reads() {
            return;
        }
        if self.taking_over.swap(true, Ordering::SeqCst) {
            return;
        }
        let reader = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(UNREAD).await;
            let Some(reader) = reader.upgrade() else { return };
            // Before the look: whoever stops waiting after it begins anew.
            reader.taking_over.store(false, Ordering::SeqCst);
            if reader.waiting.load(Ordering::SeqCst) == 0 {
                // Unheard, the next renewal finds out.
                let _ = reader.read_on_the_client_s_thread();
            }
        });
    }

    /// To be called in each poll of a waiter, before it looks what it was told: sees to it that it will be
    /// told. An error: it cannot be, and its heartbeat asks instead.
    pub(super) fn read_or_listen(self: &Arc<Self>, context: &Context<'_>) -> io::Result<()> {
        let alone = self.waiters.upgrade().is_some_and(|waiters| waiters.has_but_one());
        if !alone || !listen(context, &self.ear) {
            return self.read_on_the_client_s_thread();
        }
        if let Some(task) = locked(&self.task).take() {
            task.abort();
        }
        // A full page may not be all there is.
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

    /// Reads once, and tells whom it concerns. Tells how much it was.
    fn read_with(&self, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let mut bytes = [0; PAGE];
        let mut held = Vec::new();
        let mut lines = locked(&self.lines);
        let n = match read(&mut bytes) {
            Ok(n) => n,
            Err(e) => match e.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(0),
                // A FIFO that we have open for writing too has no end and no errors.
                _ => return Err(e),
            },
        };
        if let Some(waiters) = self.waiters.upgrade() {
            lines.feed(&bytes[..n], &mut |id, signal| {
                if !waiters.tell(id, signal) && signal == Signal::Ask {
                    held.push(id);
                }
            });
        }
        drop(lines);
        held.into_iter().for_each(|id| self.ears.ask(id));
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
