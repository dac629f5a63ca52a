//! Leader election: one of many candidates leads, and another one takes over when the leader is
//! gone.
//!
//! ```sh
//! cargo run -p leasehold --example leader_election
//! cargo run -p leasehold --features redis --example leader_election -- redis://host
//! ```
//!
//! Each candidate waits in the queue, leads until its work is done or it is deposed, and joins the
//! queue again. The leader sends its token (its "term") with every order. So a follower that gets
//! orders from two leaders obeys the later one.
//!
//! **Outages.** If the store is unreachable, the leader is deposed when its lease expires. The
//! candidate then campaigns again without limit, with growing pauses.
//!
//! With a store's URL there is one candidate, which campaigns until it is killed. Start it on
//! several machines, and stop the store for a minute. Without a URL, three candidates share a store
//! in this process. A person deposes the first leader. The second leader has disabled renewals, so
//! its lease expires and it finds out on its own.

use std::ops::ControlFlow;
use std::time::Duration;

use leasehold::{Client, Error};
use tokio::sync::mpsc;

/// An order to a follower: the leader's name and its term.
type Order = (&'static str, u64);

/// Leads until the follower ends. This future contains everything that a leader does. It is
/// dropped when the leader is deposed.
async fn lead(name: &'static str, term: u64, orders: mpsc::UnboundedSender<Order>) {
    println!("{name} leads, term {term}");
    while orders.send((name, term)).is_ok() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn candidate(
    locks: Client,
    name: &'static str,
    orders: mpsc::UnboundedSender<Order>,
) -> Result<(), Error> {
    let election = locks.election("example:leader").label(name);
    let election = match name {
        "bob" => election.lease(Duration::from_secs(2)).no_renewal(),
        // A deposed leader is notified immediately, or finds out at its next renewal, after a third
        // of this.
        _ => election.lease(Duration::from_secs(4)),
    };
    let election = election.on_pause(move |error, pause| match error.lost_reason() {
        Some(reason) => println!("{name} leads no more: {reason}"),
        None => println!("again in {pause:?}: {error}"),
    });
    election
        .lead(|guard| {
            let orders = orders.clone();
            async move {
                lead(name, guard.token().get(), orders).await;
                ControlFlow::Break(())
            }
        })
        .await
}

/// Runs one candidate indefinitely, and a follower.
async fn stand(url: &str) -> Result<(), Error> {
    let locks = leasehold::connect(url).await?;
    let (orders, mut receiver) = mpsc::unbounded_channel();
    let follower = tokio::spawn(async move { while receiver.recv().await.is_some() {} });
    candidate(locks, "this one", orders).await?;
    follower.await.expect("no panic");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    if let Some(url) = std::env::args().nth(1) {
        return stand(&url).await;
    }
    let locks = leasehold::connect("memory:leader-election").await?;
    let (orders, mut receiver) = mpsc::unbounded_channel();
    for (before, name) in ["alice", "bob", "carol"].into_iter().enumerate() {
        tokio::spawn(candidate(locks.clone(), name, orders.clone()));
        // The candidates join the queue in this order.
        while locks.inspect("example:leader").await?.map_or(0, |lock| lock.claims.len()) <= before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let (mut term, mut led) = (0, Vec::new());
    while let Some((name, of)) = receiver.recv().await {
        // A follower obeys only the latest leader. An order of an earlier term is stale.
        if of < term {
            println!("an order of {name} came too late");
            continue;
        }
        if of > term {
            term = of;
            led.push(name);
        }
        match led.len() {
            1 => {
                println!("a person deposes {name}");
                locks.evict("example:leader", leasehold::store::Evict::Holders).await?;
                led.push("nobody");
            }
            // alice, nobody, bob, carol
            4 => break,
            _ => {}
        }
    }
    println!("led, one after the other: {led:?}");
    assert_eq!(led, ["alice", "nobody", "bob", "carol"]);
    Ok(())
}
