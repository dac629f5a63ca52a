//! The suite that every store of leasehold passes, on this one.

use std::sync::LazyLock;

use leasehold_core::{Builder, Registry};
use tempfile::TempDir;

/// One file for all cases: each takes names that nobody else has.
static PLACE: LazyLock<TempDir> =
    LazyLock::new(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());

leasehold_conformance::conformance_suite!(json, async {
    let registry = Registry::default().with("json", &["json"], own_store::open);
    Builder::new(registry)
        .connect(format!("json:{}/locks.json", PLACE.path().display()))
        .await
        .unwrap()
});
