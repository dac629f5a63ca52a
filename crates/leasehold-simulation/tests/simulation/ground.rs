//! The system that keeps the queues of a world, and how each process reaches it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_cell::lasting::Lasting;
use leasehold_cell::memory::MemoryCells;
use leasehold_cell::{Answer, CellStore, Cells, Options, promises};
use leasehold_core::store::{Joined, MemoryStore, Mode, Store, StoreInfo};
use leasehold_core::{Claim, Clock, Kind, Name};
use tokio::runtime::Handle;

use crate::cells::{CellWire, Past};
use crate::net::{Net, Wire};
use crate::objects::{Objects, ValueWire};
use crate::plan::{Plan, System};

/// The longest pause between two polls.
const POLL: Duration = Duration::from_millis(60);
/// Maximum error of ages in objects.
pub(crate) const SKEW: Duration = Duration::from_secs(2);

/// The system that keeps the queues of a world. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Ground {
    keeps: Keeps,
    options: Options,
}

#[derive(Debug)]
enum Keeps {
    Memory(Arc<dyn Store>),
    Cells(Arc<MemoryCells>, Arc<Past<Answer>>),
    Objects(Objects),
}

impl Ground {
    pub(crate) fn new(plan: &Plan, rng: &mut fastrand::Rng) -> Arc<Self> {
        let clock = Clock::simulated(plan.server_fast, 0);
        let keeps = match plan.system {
            System::Memory => Keeps::Memory(Arc::new(MemoryStore::with_clock(clock))),
            System::Cache => {
                Keeps::Cells(Arc::new(MemoryCells::default().clock(clock)), Arc::default())
            }
            System::Stream => {
                Keeps::Cells(Arc::new(MemoryCells::like_a_stream().clock(clock)), Arc::default())
            }
            System::Objects => Keeps::Objects(Objects::new(clock, rng.fork())),
        };
        let (session, poll) = (plan.longest, POLL);
        let options = Options { prefix: String::new(), session, poll, ..Options::default() };
        Arc::new(Self { keeps, options })
    }

    /// Ends the initial delay. The system is new, so it has forgotten nothing.
    pub(crate) async fn open(self: Arc<Self>) {
        let Keeps::Cells(cells, _) = &self.keeps else { return };
        let at_once = Options { restart_delay: Some(Duration::ZERO), ..self.options.clone() };
        let store = in_cells(cells.clone(), at_once);
        let name = Name::new("opened").expect("a name");
        let claim = Claim::new(name, Kind::Mutex, 1, 1).expect("a claim");
        let joined =
            store.join(&claim, Mode::Try).await.expect("the store in this process replies");
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        store.leave(&claim, None).await.expect("the store in this process replies");
        store.disconnect().await;
    }

    /// Returns the store of one process, which uses that wire.
    pub(crate) async fn reached(self: Arc<Self>, wire: Arc<Wire>, clock: Clock) -> Arc<dyn Store> {
        let options = Options { clock: clock.clone(), ..self.options.clone() };
        let limit = (options.session / 5).clamp(Duration::from_millis(40), Duration::from_secs(3));
        match &self.keeps {
            Keeps::Memory(store) => {
                let info = StoreInfo::new("simulated:", store.guarantees().clone());
                Arc::new(Net { store: store.clone(), info, wire, echoes: Mutex::default() })
            }
            Keeps::Cells(cells, past) => {
                let (cells, past) = (cells.clone(), past.clone());
                let reached = CellWire { cells, past, wire, clock, limit };
                Arc::new(in_cells(Arc::new(reached), options))
            }
            Keeps::Objects(objects) => {
                let values = ValueWire { objects: objects.clone(), wire, limit };
                let cells = Lasting::new(values, 250, 1 << 20, SKEW).clock(clock);
                Arc::new(in_cells(Arc::new(cells), options))
            }
        }
    }

    /// Returns the observer's store, which uses no wire.
    pub(crate) async fn at_hand(self: Arc<Self>) -> Arc<dyn Store> {
        let options = Options { clock: Clock::simulated(0, 0), ..self.options.clone() };
        match &self.keeps {
            Keeps::Memory(store) => store.clone(),
            Keeps::Cells(cells, _) => Arc::new(in_cells(cells.clone(), options)),
            Keeps::Objects(objects) => {
                let cells = Lasting::new(objects.clone(), 250, 1 << 20, SKEW);
                Arc::new(in_cells(Arc::new(cells.clock(options.clock.clone())), options))
            }
        }
    }

    pub(crate) fn forget(&self) {
        if let Keeps::Cells(cells, _) = &self.keeps {
            cells.flush();
        }
    }
}

fn in_cells(cells: Arc<dyn Cells>, options: Options) -> CellStore {
    let info = StoreInfo::new("simulated:", promises(cells.system(), &options));
    CellStore::new(cells, options, info, &Handle::current())
}
