#![cfg(feature = "s3")]
#![allow(missing_docs)]
use leasehold_cell::objects;
use leasehold_core::Leasehold;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

static FOLDER: AtomicU64 = AtomicU64::new(0);
async fn client(url: &str) -> Leasehold {
    let runtime = tokio::runtime::Handle::current();
    let store = Arc::new(objects::connect(url, &runtime).await.unwrap());
    leasehold_core::Builder::default().store(store).unwrap()
}
leasehold_conformance::conformance_suite!(s3, async {
    let url = testbed::seaweed().url("conf") + "&poll_ms=50";
    let _ = FOLDER.fetch_add(1, SeqCst);
    client(&url).await
});
