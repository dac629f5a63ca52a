//! The memory store passes the conformance suite.

use std::sync::Arc;

use leasehold::Builder;
use leasehold::store::MemoryStore;

leasehold::conformance_suite!(memory, async {
    leasehold::connect("memory:conformance").await.unwrap()
});

// This client raises the store's tokens by an offset.
leasehold::conformance_suite!(token_offset, async {
    static STORE: std::sync::LazyLock<Arc<MemoryStore>> = std::sync::LazyLock::new(Arc::default);
    Builder::default().token_offset(1 << 60).store(STORE.clone()).unwrap()
});

// This is how a third party tests its own store.
leasehold::conformance_suite!(third_party, ignored, async {
    static STORE: std::sync::LazyLock<Arc<MemoryStore>> = std::sync::LazyLock::new(Arc::default);
    Builder::default().store(STORE.clone()).unwrap()
});
