//! etcd: the locks of etcd's own lock service, through `etcd-client`. Each client has one lease for
//! all its locks.

use std::sync::Arc;

use etcd_client::{Client, LockOptions};
use testbed::Etcd;
use tokio::sync::Mutex;

use crate::contention;
use crate::contention::Turn;
use crate::measure::{Effort, Result, Subject, alternate, now};
use crate::pair::{self, time_pairs};
use crate::spread;
use crate::{CONTENDERS, clients, ours, two_threads};

/// The lease in seconds. It is longer than any run of one subject.
const LEASE: i64 = 600;

/// A client and the lease of all its locks.
type Theirs = Arc<Mutex<(Client, i64)>>;

pub(crate) fn all(effort: Effort) -> Result<()> {
    let server = Etcd::start();
    let endpoint = format!("127.0.0.1:{}", server.port(0));
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let client = runtime.block_on(open(&endpoint))?;
    let theirs = time_pairs(&runtime, effort, async || turn(&client, "pair").await.map(drop));
    let mut subjects = vec![Subject::new("etcd-client", theirs)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("rivals: etcd:, uncontended pair", &alternate(effort, subjects)?, 1);

    let runtime = two_threads()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let client = runtime.block_on(open(&endpoint))?;
    // Clones of the driver's client share a connection.
    let (client, lease) = runtime.block_on(async { client.lock().await.clone() });
    let theirs = |i| {
        let with = (Arc::new(Mutex::new((client.clone(), lease))), format!("many {i}"));
        spread::task(with, |(client, name): (Theirs, String)| async move {
            turn(&client, &name).await.map(drop)
        })
    };
    let subjects = vec![
        spread::subject("etcd-client", &runtime, effort, theirs),
        spread::ours(&runtime, effort, &locks),
    ];
    let title = format!("rivals: etcd:, {} tasks with a lock each", spread::TASKS);
    pair::show(&title, &alternate(effort, subjects)?, 1);

    let clients = clients(&runtime, &server.url())?;
    for n in CONTENDERS {
        // Each contender has its own lease, because etcd considers all requests with one lease to
        // be the same holder's.
        let mut contenders = Vec::new();
        for _ in 0..n {
            contenders.push(runtime.block_on(open(&endpoint))?);
        }
        let theirs = || {
            let turns = contenders.iter().map(|c| turn_of(c.clone())).collect();
            runtime.block_on(contention::each(effort, turns))
        };
        let subjects =
            vec![Subject::new("etcd-client", theirs), ours(&runtime, &clients, n, effort)];
        let title = format!("rivals: etcd:, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 1);
    }
    Ok(())
}

async fn open(endpoint: &str) -> Result<Theirs> {
    let mut client = Client::connect([endpoint], None).await?;
    let lease = client.lease_grant(LEASE, None).await?.id();
    Ok(Arc::new(Mutex::new((client, lease))))
}

async fn turn(theirs: &Theirs, name: &str) -> Result<u64> {
    let mut theirs = theirs.lock().await;
    let (client, lease) = &mut *theirs;
    let held = client.lock(name, Some(LockOptions::new().with_lease(*lease))).await?;
    let note = now();
    client.unlock(held.key()).await?;
    Ok(note)
}

fn turn_of(theirs: Theirs) -> Turn {
    Box::new(move || {
        let theirs = theirs.clone();
        Box::pin(async move { turn(&theirs, "contention").await })
    })
}
