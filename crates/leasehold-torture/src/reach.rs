//! How the workers reach the store under test.

use std::io;
use std::sync::Arc;

use leasehold::{Client, Result};

use super::history::{Fault, WorkerId};
use super::line::Lines;
use super::relay::Relays;
use super::served::{Server, is_served};
use super::wire::Where;

/// Returns the faults that can be injected into the store at this URL.
pub(super) fn applicable(url: &str) -> Vec<Fault> {
    let mut faults = vec![Fault::Pause, Fault::Kill];
    if can_be_cut(url) {
        faults.extend([Fault::Cut, Fault::Stale]);
    }
    faults
}

/// How the workers reach the store.
#[derive(Debug)]
pub(super) enum Reach {
    /// The store is in this process, which serves it.
    Served(Arc<Server>),
    /// Through relays in this process.
    Relayed(Relays),
    /// Directly, like any other client.
    Direct(String),
}

/// Returns whether the connections of this store's clients can be cut.
pub(super) fn can_be_cut(url: &str) -> bool {
    is_served(url) || Relays::of(url).is_some()
}

impl Reach {
    /// Chooses how the workers reach `store`, whose URL is `url`. Starts a server if the store
    /// needs one.
    pub(super) fn new(store: &Client, url: &str) -> Result<Self> {
        if is_served(url) {
            return Server::start(store.store().clone()).map(Self::Served);
        }
        Ok(Relays::of(url).map_or_else(|| Self::Direct(url.to_owned()), Self::Relayed))
    }

    /// Returns the address of the store for a new worker.
    pub(super) fn address(&self, worker: WorkerId) -> io::Result<Where> {
        Ok(match self {
            Self::Served(server) => Where::Served(server.socket()),
            Self::Relayed(relays) => Where::Url(relays.start(worker)?),
            Self::Direct(url) => Where::Url(url.clone()),
        })
    }

    /// Returns the lines that can be cut.
    pub(super) fn lines(&self) -> Option<&Lines> {
        match self {
            Self::Served(server) => Some(&server.lines),
            Self::Relayed(relays) => Some(&relays.lines),
            Self::Direct(_) => None,
        }
    }
}
