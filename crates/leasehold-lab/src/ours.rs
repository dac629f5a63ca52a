//! leasehold's clients in the stories: who they are, and how they die.

use std::time::{Duration, Instant};

use leasehold::{Guard, Leasehold};

use crate::stage::NOTHING;
use crate::trouble::{Result, Trouble};

/// The lock of all stories.
pub(crate) const NAME: &str = "order";

/// A lease that is over before anybody looks.
pub(crate) const SHORT: Duration = Duration::from_millis(500);
/// A lease within which something is looked at, or renewed, before its end is waited for: long enough for
/// a machine that does much else.
pub(crate) const SEEN: Duration = Duration::from_secs(2);
/// A lease that ends in no story.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A client of its own, which says who it is.
pub(crate) async fn client(url: &str, who: &str) -> Result<Leasehold> {
    Ok(leasehold::builder().label(who).connect(url).await?)
}

/// Who holds the lock, by the store's word.
pub(crate) async fn holder(locks: &Leasehold) -> Result<String> {
    let info = locks.read(NAME).await?;
    let labels = info.iter().flat_map(|info| info.holders());
    let labels: Vec<String> = labels.map(|claim| claim.holder.label.clone()).collect();
    Ok(if labels.is_empty() { NOTHING.to_owned() } else { labels.join(" ") })
}

/// Returns when so many wait for the lock.
pub(crate) async fn until_waiting(locks: &Leasehold, count: usize) -> Result<()> {
    let end = Instant::now() + LONG;
    loop {
        let info = locks.read(NAME).await?;
        if info.is_some_and(|info| info.waiters().count() == count) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(Trouble::new(format!("timed out until {count} clients were waiting")));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What a process does for its locks when it is killed: nothing. Take them with `no_renewal`, for the
/// thread that would renew them lives on here.
pub(crate) fn dies(guard: Guard) {
    std::mem::forget(guard);
}
