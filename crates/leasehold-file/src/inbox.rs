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

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, Weak};
use std::task::Context;

use tokio::net::unix::pipe::Receiver;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::session::Lines;
use super::waiters::Waiters;
use leasehold_core::kit::{listen, locked};

pub(super) struct Reader {
    fifo: Arc<File>,
    ear: Arc<dyn AsFd + Send + Sync>,
    waiters: Weak<Waiters>,
    lines: Mutex<Lines>,
    runtime: Handle,
    /// The task on the client's thread, while it reads.
    task: Mutex<Option<AbortHandle>>,
}

impl Reader {
    pub(super) fn new(fifo: Arc<File>, waiters: &Arc<Waiters>, runtime: &Handle) -> Arc<Self> {
        let (ear, waiters) = (fifo.clone(), Arc::downgrade(waiters));
        let (runtime, lines, task) = (runtime.clone(), Mutex::default(), Mutex::default());
        Arc::new(Self { fifo, ear, waiters, lines, runtime, task })
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
            lines.feed(&bytes[..n], &mut |id, signal| waiters.tell(id, signal));
        }
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
