//! The line on the terminal during a wait: who holds the lock, since when, and the place in the queue.

use leasehold::kit::{LISTED_HOLDERS, locked};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::Leasehold;
use leasehold::store::{LockInfo, Standing};

use crate::take::held_by;

/// The pause before the first line, to avoid flicker: most locks are acquired sooner.
const FIRST: Duration = Duration::from_millis(300);
const EACH: Duration = Duration::from_secs(1);

/// The lock that is waited for, and how many claims are ahead. `None`: not waiting.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ahead(Arc<Mutex<Option<(String, usize)>>>);

impl Ahead {
    /// Stores it, and returns whether it changed.
    pub(crate) fn learn(&self, name: &str, ahead: usize) -> bool {
        let learnt = Some((name.to_owned(), ahead));
        let mut known = locked(&self.0);
        std::mem::replace(&mut *known, learnt.clone()) != learnt
    }

    fn get(&self) -> Option<(String, usize)> {
        locked(&self.0).clone()
    }
}

/// Shows the line while it is polled. Reads the holders once a second, not the queue.
pub(crate) async fn show(
    locks: &Leasehold,
    ahead: &Ahead,
    mut line: impl FnMut(String),
) -> std::convert::Infallible {
    tokio::time::sleep(FIRST).await;
    loop {
        if let Some((name, ahead)) = ahead.get() {
            // The acquisition reports a store that does not answer.
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

/// The line for a person.
pub(crate) fn waiting(name: &str, place: usize, held_by: Option<&str>) -> String {
    let by = held_by.map_or(String::new(), |by| format!(": {by}"));
    format!("waiting for {name:?} (place {place} in the queue){by}")
}

/// The place among the waiters, with this many claims ahead. Holders and cooldowns do not count.
/// `None`: there may be more of them than the store lists.
pub(crate) fn place(info: &LockInfo, ahead: usize) -> Option<usize> {
    let others = others(info);
    (others < LISTED_HOLDERS).then(|| ahead.saturating_sub(others) + 1)
}

/// How many claims hold the lock or are in a cooldown.
pub(crate) fn others(info: &LockInfo) -> usize {
    info.claims.iter().filter(|claim| claim.standing != Standing::Waiting).count()
}

#[cfg(test)]
mod tests {
    use leasehold::store::ClaimInfo;
    use leasehold::{Holder, Kind, Name, Token};

    use super::*;

    #[test]
    fn the_line_says_who_since_when_and_our_place() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let claim = |standing, since| {
            let since = Duration::from_secs(since);
            ClaimInfo::new(standing, holder.clone(), Token::new(1), 1, since, None)
        };
        let claims = vec![claim(Standing::Holding, 12), claim(Standing::Waiting, 3)];
        let info = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, claims);
        assert_eq!(
            describe("x", Some(&info), 2),
            "waiting for \"x\" (place 2 in the queue): held by web-1 pid 7 (nightly) for 12s"
        );
        assert_eq!(describe("x", None, 0), "waiting for \"x\" (place 1 in the queue)");
    }

    /// The holder is gone and the lock is in a cooldown: the next claim is first in the queue.
    #[test]
    fn f72_who_departed_is_not_said_to_hold_nor_counted_as_waiting() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let (since, left) = (Duration::from_secs(9), Some(Duration::from_secs(60)));
        let claim = ClaimInfo::new(Standing::Departed, holder, Token::new(1), 1, since, left);
        let info = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, vec![claim]);
        assert_eq!(
            describe("x", Some(&info), 1),
            "waiting for \"x\" (place 1 in the queue): in cooldown for 1m 0s more; last held by web-1 \
             pid 7 (nightly)"
        );
    }
}
