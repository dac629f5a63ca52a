//! The conformance suite on this store.

use std::sync::LazyLock;

use leasehold_core::{Builder, Registry};
use tempfile::TempDir;

/// One file for all cases. Each case has its own lock names.
static PLACE: LazyLock<TempDir> =
    LazyLock::new(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());

leasehold_conformance::conformance_suite!(json, async {
    let registry = Registry::default().with("json", &["json"], own_store::open);
    Builder::new(registry)
        .connect(format!("json:{}/locks.json", PLACE.path().display()))
        .await
        .unwrap()
});
