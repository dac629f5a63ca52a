//! Listening at our doorbell, and looking by ourselves for what nobody rang for.
//!
//! One task of each client, for all its waiters. While grants are rung for, it looks seldom: at pauses
//! that grow with the time that somebody waits, to a second. From the first grant on that it finds by
//! looking (whoever granted it could not ring, or is an older client, which does not), it looks as often
//! as a client without a bell, until it hears of a grant again.
//!
//! The bell is hung up when somebody first waits, or wants to hear of evictions: a grant before that is found by
//! the first looks. It is taken down as the client says goodbye, and hung up again if somebody waits nevertheless.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::background::POLL;
use super::doorbell::{Bell, Doorbells, Rung};
use super::shared::Shared;
use leasehold_core::store::Signal;
use leasehold_core::{ClaimId, Token};

/// The longest pause between two looks while grants are rung for.
const SELDOM: Duration = Duration::from_secs(1);

impl Shared {
    /// Tells our waiters of their grants. Never ends by itself.
    pub(super) async fn listen(self: Arc<Self>, doorbells: Arc<Doorbells>) {
        let mut bell: Option<Bell> = None;
        let mut looks = Looks { pause: POLL[0], rung: true };
        let mut next = pin!(sleep(Duration::ZERO));
        // Not at each ring: it takes as long as there are waiters.
        let mut is_time = true;
        let mut nobody_waited = true;
        let mut hears = self.hears.subscribe();
        loop {
            let nobody_waits = is_time && self.waiters.count() == 0;
            let needs_bell = is_time && (*hears.borrow_and_update() || !nobody_waits);
            if needs_bell && !bell.as_ref().is_some_and(Bell::hangs) {
                // The old one first: it takes the name along.
                drop(bell.take());
                bell = self.hang(&doorbells);
                looks.rung &= bell.is_some();
            }
            if nobody_waits {
                nobody_waited = true;
                tokio::select! {
                    // It may be older than that there are none.
                    () = self.waiters.more() => {}
                    _ = hears.changed() => {}
                    rung = rung(&mut bell) => drop(self.was_rung(rung).await),
                }
                continue;
            }
            if std::mem::take(&mut nobody_waited) {
                looks.begin();
                next.as_mut().reset(Instant::now() + looks.pause);
            }
            tokio::select! {
                _ = hears.changed() => {}
                rung = rung(&mut bell) => {
                    looks.rung |= self.was_rung(rung).await;
                    is_time = !looks.rung;
                }
                () = &mut next => {
                    let untold = self.find_granted().await;
                    looks.looked(untold);
                    next.as_mut().reset(Instant::now() + looks.pause);
                    is_time = true;
                }
            }
        }
    }

    /// Tells another client that a claim of its was granted.
    pub(super) fn ring(&self, session: &str, id: ClaimId, token: Token) {
        if let Some(doorbells) = self.doorbells.as_ref().filter(|_| session != self.session) {
            doorbells.ring(session, id, token);
        }
    }

    /// Tells whoever had these claims that they are gone. A hint: unheard, the next renewal finds out.
    pub(super) async fn ring_evicted(&self, evicted: Vec<ClaimId>) {
        let Some(doorbells) = self.doorbells.clone() else { return };
        // In a thread of its own: the directory may be large.
        let _ = tokio::task::spawn_blocking(move || doorbells.ring_all(&evicted)).await;
    }

    fn hang(&self, doorbells: &Arc<Doorbells>) -> Option<Bell> {
        let bell = doorbells.hang(&self.session).ok()?;
        let doorbells = doorbells.clone();
        // In a thread of its own: the directory may be large. Nobody waits for it.
        drop(tokio::task::spawn_blocking(move || doorbells.sweep()));
        Some(bell)
    }

    /// Tells what we were rung for; whether there was anything.
    async fn was_rung(&self, rung: Rung) -> bool {
        for (id, token) in &rung.granted {
            self.waiters.tell(*id, Signal::Granted(*token));
        }
        rung.evicted.iter().for_each(|id| self.ears.ask(*id));
        if rung.is_full {
            self.find_granted().await;
        }
        !rung.granted.is_empty()
    }

    /// Looks who of our waiters holds by now; whether there are any whom nobody had told.
    async fn find_granted(&self) -> bool {
        if self.waiters.count() == 0 {
            return false;
        }
        let hold = self.who_holds().await.unwrap_or_default();
        let mut untold = false;
        for (id, token) in hold {
            untold |= self.waiters.waiting(id).is_some();
            self.waiters.tell(id, Signal::Granted(token));
        }
        untold
    }
}

/// What a bell is rung for next. One that cannot be read any more is given up.
async fn rung(bell: &mut Option<Bell>) -> Rung {
    if let Some(hung) = bell {
        if let Ok(rung) = hung.rung().await {
            return rung;
        }
        *bell = None;
    }
    pending().await
}

/// When to look.
struct Looks {
    pause: Duration,
    /// Whether grants are rung for, as far as we know.
    rung: bool,
}

impl Looks {
    /// Somebody waits, after nobody did.
    fn begin(&mut self) {
        if !self.rung {
            self.pause = POLL[0];
        }
    }

    fn looked(&mut self, untold: bool) {
        self.rung &= !untold;
        let longest = if self.rung { SELDOM } else { POLL[1] };
        self.pause = if untold { POLL[0] } else { (self.pause * 3 / 2).min(longest) };
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::runtime::Handle;

    use super::*;
    use crate::store::SqlStore;
    use leasehold_core::store::{Joined, Mode, Store};
    use leasehold_core::{Claim, Kind, Name};

    async fn open(directory: &Path) -> Arc<SqlStore> {
        let url = format!("sqlite:{}", directory.join("locks.db").display());
        SqlStore::open(&url, &Handle::current()).await.unwrap()
    }

    fn claim(kind: Kind, weight: u32, capacity: u32) -> Claim {
        Claim::new(Name::new("door").unwrap(), kind, weight, capacity).unwrap()
    }

    async fn waits(store: &SqlStore, claim: &Claim) -> Token {
        match store.join(claim, Mode::Wait).await.unwrap() {
            Joined::Waiting(place) => place.token.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    async fn news(store: &SqlStore, claim: &Claim) -> Signal {
        let told = tokio::time::timeout(Duration::from_secs(30), store.changed(claim)).await;
        told.expect("nobody was told").unwrap()
    }

    /// Nobody looks here, so that only what is rung for is heard.
    #[tokio::test]
    async fn r11_who_grants_rings_for_each_of_those_whom_it_lets_in_and_for_nobody_else() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (open(directory.path()).await, open(directory.path()).await);
        other.tasks.iter().for_each(tokio::task::AbortHandle::abort);
        let shared = &other.shared;
        let mut bell = shared.doorbells.as_ref().unwrap().hang(&shared.session).unwrap();
        let writer = claim(Kind::RwLock, 8, 8);
        one.join(&writer, Mode::Try).await.unwrap();
        let readers = [claim(Kind::RwLock, 1, 8), claim(Kind::RwLock, 1, 8)];
        let last = claim(Kind::RwLock, 8, 8);
        let mut expected = Vec::new();
        for reader in &readers {
            expected.push((reader.id, waits(&other, reader).await));
        }
        waits(&other, &last).await;
        assert!(one.leave(&writer, None).await.unwrap());
        let mut rung = Vec::new();
        while let Ok(more) = tokio::time::timeout(Duration::from_millis(200), bell.rung()).await {
            rung.extend(more.unwrap().granted);
        }
        assert_eq!(rung, expected);
    }

    #[tokio::test]
    async fn p6_a_grant_that_nobody_rang_for_is_found_and_the_bell_hung_up_again() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (open(directory.path()).await, open(directory.path()).await);
        let bell = |store: &SqlStore| {
            let id = store.shared.session.rsplit_once('_').unwrap().1.to_owned();
            directory.path().join(format!("locks.db-bell-{id}"))
        };
        for _ in 0..3 {
            let (held, waiter) = (claim(Kind::Mutex, 1, 1), claim(Kind::Mutex, 1, 1));
            one.join(&held, Mode::Try).await.unwrap();
            let token = waits(&other, &waiter).await;
            while !bell(&other).exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            std::fs::remove_file(bell(&other)).unwrap();
            one.leave(&held, None).await.unwrap();
            assert_eq!(news(&other, &waiter).await, Signal::Granted(token));
            other.leave(&waiter, None).await.unwrap();
        }
        other.disconnect().await;
        assert!(!bell(&other).exists() && !bell(&one).exists());
    }

    #[test]
    fn it_looks_seldom_only_while_grants_are_rung_for() {
        let mut looks = Looks { pause: POLL[0], rung: true };
        let mut waited = Duration::ZERO;
        for _ in 0..30 {
            // However little is rung for, a grant is found in half the time that was waited already.
            assert!(
                looks.pause <= POLL[0].max(waited / 2 + POLL[0]),
                "{waited:?}: {:?}",
                looks.pause
            );
            waited += looks.pause;
            looks.looked(false);
        }
        assert_eq!(looks.pause, SELDOM);
        looks.begin();
        assert_eq!(looks.pause, SELDOM);
        looks.looked(true);
        assert_eq!(looks.pause, POLL[0]);
        (0..30).for_each(|_| looks.looked(false));
        assert_eq!(looks.pause, POLL[1]);
        looks.begin();
        assert_eq!(looks.pause, POLL[0]);
    }
}
