//! When to look at queues again: as soon as the store says that something stirred there, and else now and then.
//!
//! # Why nothing is missed
//! - *Following begins before the first look*, so what changes after that look is told. Where the store breaks it
//!   off, or cannot tell, the clock says when to look.
//! - *Whoever begins to follow later*, or again, looks [soon](AGAIN) after: what changed before that was told
//!   to nobody.
//! - *A hint is used up by a look, and by nothing else*: whoever is dropped while he waits, or while he looks,
//!   finds it again.
//! - *What nobody tells* (a lease that runs out unseen) is found by the look that comes anyway.
//!
//! However much changes, it looks [no more often](LEAST) than a person can see.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::base::clock::Moment;
use crate::client::core::Core;
use crate::store::{Follow, Queues};

/// How long it pauses between two looks at least.
const LEAST: Duration = Duration::from_millis(20);
/// How long it pauses at most, where it is told of changes.
const TOLD: Duration = Duration::from_secs(2);
/// How long it pauses at most, where it began to follow after its last look.
const AGAIN: Duration = Duration::from_millis(500);
/// How long beginning to follow may take, before it looks without.
const BEGIN: Duration = Duration::from_secs(2);

/// When to look.
#[derive(Debug)]
pub(crate) struct Looks {
    core: Arc<Core>,
    /// None of a name that is none, and where the store cannot tell.
    queues: Option<Queues>,
    /// The longest pause, where it is not told.
    every: Duration,
    /// The caller has said so, and means it.
    chosen: bool,
    follow: Option<Follow>,
    /// It has not looked since it began to follow.
    unseen: bool,
    /// When it last looked.
    looked: Option<Moment>,
    /// It is time, and nobody has looked since.
    due: bool,
}

/// Follows by itself, from its own first look.
impl Clone for Looks {
    fn clone(&self) -> Self {
        let (core, queues) = (self.core.clone(), self.queues.clone());
        Self { core, queues, follow: None, unseen: false, looked: None, due: false, ..*self }
    }
}

impl Looks {
    pub(crate) fn new(core: &Arc<Core>, queues: Option<Queues>, every: Duration) -> Self {
        let core = core.clone();
        Self {
            core,
            queues,
            every,
            chosen: false,
            follow: None,
            unseen: false,
            looked: None,
            due: false,
        }
    }

    /// Pauses no longer than this, however well it is told.
    pub(crate) fn every(&mut self, pause: Duration) {
        (self.every, self.chosen) = (pause, true);
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Resolves when it is time to look: at once the first time, and until [`looked`](Self::looked) is said.
    pub(crate) async fn time(&mut self) {
        if self.due {
            return;
        }
        let begins = self.looked.is_none();
        if self.follow.is_none() {
            self.begin().await;
        }
        if !begins {
            self.pause().await;
        }
        self.due = true;
    }

    /// It was looked, be it in vain.
    pub(crate) fn looked(&mut self, well: bool) {
        self.looked = Some(self.core.clock.now());
        (self.due, self.unseen) = (false, false);
        if !well {
            // Whatever made it fail may have made us deaf.
            self.follow = None;
        }
    }

    async fn begin(&mut self) {
        let Some(queues) = &self.queues else { return };
        let followed = {
            let followed = async { self.core.ours()?.follow(queues).await };
            let mut followed = pin!(followed);
            let followed = self.core.background.with_runtime(followed.as_mut());
            self.core.background.within(|| BEGIN, followed).await
        };
        // What cannot be followed now is looked at meanwhile.
        match followed {
            Some(Ok(Some(follow))) => (self.follow, self.unseen) = (Some(follow), true),
            // It is not asked again.
            Some(Ok(None)) => self.queues = None,
            Some(Err(_)) | None => {}
        }
    }

    async fn pause(&self) {
        let since = self.looked.map_or(Duration::ZERO, |at| self.core.clock.now().since(at));
        let most = match &self.follow {
            Some(_) if self.unseen => AGAIN.min(self.every),
            Some(_) if !self.chosen => TOLD.max(self.every),
            _ => self.every,
        };
        let until = |pause: Duration| self.core.background.sleep(pause.saturating_sub(since));
        until(LEAST.min(most)).await;
        let Some(follow) = &self.follow else { return until(most).await };
        tokio::select! {
            biased;
            () = follow.stirred() => {}
            () = until(most) => {}
        }
    }
}
