//! PostgreSQL and MySQL: the session locks of `distributed-lock`. Each lock occupies a connection
//! while a client waits for it or holds it. (Its MySQL locks cannot wait on MariaDB, because they
//! wait with a time limit of -1 seconds, with which MariaDB does not wait at all.)

use distributed_lock_core::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_mysql::MySqlLockProvider;
use distributed_lock_postgres::PostgresLockProvider;
use testbed::{MySql, Postgres, Setup};

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::{CONTENDERS, clients, ours, turn_of, two_threads};

pub(crate) fn all(effort: Effort) -> Result<()> {
    let server = Postgres::with(Setup::new().arg("-c").arg("max_connections=300"));
    beside(effort, "postgres:", &server.database(), async |url| {
        Ok(PostgresLockProvider::new(url).await?)
    })?;
    let server = MySql::with(Setup::new());
    beside(effort, "mysql: (MySQL)", &server.database(), async |url| {
        Ok(MySqlLockProvider::new(url).await?)
    })
}

/// Compares `distributed-lock` with leasehold on one server. Each contender of `distributed-lock`
/// has its own provider, as if it were a process.
fn beside<P>(
    effort: Effort,
    store: &str,
    url: &str,
    provider: impl AsyncFn(String) -> Result<P>,
) -> Result<()>
where
    P: LockProvider,
    P::Lock: Send + Sync + 'static,
{
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(url))?;
    let alone = runtime.block_on(provider(url.to_owned()))?;
    let lock = alone.create_lock("pair");
    let theirs =
        time_pairs(&runtime, effort, async || Ok(lock.acquire(None).await?.release().await?));
    let mut subjects = vec![Subject::new("distributed-lock", theirs)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show(&format!("rivals: {store}, uncontended pair"), &alternate(effort, subjects)?, 1);
    let runtime = two_threads()?;
    let clients = clients(&runtime, url)?;
    let mut providers = Vec::new();
    for _ in 0..CONTENDERS[CONTENDERS.len() - 1] {
        providers.push(runtime.block_on(provider(url.to_owned()))?);
    }
    for n in CONTENDERS {
        let theirs = || {
            let turns = providers[..n].iter().map(|p| turn_of(p.create_lock("contention")));
            runtime.block_on(contention::each(effort, turns.collect()))
        };
        let subjects =
            vec![Subject::new("distributed-lock", theirs), ours(&runtime, &clients, n, effort)];
        let title = format!("rivals: {store}, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 1);
    }
    Ok(())
}
