//! The servers of a store, whichever deployment they are: who gets a call, and what happens to a call
//! whose server is gone, moved or no master any more.
//!
//! Every request here may be repeated: what it does is decided by the claim's id. So a request whose
//! connection broke is sent again, over a new connection or to another server, a few times; then it
//! is for those above to say how long they are patient.
//!
//! What is rare or long is in a box: a call's future is copied as it is made, all branches of it.

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

/// How often a sentinel is asked whether there is another master, each in its turn.
const WATCH: Duration = Duration::from_secs(1);

/// The servers of one store.
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
        hears: &Arc<dyn PushListener>,
    ) -> Result<Self> {
        Ok(match &url.deployment {
            Deployment::Single(address) => Self::Single(Node::new(
                address.clone(),
                &url.login,
                runtime,
                Some((channel.to_owned(), hears.clone())),
                Some(Arc::<Identity>::default().gate()),
            )?),
            Deployment::Sentinel { sentinels, master } => {
                Self::Sentinel(Sentinel::new(url, sentinels, master, runtime, channel, hears)?)
            }
            Deployment::Cluster(seeds) => {
                Self::Cluster(Cluster::new(url, seeds, runtime, channel, hears)?)
            }
        })
    }

    /// Who serves this slot just now, as far as is known.
    pub(super) async fn node(&self, slot: u16) -> RedisResult<Arc<Node>> {
        match self {
            Self::Single(node) => Ok(node.clone()),
            Self::Sentinel(sentinel) => Box::pin(sentinel.master()).await,
            Self::Cluster(cluster) => Box::pin(cluster.node(slot)).await,
        }
    }

    /// Every server that keeps locks.
    pub(super) async fn masters(&self) -> RedisResult<Vec<Arc<Node>>> {
        match self {
            Self::Cluster(cluster) => cluster.masters().await,
            _ => Ok(vec![self.node(0).await?]),
        }
    }

    /// Whether there is somebody who says who keeps the locks, and may say another one soon.
    pub(super) async fn can_fail_over(&self) -> bool {
        match self {
            Self::Single(_) => false,
            Self::Sentinel(sentinel) => sentinel.ask().await.is_ok(),
            Self::Cluster(cluster) => cluster.masters().await.is_ok(),
        }
    }

    /// Looks now and then whether the sentinels name another master by now, for as long as the store is
    /// used.
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

    /// Which member of the store serves this slot, as a number.
    pub(super) fn member(&self, slot: u16) -> u64 {
        match self {
            Self::Cluster(cluster) => cluster.member(slot),
            _ => 0,
        }
    }

    /// Sends a request to whoever serves its slot.
    pub(super) async fn send(&self, request: &Request) -> RedisResult<Value> {
        self.send_noting(request, &mut false).await
    }

    /// The same; notes in `doubt` whether it was sent before without an answer, so that it may have been
    /// done twice. A server that refuses it, or is not reached, has not done it.
    pub(super) async fn send_noting(
        &self,
        request: &Request,
        doubt: &mut bool,
    ) -> RedisResult<Value> {
        let Request { script, call, .. } = request;
        match self {
            Self::Single(node) => match node.run_noting(script, call, doubt).await {
                // The server may have been restarted since the connection was last used.
                Err(error) if fault::is_gone(&error) => {
                    Box::pin(node.run_noting(script, call, doubt)).await
                }
                answer => answer,
            },
            Self::Sentinel(sentinel) => Box::pin(sentinel.run(script, call, doubt)).await,
            Self::Cluster(cluster) => Box::pin(cluster.run(request, doubt)).await,
        }
    }

    /// Sends many requests, as one to each server; what was not answered well that way is sent
    /// again by itself.
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
