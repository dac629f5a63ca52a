//! The SQL stores beside what each database offers by hand, through the same driver.
//!
//! *Pair*: a unique row that is inserted and deleted, which is the lock that people write
//! themselves (no lease, no queue, no token), and the database's own session lock, which pins a
//! connection for as long as it is held. On a server that does not wait for its disk, so that what
//! is compared is the work and not the disk, and on one that does.
//!
//! *Contention*: the contenders are spread over eight clients, each with connections and a thread
//! of its own, as on eight machines; a hand-over between two clients needs a notification or a poll.
//! All stand in the queue before the first hand-over is measured. The session lock beside it, and the
//! row by hand, have a connection for each contender, so that a thousand are too many for them. Who
//! finds the row by hand taken asks again after 10 ms, as people do.

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

/// With more contenders than this the session lock would run out of connections.
const CONNECTIONS: usize = 100;

fn contenders(effort: Effort) -> [usize; 3] {
    [8, 32, effort.crowd]
}

/// Getting so many into the queue, and out of it again, takes far longer than the window.
fn effort_of(n: usize, effort: Effort) -> Effort {
    Effort { rounds: if n > CONNECTIONS { effort.rounds.min(3) } else { effort.rounds }, ..effort }
}

const TABLE: &str = "CREATE TABLE byhand (name VARCHAR(200) PRIMARY KEY, owner VARCHAR(40) \
                     NOT NULL, expires BIGINT NOT NULL)";

/// As many as ours has.
const POOL: u32 = 4;

/// Tasks with a name each, on two threads, beside a row by hand for each.
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
