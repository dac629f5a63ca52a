//! State shared by calls and tasks: the session, the claims, and the nodes below which locks are
//! created.

use leasehold_core::kit::locked;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use tokio::runtime::Handle;
use zookeeper_client::{Acls, CreateMode, Error as Fault};

use super::claims::Claims;
use super::fault::{explain, shut_down};
use super::node::Naming;
use super::path;
use super::session::Session;
use super::url::{Access, ZooKeeperUrl};
use leasehold_core::store::EvictionListeners;
use leasehold_core::{Clock, Name, Result};

/// State shared by calls and tasks.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) url: ZooKeeperUrl,
    pub(super) runtime: Handle,
    pub(super) clock: Clock,
    /// The session that was opened last.
    pub(super) current: Mutex<Arc<Session>>,
    /// Locked while a new session is opened.
    pub(super) opening: tokio::sync::Mutex<()>,
    pub(super) claims: Claims,
    /// Listeners that are notified of evictions.
    pub(super) listeners: EvictionListeners,
    /// Locks for which a warning was logged that their sequence numbers are running out.
    pub(super) warned: Mutex<HashSet<String>>,
}

impl Shared {
    /// Runs a call on the client's runtime, even if the caller is dropped.
    pub(super) async fn run<T, F>(self: &Arc<Self>, call: impl FnOnce(Arc<Self>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.runtime.spawn(call(self.clone())).await.unwrap_or_else(|_| Err(shut_down()))
    }

    pub(super) fn current(&self) -> Arc<Session> {
        locked(&self.current).clone()
    }

    /// Returns the session, or opens a new one if it has ended.
    pub(super) async fn session(&self) -> Result<Arc<Session>> {
        let current = self.current();
        if !current.is_over() {
            return Ok(current);
        }
        let _one = self.opening.lock().await;
        let current = self.current();
        if !current.is_over() {
            return Ok(current);
        }
        let session = Session::open(&self.url, &self.runtime).await?;
        *locked(&self.current) = session.clone();
        Ok(session)
    }

    pub(super) fn acls(&self) -> Acls<'static> {
        match self.url.access {
            Access::Open => Acls::anyone_all(),
            Access::Creator => Acls::creator_all(),
        }
    }

    pub(super) fn lock_path(&self, name: &Name) -> String {
        self.url.path(&path::encode(name))
    }

    pub(super) fn naming(&self) -> Naming {
        self.url.naming
    }

    /// Checks when the client connects that the node for locks exists.
    pub(super) async fn find_chroot(&self, session: &Session) -> Result<()> {
        let root = self.url.root();
        let found = session.read(|c| c.check_stat(root)).await;
        match found.map_err(|fault| explain(fault, root))? {
            Some(_) => Ok(()),
            None if self.url.create => self.make_chroot(session).await,
            None => Err(explain(Fault::NoNode, root)),
        }
    }

    pub(super) async fn make_chroot(&self, session: &Session) -> Result<()> {
        let chroot = &self.url.chroot;
        let ends = chroot.match_indices('/').map(|(i, _)| i).skip(1).chain([chroot.len()]);
        for end in ends {
            let part = &chroot[..end];
            let options = CreateMode::Persistent.with_acls(self.acls());
            match session.write(|c| c.create(part, &[], &options)).await {
                Ok(_) | Err(Fault::NodeExists) => {}
                Err(fault) => return Err(explain(fault, part)),
            }
        }
        Ok(())
    }

    /// Returns the mode of a lock's node. kazoo creates the node once and then relies on it.
    /// Curator creates it again.
    pub(super) fn lock_mode(&self) -> CreateMode {
        match self.naming() {
            Naming::Curator => CreateMode::Container,
            Naming::Kazoo => CreateMode::Persistent,
        }
    }

    /// Creates the parent that was missing when a lock's node was to be created, or returns why
    /// that is not possible.
    pub(super) async fn make_above(
        &self,
        session: &Session,
        fault: Fault,
        lock: &str,
    ) -> Result<()> {
        match fault {
            Fault::NoNode if self.url.create => self.make_chroot(session).await,
            Fault::NoNode => Err(explain(Fault::NoNode, self.url.root())),
            fault => Err(explain(fault, lock)),
        }
    }
}
