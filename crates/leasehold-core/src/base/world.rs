//! The world in which a client lives: where its tasks run, and what chance decides.
//!
//! Programs live in the real one: tasks run on a thread of the client's own, ids come from the system.
//! With the feature `simulation`, a test makes worlds: each is one process of a simulation, whose tasks
//! all run on the test's own runtime, stand still while the process is stopped (or for ever, when it was
//! killed: nothing of it is dropped either), and draw their ids from a seed. The time of a simulation is
//! the runtime's, which the test has paused; see [`Clock`](crate::Clock).

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

#[cfg(feature = "simulation")]
pub use simulated::{Process, World};

/// Spawns a background task of a store on this runtime, in the process (real or simulated) that
/// runs the calling code.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let done = leasehold::kit::spawn_on(&tokio::runtime::Handle::current(), async { 7 });
/// assert_eq!(done.await.unwrap(), 7);
/// # }
/// ```
pub fn spawn_on<T: Send + 'static>(
    runtime: &Handle,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    #[cfg(feature = "simulation")]
    if let Some(world) = simulated::current() {
        return runtime.spawn(world.process(work));
    }
    runtime.spawn(work)
}

/// Spawns a task of the client whose code is running.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    #[cfg(feature = "simulation")]
    if let Some(world) = simulated::current() {
        drop(tokio::spawn(world.process(work)));
        return;
    }
    drop(tokio::spawn(work));
}

/// The process that the code runs in. A child that a simulated process forks is another.
pub(crate) fn process_id() -> u32 {
    #[cfg(feature = "simulation")]
    if let Some(world) = simulated::current() {
        return world.process_id();
    }
    std::process::id()
}

/// A number for a claim, where the world decides it.
pub(crate) fn chance() -> Option<u128> {
    #[cfg(feature = "simulation")]
    if let Some(world) = simulated::current() {
        return Some(world.chance());
    }
    None
}

#[cfg(feature = "simulation")]
mod simulated {
    use std::cell::RefCell;
    use std::pin::Pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Waker};

    use crate::base::locked::locked;

    thread_local! {
        static CURRENT: RefCell<Option<World>> = const { RefCell::new(None) };
    }

    /// The world of the code that is running. What a thread drops as it ends is in none.
    pub(super) fn current() -> Option<World> {
        CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
    }

    /// One process of a simulation. Clones are the same process.
    #[derive(Clone, Debug)]
    pub struct World {
        state: Arc<Mutex<State>>,
        process_id: u32,
    }

    #[derive(Debug)]
    struct State {
        seed: u64,
        stopped: bool,
        /// Who was to be polled meanwhile.
        sleepers: Vec<Waker>,
    }

    impl World {
        /// Creates a running process whose random numbers begin with this seed.
        pub fn new(seed: u64) -> Self {
            let state = State { seed, stopped: false, sleepers: Vec::new() };
            Self { state: Arc::new(Mutex::new(state)), process_id: std::process::id() }
        }

        /// Creates a forked child process. It has the work that is given to it, and none of the
        /// tasks of its parent.
        pub fn fork(&self) -> Self {
            let seed = u64::try_from(self.chance() >> 64).unwrap_or_default();
            Self { process_id: !self.process_id, ..Self::new(seed) }
        }

        pub(super) fn process_id(&self) -> u32 {
            self.process_id
        }

        /// Pauses the process like SIGSTOP, or kills it like SIGKILL if it is never resumed.
        pub fn stop(&self) {
            locked(&self.state).stopped = true;
        }

        /// Resumes the process like SIGCONT.
        pub fn go_on(&self) {
            let mut state = locked(&self.state);
            state.stopped = false;
            let sleepers = std::mem::take(&mut state.sleepers);
            drop(state);
            sleepers.into_iter().for_each(Waker::wake);
        }

        /// Returns a future that runs `work` in this process.
        pub fn process<F: Future + Send + 'static>(&self, work: F) -> Process<F::Output> {
            Process { world: self.clone(), work: Box::pin(work) }
        }

        /// The next number that this process draws (splitmix64, twice).
        pub(super) fn chance(&self) -> u128 {
            let mut state = locked(&self.state);
            let mut next = || {
                state.seed = state.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = state.seed;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                u128::from(z ^ (z >> 31))
            };
            next() << 64 | next()
        }
    }

    /// Work in a simulated process.
    pub struct Process<T> {
        world: World,
        work: Pin<Box<dyn Future<Output = T> + Send>>,
    }

    impl<T> std::fmt::Debug for Process<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Process").field("world", &self.world).finish_non_exhaustive()
        }
    }

    impl<T> Future for Process<T> {
        type Output = T;

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
            {
                let mut state = locked(&self.world.state);
                if state.stopped {
                    state.sleepers.push(cx.waker().clone());
                    return Poll::Pending;
                }
            }
            let before = CURRENT.replace(Some(self.world.clone()));
            let polled = self.work.as_mut().poll(cx);
            CURRENT.set(before);
            polled
        }
    }
}
