//! The memory store passes the conformance suite.

use std::sync::Arc;

use leasehold::Builder;
use leasehold::store::MemoryStore;

leasehold::conformance_suite!(memory, async {
    leasehold::connect("memory:conformance").await.unwrap()
});

// Every token is told greater than the store draws it.
leasehold::conformance_suite!(token_offset, async {
    static STORE: std::sync::LazyLock<Arc<MemoryStore>> = std::sync::LazyLock::new(Arc::default);
    Builder::default().token_offset(1 << 60).store(STORE.clone()).unwrap()
});

// What a third party writes for a store of its own.
leasehold::conformance_suite!(third_party, ignored, async {
    static STORE: std::sync::LazyLock<Arc<MemoryStore>> = std::sync::LazyLock::new(Arc::default);
    Builder::default().store(STORE.clone()).unwrap()
});
