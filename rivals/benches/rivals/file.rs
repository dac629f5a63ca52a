//! Files: the lock files of `distributed-lock`, whose waiters poll.

use distributed_lock_core::{DistributedLock, LockHandle};
use distributed_lock_file::FileDistributedLock;

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::scratch::Scratch;
use crate::{CONTENDERS, clients, ours, turn_of, two_threads};

pub(crate) fn all(effort: Effort) -> Result<()> {
    let scratch = Scratch::new()?;
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(scratch.url()))?;
    let lock = FileDistributedLock::from_path(scratch.path().join("pair"))?;
    let theirs =
        time_pairs(&runtime, effort, async || Ok(lock.acquire(None).await?.release().await?));
    let mut subjects = vec![Subject::new("distributed-lock-file", theirs)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("rivals: file:, uncontended pair", &alternate(effort, subjects)?, 1);
    let runtime = two_threads()?;
    let clients = clients(&runtime, &scratch.url())?;
    for n in CONTENDERS {
        let theirs = || {
            let lock = || FileDistributedLock::from_path(scratch.path().join("contention"));
            let turns: Result<Vec<_>, _> = (0..n).map(|_| lock().map(turn_of)).collect();
            runtime.block_on(contention::each(effort, turns?))
        };
        let subjects = vec![
            Subject::new("distributed-lock-file", theirs),
            ours(&runtime, &clients, n, effort),
        ];
        let title = format!("rivals: file:, {n} contenders in one process");
        contention::show(&title, &alternate(effort, subjects)?, 1);
    }
    Ok(())
}
