//! The servers of a store in every deployment. Selects the server of a call, and retries a call
//! whose server is gone, moved or no longer the master.
//!
//! A request may be repeated, because its effect is determined by the claim's id. So a request whose
//! connection broke is sent again a few times, over a new connection or to another server. After
//! that the caller decides how long to retry. The exception is the eviction of all holders. It is
//! not repeated if it may have been executed, because the next holder would be evicted as well.
//!
//! Rare or large futures are boxed. A call's future is copied when it is created, with the space
//! for all its branches.

use std::sync::Arc;
use std::time::Duration;

use redis::{Pipeline, RedisResult, Value};
use tokio::runtime::Handle;

use super::cluster::Cluster;
use super::connection::{Node, PushListener};
use super::fault;
use super::identity::Identity;
use super::request::Request;
use super::sentinel::Sentinel;
use super::url::{Deployment, RedisUrl};
use leasehold_core::Result;

/// Interval between polls of the sentinels for another master. They are polled in turn.
const WATCH: Duration = Duration::from_secs(1);

/// Servers of one store.
#[derive(Debug)]
pub(super) enum Servers {
    Single(Arc<Node>),
    Sentinel(Sentinel),
    Cluster(Cluster),
}

impl Servers {
    pub(super) fn new(
        url: &RedisUrl,
        runtime: &Handle,
        channel: &str,
        listener: &Arc<dyn PushListener>,
    ) -> Result<Self> {
        Ok(match &url.deployment {
            Deployment::Single(address) => Self::Single(Node::new(
                address.clone(),
                &url.login,
                runtime,
                Some((channel.to_owned(), listener.clone())),
                Some(Arc::<Identity>::default().gate()),
            )?),
            Deployment::Sentinel { sentinels, master } => {
                Self::Sentinel(Sentinel::new(url, sentinels, master, runtime, channel, listener)?)
            }
            Deployment::Cluster(seeds) => {
                Self::Cluster(Cluster::new(url, seeds, runtime, channel, listener)?)
            }
        })
    }

    /// Returns the node that serves this slot, as far as is known.
    pub(super) async fn node(&self, slot: u16) -> RedisResult<Arc<Node>> {
        match self {
            Self::Single(node) => Ok(node.clone()),
            Self::Sentinel(sentinel) => Box::pin(sentinel.master()).await,
            Self::Cluster(cluster) => Box::pin(cluster.node(slot)).await,
        }
    }

    /// Returns every server that stores locks.
    pub(super) async fn masters(&self) -> RedisResult<Vec<Arc<Node>>> {
        match self {
            Self::Cluster(cluster) => cluster.masters().await,
            _ => Ok(vec![self.node(0).await?]),
        }
    }

    /// Returns whether sentinels or cluster nodes respond. They may soon name another master.
    pub(super) async fn can_fail_over(&self) -> bool {
        match self {
            Self::Single(_) => false,
            Self::Sentinel(sentinel) => sentinel.ask().await.is_ok(),
            Self::Cluster(cluster) => cluster.masters().await.is_ok(),
        }
    }

    /// Starts a task that periodically checks whether the sentinels name another master. The task
    /// ends when the store is dropped.
    pub(super) fn watch(self: &Arc<Self>, runtime: &Handle) {
        let Self::Sentinel(_) = &**self else { return };
        let watched = Arc::downgrade(self);
        drop(runtime.spawn(async move {
            let mut turn = 0;
            loop {
                tokio::time::sleep(WATCH).await;
                let Some(servers) = watched.upgrade() else { return };
                if let Self::Sentinel(sentinel) = &*servers {
                    sentinel.watch(turn).await;
                }
                turn += 1;
            }
        }));
    }

    /// Returns a number that identifies the server of this slot within the store.
    pub(super) fn member(&self, slot: u16) -> u64 {
        match self {
            Self::Cluster(cluster) => cluster.member(slot),
            _ => 0,
        }
    }

    /// Sends a request to the server of its slot.
    pub(super) async fn send(&self, request: &Request) -> RedisResult<Value> {
        self.send_noting(request, &mut false).await
    }

    /// Sends a request like `send`. Sets `doubt` if the request may have been executed more often
    /// than the result shows.
    ///
    /// That is the case if an earlier attempt was sent and not answered. A server that refuses a
    /// request, or is not reached, has not executed it.
    pub(super) async fn send_noting(
        &self,
        request: &Request,
        doubt: &mut bool,
    ) -> RedisResult<Value> {
        let Request { script, call, .. } = request;
        match self {
            Self::Single(node) => match node.run_noting(script, call, doubt).await {
                // The server may have restarted since the connection was last used.
                Err(error) if fault::is_gone(&error) && request.is_repeatable(*doubt) => {
                    Box::pin(node.run_noting(script, call, doubt)).await
                }
                answer => answer,
            },
            Self::Sentinel(sentinel) => Box::pin(sentinel.run(request, doubt)).await,
            Self::Cluster(cluster) => Box::pin(cluster.run(request, doubt)).await,
        }
    }

    /// Sends many requests, with one batch per server. A request that fails in the batch is sent
    /// again on its own.
    pub(super) async fn send_all(&self, requests: &[Request]) -> Vec<RedisResult<Value>> {
        if let [one] = requests {
            return vec![self.send(one).await];
        }
        let mut groups: Vec<(Arc<Node>, Vec<usize>)> = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            let Ok(node) = self.node(request.slot).await else { continue };
            match groups.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &node)) {
                Some((_, indices)) => indices.push(i),
                None => groups.push((node, vec![i])),
            }
        }
        let mut answers: Vec<Option<RedisResult<Value>>> = requests.iter().map(|_| None).collect();
        for (node, indices) in groups {
            let mut pipeline = Pipeline::with_capacity(indices.len());
            for i in &indices {
                pipeline.add_command(requests[*i].call.clone());
            }
            let Ok(values) = node.pipeline(&pipeline).await else { continue };
            for (i, value) in indices.into_iter().zip(values) {
                answers[i] = value.extract_error().ok().map(Ok);
            }
        }
        let mut all = Vec::with_capacity(requests.len());
        for (request, answer) in requests.iter().zip(answers) {
            all.push(match answer {
                Some(answer) => answer,
                None => self.send(request).await,
            });
        }
        all
    }
}
