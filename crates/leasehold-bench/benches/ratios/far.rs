//! Measures a distant server. Then only round trips matter, because they outweigh the computation
//! on both sides.

use std::time::Duration;

use testbed::{Redis, Setup};

use crate::line::Line;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::redis::{RELEASE, by_hand, connect_to};

const AWAY: Duration = Duration::from_micros(500);

/// Measures Redis with a round-trip time of half a millisecond.
pub(crate) fn redis(effort: Effort) -> Result<()> {
    let server = Redis::with(Setup::new().fast());
    let line = Line::to(server.port(), AWAY)?;
    let url = line.before(server.port(), &server.url());
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(&url))?;
    let raw = runtime.block_on(connect_to(&url))?;
    let script = ::redis::Script::new(RELEASE);
    let recipe =
        time_pairs(&runtime, effort, async || by_hand(&mut raw.clone(), &script, "raw").await);
    let mut subjects = vec![Subject::new("SET NX PX + compare-and-delete", recipe)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("redis:, 500µs away, uncontended pair", &alternate(effort, subjects)?, 1);
    Ok(())
}
