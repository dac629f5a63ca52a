//! Renewal of the client's session.

use std::sync::Weak;
use std::time::Duration;

use leasehold_core::Moment;

use crate::shared::Shared;

/// The pause after a failed renewal.
const AGAIN: Duration = Duration::from_millis(300);

/// Renews the session for as long as the client lives and has claims. A client that has had no
/// claim for the length of a lease ends its session, and opens another one at its next call.
pub(crate) async fn beat(shared: Weak<Shared>) {
    let mut failed = false;
    let mut idle_since: Option<Moment> = None;
    loop {
        let Some(now) = shared.upgrade() else { return };
        let sessions = now.sessions.clone();
        let Some(session) = sessions.current() else {
            // No session has been opened yet, or since the last one ended.
            drop(now);
            idle_since = None;
            let _ = tokio::time::timeout(sessions.lifetimes.period, sessions.until_opened()).await;
            continue;
        };
        let period = sessions.lifetimes.period;
        let pause = if failed { AGAIN.min(period) } else { period };
        drop((now, sessions));
        tokio::time::sleep(pause).await;
        let Some(now) = shared.upgrade() else { return };
        let (clock, sessions) = (now.clock.clone(), now.sessions.clone());
        idle_since = match now.claims.is_empty() {
            true => idle_since.or_else(|| Some(clock.now())),
            false => None,
        };
        if idle_since.is_some_and(|since| clock.now().since(since) >= sessions.lifetimes.lease) {
            // A join registers its claim before it looks for a session.
            sessions.close_if(|| now.claims.is_empty()).await;
            continue;
        }
        drop(now);
        failed = sessions.touch(&session).await.is_err();
    }
}
