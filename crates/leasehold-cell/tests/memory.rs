//! The suite that every store passes, on cells in memory.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use leasehold_cell::memory::MemoryCells;
use leasehold_cell::{CellStore, Cells, Options, promises};
use leasehold_core::store::{StoreInfo, Survival};
use leasehold_core::{Builder, Leasehold};
use tokio::runtime::Handle;

fn client(cells: &Arc<MemoryCells>, options: Options) -> Leasehold {
    let mut promised = promises(cells.system(), &options);
    promised.on_store_crash = Survival::NotApplicable;
    let info = StoreInfo::new("cells:", promised);
    let store = CellStore::new(cells.clone(), options, info, &Handle::current());
    Builder::default().store(Arc::new(store)).unwrap()
}

fn open_at_once() -> Options {
    Options { restart_delay: Some(Duration::ZERO), ..Options::default() }
}

static CELLS: LazyLock<Arc<MemoryCells>> = LazyLock::new(Arc::default);

leasehold_conformance::conformance_suite!(cells, async { client(&CELLS, open_at_once()) });
