//! The environment of a client: where its tasks run, and where its random numbers come from.
//!
//! In a real program, tasks run on a thread of the client, and IDs come from the system. With the
//! feature `simulation`, a test creates a `World` for each process of a simulation:
//!
//! - The tasks of all simulated processes run on the test's own runtime.
//! - While a process is stopped, its tasks are not polled. A killed process stays stopped forever,
//!   and none of its values are dropped.
//! - Each process draws its IDs from a seed.
//! - The time is the runtime's, which the test has paused; see [`Clock`](crate::Clock).

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

#[cfg(feature = "simulation")]
pub use simulated::{Process, World};

/// Spawns a background task of a store on this runtime, in the process (real or simulated) that
/// runs the calling code.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let done = leasehold::store::kit::spawn_on(&tokio::runtime::Handle::current(), async { 7 });
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

/// Returns the ID of the process that runs the code. A fork of a simulated process has a different
/// ID.
pub(crate) fn process_id() -> u32 {
    #[cfg(feature = "simulation")]
    if let Some(world) = simulated::current() {
        return world.process_id();
    }
    std::process::id()
}

/// Returns a random number for a claim, or `None` outside a simulation.
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

    use crate::util::locked::locked;

    thread_local! {
        static CURRENT: RefCell<Option<World>> = const { RefCell::new(None) };
    }

    /// Returns the world of the running code, or `None` outside a simulation and in the destructors
    /// of a thread that is ending.
    pub(super) fn current() -> Option<World> {
        CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
    }

    /// One process of a simulation. Clones represent the same process.
    #[derive(Clone, Debug)]
    pub struct World {
        state: Arc<Mutex<State>>,
        process_id: u32,
    }

    #[derive(Debug)]
    struct State {
        seed: u64,
        stopped: bool,
        /// The wakers of tasks that were polled while the process was stopped.
        sleepers: Vec<Waker>,
    }

    impl World {
        /// Creates a running process whose random numbers are derived from this seed.
        pub fn new(seed: u64) -> Self {
            let state = State { seed, stopped: false, sleepers: Vec::new() };
            Self { state: Arc::new(Mutex::new(state)), process_id: std::process::id() }
        }

        /// Creates a forked child process. It runs only the work that is passed to
        /// [`process`](Self::process), and none of its parent's tasks.
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

        /// Draws the next random number of this process (splitmix64, twice).
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
