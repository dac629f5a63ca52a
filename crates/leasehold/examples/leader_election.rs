//! Leader election: one of many leads, and another takes over when it is gone.
//!
//! ```sh
//! cargo run -p leasehold --example leader_election
//! cargo run -p leasehold --features redis --example leader_election -- redis://host
//! ```
//!
//! Each candidate stands in the queue, leads until it is done or deposed, and stands again. What the
//! leader does to others goes out with its token (its "term"), so that who gets orders from two
//! leaders obeys the later one.
//!
//! **Outages.** A store that is away deposes the leader when its lease is over. That is no reason to
//! stand no more: it is tried again, with growing pauses, for as long as it takes.
//!
//! With a store's URL there is one candidate, which stands until it is killed. Start it on several
//! machines, and stop the store for a minute. Without, three candidates
//! share a store in this process. The first leader is deposed by a person; the
//! second one cannot renew its lease (it asked for none) and finds out by itself.

use std::ops::ControlFlow;
use std::time::Duration;

use leasehold::{Error, Leasehold};
use tokio::sync::mpsc;

/// What a follower hears: who leads, under which term.
type Order = (&'static str, u64);

/// Leads until nobody listens any more. Everything a leader does stands in here; it is dropped when the
/// leader is deposed.
async fn lead(name: &'static str, term: u64, orders: mpsc::UnboundedSender<Order>) {
    println!("{name} leads, term {term}");
    while orders.send((name, term)).is_ok() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn candidate(
    locks: Leasehold,
    name: &'static str,
    orders: mpsc::UnboundedSender<Order>,
) -> Result<(), Error> {
    let election = locks.election("example:leader").label(name);
    let election = match name {
        "bob" => election.lease(Duration::from_secs(2)).no_renewal(),
        // Who is deposed hears of it at once, or else at the next renewal, after a third of this.
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

/// One candidate, for ever, and a follower beside it.
async fn stand(url: &str) -> Result<(), Error> {
    let locks = leasehold::connect(url).await?;
    let (orders, mut heard) = mpsc::unbounded_channel();
    let follower = tokio::spawn(async move { while heard.recv().await.is_some() {} });
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
    let (orders, mut heard) = mpsc::unbounded_channel();
    for (before, name) in ["alice", "bob", "carol"].into_iter().enumerate() {
        tokio::spawn(candidate(locks.clone(), name, orders.clone()));
        // In this order in the queue.
        while locks.read("example:leader").await?.map_or(0, |lock| lock.claims.len()) <= before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let (mut term, mut led) = (0, Vec::new());
    while let Some((name, of)) = heard.recv().await {
        // A follower obeys the latest leader only: an order of an earlier term is late.
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
