//! Compares the SQL stores with each database's own means, through the same driver.
//!
//! *Pair*: a unique row that is inserted and deleted is the usual handmade lock (no lease, no
//! queue, no token). The database's own session lock occupies a connection while it is held. It is
//! measured on a server without durable writes, so that the work is compared and not the disk, and
//! on one with durable writes.
//!
//! *Contention*: the contenders share eight clients, each with its own connections and thread, as
//! on eight machines. A hand-over between two clients needs a notification or a poll. All are in
//! the queue before the first hand-over is measured. The session lock and the handmade row have a
//! connection for each contender, so a thousand contenders are too many for them. A contender that
//! finds the handmade row taken retries after 10 ms, which is usual.

mod bed;
mod byhand;
mod mysql;
mod postgres;
mod sqlite;

use tokio::runtime::{Builder, Runtime};

use crate::measure::{Effort, Result, alternate};
use crate::{pair, spread};

pub(crate) use mysql::{mariadb, mysql};
pub(crate) use postgres::all as postgres;
pub(crate) use sqlite::all as sqlite;

/// Maximum number of contenders for the session lock. With more, it would run out of connections.
const CONNECTIONS: usize = 100;

fn contenders(effort: Effort) -> [usize; 3] {
    [8, 32, effort.crowd]
}

/// Returns the effort with fewer rounds for a large crowd. Getting it into the queue and out of it
/// takes far longer than the window.
fn effort_of(n: usize, effort: Effort) -> Effort {
    Effort { rounds: if n > CONNECTIONS { effort.rounds.min(3) } else { effort.rounds }, ..effort }
}

const TABLE: &str = "CREATE TABLE byhand (name VARCHAR(200) PRIMARY KEY, owner VARCHAR(40) \
                     NOT NULL, expires BIGINT NOT NULL)";

/// Pool size, the same as leasehold's.
const POOL: u32 = 4;

/// Measures tasks with a name each, on two threads, compared with a handmade row for each.
fn many<P: Fn(usize) -> spread::Pair>(
    effort: Effort,
    what: &str,
    url: &str,
    by_hand: impl FnOnce(&Runtime) -> Result<P>,
) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let locks = runtime.block_on(leasehold::connect(url))?;
    let row = by_hand(&runtime)?;
    let subjects = vec![
        spread::subject("insert + delete of a row", &runtime, effort, row),
        spread::ours(&runtime, effort, &locks),
    ];
    let title = format!("{what}, {} tasks with a lock each", spread::TASKS);
    pair::show(&title, &alternate(effort, subjects)?, 1);
    Ok(())
}
