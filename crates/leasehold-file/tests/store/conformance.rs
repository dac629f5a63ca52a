//! Runs the conformance suite on this crate's stores.

leasehold_conformance::conformance_suite!(file, async {
    leasehold::connect(concat!("file:", env!("CARGO_TARGET_TMPDIR"), "/conformance")).await.unwrap()
});
