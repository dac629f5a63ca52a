//! How the workers reach the store under test.

use std::io;
use std::sync::Arc;

use leasehold::{Leasehold, Result};

use super::history::{Fault, WorkerId};
use super::line::Lines;
use super::relay::Relays;
use super::served::{Server, is_served};
use super::wire::Where;

/// The faults that make sense for the store of this URL.
pub(super) fn applicable(url: &str) -> Vec<Fault> {
    let mut faults = vec![Fault::Pause, Fault::Kill];
    if can_be_cut(url) {
        faults.push(Fault::Cut);
    }
    faults
}

/// How the workers reach the store.
#[derive(Debug)]
pub(super) enum Reach {
    /// It lives with us.
    Served(Arc<Server>),
    /// Through relays in this process.
    Relayed(Relays),
    /// As any user would.
    Direct(String),
}

/// Whether the connections of this store's clients can be cut.
pub(super) fn can_be_cut(url: &str) -> bool {
    is_served(url) || Relays::of(url).is_some()
}

impl Reach {
    /// The way to `store`, whose URL is `url`.
    pub(super) fn new(store: &Leasehold, url: &str) -> Result<Self> {
        if is_served(url) {
            return Server::start(store.store().clone()).map(Self::Served);
        }
        Ok(Relays::of(url).map_or_else(|| Self::Direct(url.to_owned()), Self::Relayed))
    }

    /// What a new worker is told.
    pub(super) fn tell(&self, worker: WorkerId) -> io::Result<Where> {
        Ok(match self {
            Self::Served(server) => Where::Served(server.socket()),
            Self::Relayed(relays) => Where::Url(relays.start(worker)?),
            Self::Direct(url) => Where::Url(url.clone()),
        })
    }

    /// The lines that can be cut.
    pub(super) fn lines(&self) -> Option<&Lines> {
        match self {
            Self::Served(server) => Some(&server.lines),
            Self::Relayed(relays) => Some(&relays.lines),
            Self::Direct(_) => None,
        }
    }
}
