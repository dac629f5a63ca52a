//! Blocks a thread on a future, and optionally also on a file descriptor that the future reads.
//!
//! Usually, a second thread reads the descriptor and then wakes the thread that waits. That costs
//! two thread switches per message. A future that is polled by [`block_on`] can declare with
//! [`listen`] that it reads the descriptor itself whenever it is polled. Then its thread sleeps on
//! the descriptor.
//!
//! # Why no wake-up is lost
//! - *Between the poll and the sleep*: a waker first sets `woken`, and then writes to the sleeper's
//!   eventfd (`bell`). The sleeper creates its eventfd before it checks `woken` for the last time.
//!   So either the sleeper sees `woken`, or the waker that sets it later finds the eventfd. A
//!   readable descriptor is noticed whenever the sleep begins.
//! - *Nested calls*: a `block_on` inside another one has its own parker. If a waker is called after
//!   its `block_on` has returned, the thread's next `block_on` polls once more than necessary.
//! - *No eventfd*: if the eventfd cannot be created, the thread cannot sleep on a descriptor and
//!   be woken by a waker at the same time. It then polls the future at short intervals.
//! - *Another executor*: an executor that polls with its own waker does not sleep here. [`listen`]
//!   recognizes this by the waker and returns `false`.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// The polling interval in a forked child process.
const IN_A_CHILD: Duration = Duration::from_millis(10);

/// The polling interval of a future that listens, if no eventfd can be created.
const WITHOUT_BELL: Duration = Duration::from_millis(10);

/// A descriptor to sleep on. It is shared, because its owner may be gone before the sleep ends.
type Descriptor = Arc<dyn AsFd + Send + Sync>;

thread_local! {
    /// The thread's parker, while no `block_on` uses it.
    static IDLE: RefCell<Option<Arc<Parker>>> = const { RefCell::new(None) };
    /// The waker of the `block_on` that is polling on this thread, and the descriptor to listen to.
    static POLLING: RefCell<Option<(Waker, Option<Descriptor>)>> = const { RefCell::new(None) };
}

/// Puts one thread to sleep and wakes it.
struct Parker {
    thread: Thread,
    woken: AtomicBool,
    /// The eventfd through which the thread is woken, set when it first sleeps on a descriptor.
    bell: OnceLock<OwnedFd>,
    process: u32,
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.woken.swap(true, Ordering::SeqCst) {
            return;
        }
        match self.bell.get() {
            // The write cannot block or fail: the counter is never full, and only this parker uses
            // it.
            Some(bell) => drop(rustix::io::write(bell, &1_u64.to_ne_bytes())),
            None => self.thread.unpark(),
        }
    }
}

impl Parker {
    fn of_this_thread() -> Arc<Self> {
        let idle = IDLE.try_with(|idle| idle.borrow_mut().take()).ok().flatten();
        idle.unwrap_or_else(|| {
            let (woken, bell) = (AtomicBool::new(false), OnceLock::new());
            let (thread, process) = (thread::current(), std::process::id());
            Arc::new(Self { thread, woken, bell, process })
        })
    }

    /// Sleeps until the thread is woken or `descriptor` is readable. May also return spuriously.
    fn sleep(&self, descriptor: Option<&Descriptor>) {
        if descriptor.is_some() && self.bell.get().is_none() {
            // If this fails, for example because the process has too many open files, the next
            // sleep tries again.
            if let Ok(bell) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
                let _ = self.bell.set(bell);
            }
        }
        if self.woken.swap(false, Ordering::SeqCst) {
            return;
        }
        let Some(bell) = self.bell.get() else {
            match descriptor {
                // No other task reads `descriptor`, because `listen` has returned `true`. So the
                // future must be polled again soon.
                Some(_) => thread::park_timeout(WITHOUT_BELL),
                None => thread::park(),
            }
            self.woken.swap(false, Ordering::SeqCst);
            return;
        };
        if self.process != std::process::id() {
            // A forked child shares its parent's eventfd, and must not consume the parent's
            // wake-ups.
            thread::sleep(IN_A_CHILD);
            return;
        }
        let mut both = vec![PollFd::new(bell, PollFlags::IN)];
        both.extend(descriptor.map(|descriptor| PollFd::new(descriptor, PollFlags::IN)));
        let _ = poll(&mut both, None);
        if both[0].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(bell, &mut [0; 8]);
        }
        self.woken.swap(false, Ordering::SeqCst);
    }
}

/// Polls `work` until it is ready, and sleeps between polls.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    let parker = Parker::of_this_thread();
    let waker = Waker::from(parker.clone());
    let mut context = Context::from_waker(&waker);
    let mut work = pin!(work);
    loop {
        let outer = polling(Some((waker.clone(), None)));
        let polled = work.as_mut().poll(&mut context);
        let descriptor = polling(outer).and_then(|(_, descriptor)| descriptor);
        match polled {
            Poll::Pending => parker.sleep(descriptor.as_ref()),
            Poll::Ready(done) => {
                let _ = IDLE.try_with(|idle| idle.replace(Some(parker)));
                return done;
            }
        }
    }
}

/// Replaces this thread's value of `POLLING`, and returns the previous one.
fn polling(now: Option<(Waker, Option<Descriptor>)>) -> Option<(Waker, Option<Descriptor>)> {
    POLLING.try_with(|polling| polling.replace(now)).ok().flatten()
}

/// Makes the thread sleep on `descriptor` until the next poll, for a future that reads `descriptor`
/// whenever it is polled. Returns whether the thread will do so. If not, another task must read
/// `descriptor` and wake the future.
pub fn listen(context: &Context<'_>, descriptor: &Descriptor) -> bool {
    let listens = POLLING.try_with(|polling| match &mut *polling.borrow_mut() {
        Some((waker, listened)) if waker.will_wake(context.waker()) => {
            *listened = Some(descriptor.clone());
            true
        }
        _ => false,
    });
    listens.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::future::poll_fn;
    use std::io::{PipeReader, Read, Write, pipe};
    use std::process::Command;

    use super::*;

    /// Reads a byte from a pipe. The future itself reads the descriptor.
    async fn byte(reader: Arc<PipeReader>) -> u8 {
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&reader, flags).unwrap();
        let descriptor: Descriptor = reader.clone();
        poll_fn(|context| {
            let mut one = [0];
            match (&*reader).read(&mut one) {
                Ok(1) => Poll::Ready(one[0]),
                _ => {
                    assert!(listen(context, &descriptor), "the thread would never be woken");
                    Poll::Pending
                }
            }
        })
        .await
    }

    fn after_a_while(work: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
        thread::spawn(|| {
            thread::sleep(Duration::from_millis(5));
            work();
        })
    }

    #[test]
    fn thread_is_woken_by_its_descriptor_and_by_wakers() {
        for i in 0..20 {
            let (reader, mut writer) = pipe().unwrap();
            let other = after_a_while(move || writer.write_all(&[i]).unwrap());
            assert_eq!(block_on(byte(Arc::new(reader))), i);
            other.join().unwrap();
            // Wakers work too, now that the thread has an eventfd.
            let (sender, receiver) = tokio::sync::oneshot::channel();
            let other = after_a_while(move || sender.send(i).unwrap());
            assert_eq!(block_on(receiver).unwrap(), i);
            other.join().unwrap();
            // Wakers work while the thread listens to a descriptor that never becomes readable.
            let (reader, _writer) = pipe().unwrap();
            let (sender, receiver) = tokio::sync::oneshot::channel();
            let other = after_a_while(move || sender.send(i).unwrap());
            let received = block_on(async {
                tokio::select! {
                    received = receiver => received.unwrap(),
                    _ = byte(Arc::new(reader)) => unreachable!(),
                }
            });
            assert_eq!(received, i);
            other.join().unwrap();
        }
    }

    #[test]
    fn wakers_that_race_the_sleep_are_not_missed() {
        let (reader, _writer) = pipe().unwrap();
        let descriptor: Descriptor = Arc::new(reader);
        let (sender, mut receiver) = tokio::sync::mpsc::channel::<u32>(1);
        let other = thread::spawn(move || {
            for i in 0..20_000 {
                block_on(sender.send(i)).unwrap();
            }
        });
        for expected in 0..20_000 {
            let got = block_on(poll_fn(|context| {
                let listens = expected % 3 != 0 && listen(context, &descriptor);
                assert_eq!(listens, expected % 3 != 0);
                receiver.poll_recv(context)
            }));
            assert_eq!(got, Some(expected));
        }
        other.join().unwrap();
    }

    /// Environment variable of a child process that may open only a few files.
    const FEW_FILES: &str = "LEASEHOLD_TEST_FEW_FILES";

    #[test]
    fn thread_reads_its_descriptor_even_if_no_eventfd_can_be_created() {
        if std::env::var_os(FEW_FILES).is_none() {
            let name = module_path!().split_once("::").unwrap().1;
            let name =
                format!("{name}::thread_reads_its_descriptor_even_if_no_eventfd_can_be_created");
            let mut shell = Command::new("sh");
            shell.args(["-c", r#"ulimit -n 64 && exec "$0" --exact "$1""#]);
            shell.arg(std::env::current_exe().unwrap()).arg(name).env(FEW_FILES, "1");
            let output = shell.output().unwrap();
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
            return;
        }
        let (reader, mut writer) = pipe().unwrap();
        let open: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        let other = thread::spawn(move || {
            // The reader sleeps long before that.
            thread::sleep(Duration::from_millis(200));
            writer.write_all(&[7]).unwrap();
            writer
        });
        thread::spawn(|| {
            thread::sleep(Duration::from_secs(20));
            // The test would never end.
            std::process::exit(1);
        });
        assert_eq!(block_on(byte(Arc::new(reader))), 7);
        drop((other.join().unwrap(), open));
    }

    #[test]
    fn nested_block_on_has_its_own_waker() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let (inner_sender, inner_receiver) = tokio::sync::oneshot::channel();
        let other = after_a_while(move || {
            sender.send(1).unwrap();
            thread::sleep(Duration::from_millis(5));
            inner_sender.send(2).unwrap();
        });
        let mut receiver = pin!(receiver);
        let mut inner_receiver = Some(inner_receiver);
        let both = block_on(poll_fn(|context| {
            // This blocks in a nested call after the outer waker was handed out. The outer waker is
            // called during that time.
            let outer = receiver.as_mut().poll(context);
            if let Some(inner) = inner_receiver.take() {
                assert_eq!(block_on(inner), Ok(2));
            }
            outer
        }));
        assert_eq!(both, Ok(1));
        other.join().unwrap();
    }

    #[test]
    fn listen_returns_false_under_another_executor() {
        let (reader, _writer) = pipe().unwrap();
        let descriptor: Descriptor = Arc::new(reader);
        let asked = || poll_fn(|context| Poll::Ready(listen(context, &descriptor)));
        assert!(block_on(asked()));
        assert!(!pollster::block_on(asked()));
        assert!(!block_on(async { pollster::block_on(asked()) }));
    }
}
