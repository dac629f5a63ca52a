//! leasehold's clients in the stories: their labels, and how they crash.

use std::time::{Duration, Instant};

use leasehold::{Client, MutexGuard};

use crate::stage::NOTHING;
use crate::trouble::{Result, Trouble};

/// The name of the lock in all stories.
pub(crate) const NAME: &str = "order";

/// A lease that has expired by the time a story checks.
pub(crate) const SHORT: Duration = Duration::from_millis(500);
/// A lease that is still running when a story checks or renews it, before the story waits for its
/// end. It is long enough for a busy machine.
pub(crate) const SEEN: Duration = Duration::from_secs(2);
/// A lease that expires in no story.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Connects a client with the label `who`.
pub(crate) async fn client(url: &str, who: &str) -> Result<Client> {
    Ok(leasehold::builder().label(who).connect(url).await?)
}

/// Returns the labels of the holders, according to the store.
pub(crate) async fn holder(locks: &Client) -> Result<String> {
    let info = locks.inspect(NAME).await?;
    let labels = info.iter().flat_map(|info| info.holders());
    let labels: Vec<String> = labels.map(|claim| claim.holder.label.clone()).collect();
    Ok(if labels.is_empty() { NOTHING.to_owned() } else { labels.join(" ") })
}

/// Waits until `count` claims wait for the lock.
pub(crate) async fn until_waiting(locks: &Client, count: usize) -> Result<()> {
    let end = Instant::now() + LONG;
    loop {
        let info = locks.inspect(NAME).await?;
        if info.is_some_and(|info| info.waiters().count() == count) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(Trouble::new(format!("timed out until {count} clients were waiting")));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Forgets a guard without releasing its lock, as if its process had been killed. Acquire such
/// locks with `no_renewal`, because the thread that would renew them keeps running here.
pub(crate) fn dies(guard: MutexGuard) {
    std::mem::forget(guard);
}
