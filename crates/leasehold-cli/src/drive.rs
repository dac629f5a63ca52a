//! The one thread that an invocation runs on.

use crate::exit::Failure;

/// How many descriptors a runtime takes.
const DESCRIPTORS: usize = 8;

/// Runs what an invocation does, on this one thread: the library has its own for renewals.
pub(crate) fn drive<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    // The runtime panics where it cannot have its own.
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
