//! A pool of permits: at most three conversions run at once, however many processes start them.
//!
//! ```sh
//! cargo run -p leasehold --example permits
//! ```
//!
//! The semaphore serves waiters in their order. A big job takes two permits at once, and small jobs
//! cannot overtake it indefinitely. In a shell: `leasehold run --max 3 convert ./convert a.png`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::Error;

const PERMITS: u32 = 3;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let own = std::env::temp_dir().join(format!("leasehold-example-{}", std::process::id()));
    let url = format!("file:{}", own.display());
    let (in_use, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let work = |job: u32| {
        let (url, in_use, most) = (url.clone(), in_use.clone(), most.clone());
        // Every fourth job is big.
        let weight = if job % 4 == 3 { 2 } else { 1 };
        tokio::spawn(async move {
            // Each job has its own client, as separate processes would.
            let locks = leasehold::connect(&url).await?;
            let permits = locks.semaphore("example:convert", PERMITS);
            let guard = permits.acquire_many(weight).await?;
            let now = in_use.fetch_add(weight, Ordering::SeqCst) + weight;
            most.fetch_max(now, Ordering::SeqCst);
            println!("job {job:2} runs with {weight} of {PERMITS}; {now} in use");
            tokio::time::sleep(Duration::from_millis(50)).await;
            in_use.fetch_sub(weight, Ordering::SeqCst);
            guard.release().await.map(drop)
        })
    };
    for job in (0..12).map(work).collect::<Vec<_>>() {
        job.await.expect("no panic")?;
    }
    let _ = std::fs::remove_dir_all(own);
    let most = most.load(Ordering::SeqCst);
    println!("never more than {most} of {PERMITS} in use");
    assert!(most <= PERMITS);
    Ok(())
}
