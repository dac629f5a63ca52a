//! Runs an invocation of the command on one thread.

use crate::exit::Failure;

/// Number of descriptors that a runtime needs.
const DESCRIPTORS: usize = 8;

/// Runs the work of an invocation on the calling thread. The library uses its own thread for
/// renewals.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    // The runtime panics if it cannot open its descriptors, so this checks that there are enough.
    let spare = || std::fs::File::open("/dev/null");
    let spares: Result<Vec<_>, _> = std::iter::repeat_with(spare).take(DESCRIPTORS).collect();
    drop(spares.map_err(|e| Failure::system("cannot start", e))?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("cannot start", e))?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}
