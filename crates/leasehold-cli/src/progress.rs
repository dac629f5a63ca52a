//! The line on the terminal during a wait: the holder, how long it has held the lock, and the queue
//! position.

use leasehold::store::kit::{LISTED_HOLDERS, locked};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::Client;
use leasehold::store::{ClaimState, LockInfo};

use crate::take::held_by;

/// Pause before the first line. It avoids flicker, because most locks are acquired sooner.
const FIRST: Duration = Duration::from_millis(300);
/// Pause between further lines.
const EACH: Duration = Duration::from_secs(1);

/// The lock that this client waits for, and how many claims are ahead. `None` if it does not wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ahead(Arc<Mutex<Option<(String, usize)>>>);

impl Ahead {
    /// Stores the position, and returns whether it changed.
    pub(crate) fn learn(&self, name: &str, ahead: usize) -> bool {
        let learnt = Some((name.to_owned(), ahead));
        let mut known = locked(&self.0);
        std::mem::replace(&mut *known, learnt.clone()) != learnt
    }

    fn get(&self) -> Option<(String, usize)> {
        locked(&self.0).clone()
    }
}

/// Shows the line while this future is polled. It reads the holders once per second, not the queue.
pub(crate) async fn show(
    locks: &Client,
    ahead: &Ahead,
    mut line: impl FnMut(String),
) -> std::convert::Infallible {
    tokio::time::sleep(FIRST).await;
    loop {
        if let Some((name, ahead)) = ahead.get() {
            // Errors are ignored here, because the acquisition reports an unreachable store.
            let info = locks.holders(&name).await.ok().flatten();
            line(describe(&name, info.as_ref(), ahead));
        }
        tokio::time::sleep(EACH).await;
    }
}

fn describe(name: &str, info: Option<&LockInfo>, ahead: usize) -> String {
    let place = info.and_then(|info| place(info, ahead)).unwrap_or(ahead + 1);
    waiting(name, place, info.and_then(held_by).as_deref())
}

/// Returns the line for the terminal.
pub(crate) fn waiting(name: &str, place: usize, held_by: Option<&str>) -> String {
    let by = held_by.map_or(String::new(), |by| format!(": {by}"));
    format!("waiting for {name:?} (position {place} in the queue){by}")
}

/// Returns the position among the waiters, with `ahead` claims ahead. Holders and cooldowns do not
/// count. Returns `None` if the lock may have more holders than the store lists.
pub(crate) fn place(info: &LockInfo, ahead: usize) -> Option<usize> {
    let others = others(info);
    (others < LISTED_HOLDERS).then(|| ahead.saturating_sub(others) + 1)
}

/// Returns how many claims hold the lock or are in a cooldown.
pub(crate) fn others(info: &LockInfo) -> usize {
    info.claims.iter().filter(|claim| claim.state != ClaimState::Waiting).count()
}

#[cfg(test)]
mod tests {
    use leasehold::store::ClaimInfo;
    use leasehold::{Holder, Kind, Name, Token};

    use super::*;

    #[test]
    fn waiting_line_shows_holder_duration_and_queue_position() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let claim = |claim_state, since| {
            let since = Duration::from_secs(since);
            ClaimInfo::new(claim_state, holder.clone(), Token::new(1), 1, since, None)
        };
        let claims = vec![claim(ClaimState::Holding, 12), claim(ClaimState::Waiting, 3)];
        let info = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, claims);
        assert_eq!(
            describe("x", Some(&info), 2),
            "waiting for \"x\" (position 2 in the queue): held by web-1 pid 7 (nightly) for 12s"
        );
        assert_eq!(describe("x", None, 0), "waiting for \"x\" (position 1 in the queue)");
    }

    // F72
    /// The holder is gone and the lock is in a cooldown: the next claim is first in the queue.
    #[test]
    fn claim_in_cooldown_is_neither_a_holder_nor_a_waiter() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let (since, left) = (Duration::from_secs(9), Some(Duration::from_secs(60)));
        let claim = ClaimInfo::new(ClaimState::Cooldown, holder, Token::new(1), 1, since, left);
        let info = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, vec![claim]);
        assert_eq!(
            describe("x", Some(&info), 1),
            "waiting for \"x\" (position 1 in the queue): in cooldown for 1m 0s more; last held by web-1 \
             pid 7 (nightly)"
        );
    }
}
