//! The line that a person sees while waiting: who holds the lock, since when, and our place.

use leasehold::kit::locked;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::Leasehold;
use leasehold::store::{ClaimInfo, LockInfo, Standing};

use crate::take::held_by;

/// Before the first line: most locks are had sooner, and flicker tells nobody anything.
const FIRST: Duration = Duration::from_millis(300);
const EACH: Duration = Duration::from_secs(1);

/// Which lock we wait for and how many are before us, as we last learnt; none: not waiting.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ahead(Arc<Mutex<Option<(String, usize)>>>);

impl Ahead {
    /// Notes it, and tells whether it is news.
    pub(crate) fn learn(&self, name: &str, ahead: usize) -> bool {
        let learnt = Some((name.to_owned(), ahead));
        let mut known = locked(&self.0);
        std::mem::replace(&mut *known, learnt.clone()) != learnt
    }

    fn get(&self) -> Option<(String, usize)> {
        locked(&self.0).clone()
    }
}

/// Shows the line for as long as it is polled. Reads the queue once a second.
pub(crate) async fn show(
    locks: &Leasehold,
    ahead: &Ahead,
    mut line: impl FnMut(String),
) -> std::convert::Infallible {
    tokio::time::sleep(FIRST).await;
    loop {
        if let Some((name, ahead)) = ahead.get() {
            // A store that does not answer now is the acquisition's to report.
            let info = locks.read(&name).await.ok().flatten();
            line(describe(&name, info.as_ref(), ahead));
        }
        tokio::time::sleep(EACH).await;
    }
}

fn describe(name: &str, info: Option<&LockInfo>, ahead: usize) -> String {
    let mut text = format!("waiting for {name:?}");
    if let Some(by) = info.and_then(held_by) {
        text.push_str(&format!(": {by}"));
    }
    let place = info.map_or(ahead + 1, |info| place(info, ahead));
    text.push_str(&format!("; place {place} of the queue"));
    text
}

/// Our number among those who wait, with so many before us: not counted are those who do not wait, holders and whoever
/// left the lock closed.
pub(crate) fn place(info: &LockInfo, ahead: usize) -> usize {
    let waits = |c: &&ClaimInfo| c.standing == Standing::Waiting;
    let others = info.claims.iter().filter(|c| !waits(c)).count();
    ahead.saturating_sub(others) + 1
}

#[cfg(test)]
mod tests {
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
            "waiting for \"x\": held by web-1 pid 7 (nightly) for 12s; place 2 of the queue"
        );
        assert_eq!(describe("x", None, 0), "waiting for \"x\"; place 1 of the queue");
    }

    /// The holder is gone, and the lock is kept closed after it; the next is first in the queue.
    #[test]
    fn f72_who_departed_is_not_said_to_hold_nor_counted_as_waiting() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let (since, left) = (Duration::from_secs(9), Some(Duration::from_secs(60)));
        let claim = ClaimInfo::new(Standing::Departed, holder, Token::new(1), 1, since, left);
        let info = LockInfo::new(Name::new("x").unwrap(), Kind::Mutex, 1, vec![claim]);
        assert_eq!(
            describe("x", Some(&info), 1),
            "waiting for \"x\": kept closed for 1m 0s more after web-1 pid 7 (nightly) had it; place \
             1 of the queue"
        );
    }
}
