//! What calls and tasks share: the session, the claims, and the nodes that locks are put under.

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
use leasehold_core::store::Ears;
use leasehold_core::{Clock, Name, Result};

/// What calls and tasks share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) url: ZooKeeperUrl,
    pub(super) runtime: Handle,
    pub(super) clock: Clock,
    /// The session as it was last opened.
    pub(super) current: Mutex<Arc<Session>>,
    /// Held while a new one is opened.
    pub(super) opening: tokio::sync::Mutex<()>,
    pub(super) claims: Claims,
    /// Who is told of evictions.
    pub(super) ears: Ears,
    /// Locks whose numbers were said to run out.
    pub(super) warned: Mutex<HashSet<String>>,
}

impl Shared {
    /// Runs a call on the client's runtime, whatever becomes of the caller.
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

    /// The session, or a new one if it is over.
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

    /// Makes sure at connecting that there is a node to put locks under.
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

    /// What a lock's node is. kazoo makes its own once and then counts on it; Curator makes it again.
    pub(super) fn lock_mode(&self) -> CreateMode {
        match self.naming() {
            Naming::Curator => CreateMode::Container,
            Naming::Kazoo => CreateMode::Persistent,
        }
    }

    /// Makes what a lock's node lacked when it was to be made, or tells why it cannot be.
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
