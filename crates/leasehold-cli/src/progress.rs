//! The line that a person sees while waiting: who holds the lock, since when, and our place.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::Leasehold;
use leasehold::store::LockInfo;

use crate::table::short;

/// Before the first line: most locks are had sooner, and flicker tells nobody anything.
const FIRST: Duration = Duration::from_millis(300);
const EACH: Duration = Duration::from_secs(1);

/// How many are before us, as we last learnt; none: not waiting.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ahead(Arc<Mutex<Option<usize>>>);

impl Ahead {
    /// Notes it, and tells whether it is news.
    pub(crate) fn learn(&self, ahead: usize) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.replace(ahead) != Some(ahead)
    }

    fn get(&self) -> Option<usize> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shows the line for as long as it is polled. Reads the queue once a second.
pub(crate) async fn show(
    locks: &Leasehold,
    name: &str,
    ahead: &Ahead,
    mut line: impl FnMut(String),
) -> std::convert::Infallible {
    tokio::time::sleep(FIRST).await;
    loop {
        if let Some(ahead) = ahead.get() {
            // A store that does not answer now is the acquisition's to report.
            let info = locks.read(name).await.ok().flatten();
            line(describe(name, info.as_ref(), ahead));
        }
        tokio::time::sleep(EACH).await;
    }
}

fn describe(name: &str, info: Option<&LockInfo>, ahead: usize) -> String {
    let mut text = format!("waiting for {name:?}");
    let holders: Vec<_> = info.into_iter().flat_map(LockInfo::holders).collect();
    if let Some(first) = holders.first() {
        text.push_str(&format!(": held by {} for {}", first.holder, short(first.since)));
        if holders.len() > 1 {
            text.push_str(&format!(" and {} more", holders.len() - 1));
        }
    } else if info.is_some_and(|i| !i.claims.is_empty()) {
        text.push_str(": kept closed for a while");
    }
    let place = ahead.saturating_sub(holders.len()) + 1;
    text.push_str(&format!("; place {place} of the queue"));
    text
}

#[cfg(test)]
mod tests {
    use leasehold::store::{ClaimInfo, Standing};
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
}
