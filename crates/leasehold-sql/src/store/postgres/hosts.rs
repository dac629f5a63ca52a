//! Connects to the primary among the hosts of a PostgreSQL URL, as libpq does for
//! `target_session_attrs=read-write`.
//!
//! The host that served last is tried first, and then the others in the order of the URL. All
//! addresses of a host are tried ([`Addresses`]). The next host is tried as soon as one fails, and
//! in parallel if one takes long. The first connection to a primary wins. A standby counts as a
//! failure.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::store::fault;
use crate::store::limits::LOGIN;
use leasehold_core::kit::{Addresses, Host};

/// One database host and its addresses.
#[derive(Debug)]
pub(in crate::store) struct Server {
    /// The host, or `None` if the URL has only one. In that case, the driver's options name it.
    pub(in crate::store) host: Option<Host>,
    pub(in crate::store) addresses: Addresses,
}

/// The hosts of a URL.
#[derive(Debug)]
pub(in crate::store) struct Hosts {
    all: Vec<Arc<Server>>,
    /// The index of the host that served last.
    last: AtomicUsize,
}

impl Hosts {
    /// Creates the list of hosts from the URL. If the URL lists none, there is one unnamed host.
    pub(in crate::store) fn new(listed: &[Host]) -> Self {
        let server =
            |host: Option<Host>| Arc::new(Server { host, addresses: Addresses::new(LOGIN) });
        let mut all: Vec<_> = listed.iter().cloned().map(|host| server(Some(host))).collect();
        if all.is_empty() {
            all.push(server(None));
        }
        Self { all, last: AtomicUsize::new(0) }
    }

    /// Returns the host that served last.
    pub(in crate::store) fn last(&self) -> &Server {
        &self.all[self.last.load(Ordering::SeqCst)]
    }

    /// Connects with `connect`, which fails for a host that is not the primary.
    pub(in crate::store) async fn connect<C, F>(
        &self,
        connect: impl Fn(Arc<Server>) -> F,
    ) -> sqlx::Result<C>
    where
        C: Send + 'static,
        F: Future<Output = sqlx::Result<C>> + Send + 'static,
    {
        let last = self.last.load(Ordering::SeqCst);
        let mut left = (0..self.all.len()).filter(|n| *n != last).rev().collect::<Vec<_>>();
        left.push(last);
        let (mut tried, mut errors) = (JoinSet::new(), Vec::new());
        loop {
            if let Some(n) = left.pop() {
                let connecting = connect(self.all[n].clone());
                tried.spawn(async move { (n, connecting.await) });
            }
            let done = tokio::select! {
                done = tried.join_next() => done,
                () = sleep(LOGIN), if !left.is_empty() => continue,
            };
            match done {
                Some(Ok((n, Ok(connection)))) => {
                    self.last.store(n, Ordering::SeqCst);
                    return Ok(connection);
                }
                Some(Ok((n, Err(error)))) => errors.push((n, error)),
                Some(Err(_)) => {}
                None => return Err(self.summary(errors)),
            }
        }
    }

    /// Combines the errors of all hosts. A refusal by a server that was reached takes precedence.
    fn summary(&self, mut errors: Vec<(usize, sqlx::Error)>) -> sqlx::Error {
        let refusal = errors.iter().position(|(_, error)| fault::is_refusal(error));
        let only = (errors.len() == 1).then_some(0);
        if let Some(at) = refusal.or(only) {
            return errors.swap_remove(at).1;
        }
        errors.sort_by_key(|(n, _)| *n);
        let each = errors.iter().map(|(n, error)| {
            let host = self.all[*n].host.as_ref().map(Host::to_string).unwrap_or_default();
            match error {
                sqlx::Error::Io(error) => format!("{host}: {error}"),
                error => format!("{host}: {}", fault::shown(error)),
            }
        });
        sqlx::Error::Io(io::Error::other(each.collect::<Vec<_>>().join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> Hosts {
        let host = |name: &str| Host { name: name.to_owned(), port: 5432 };
        Hosts::new(&["a", "b", "c"].map(host))
    }

    fn name(server: &Server) -> String {
        server.host.as_ref().unwrap().name.clone()
    }

    fn down() -> sqlx::Error {
        sqlx::Error::Io(io::Error::from(io::ErrorKind::ConnectionRefused))
    }

    /// Connects when only `primary` serves, and returns the hosts that were tried.
    async fn tried(hosts: &Hosts, primary: &'static str) -> (sqlx::Result<String>, Vec<String>) {
        let tried = Arc::new(std::sync::Mutex::new(Vec::new()));
        let connect = |server: Arc<Server>| {
            tried.lock().unwrap().push(name(&server));
            let name = name(&server);
            async move { if name == primary { Ok(name) } else { Err(down()) } }
        };
        let connected = hosts.connect(connect).await;
        let all = tried.lock().unwrap().clone();
        (connected, all)
    }

    #[tokio::test]
    async fn host_that_served_last_is_tried_first_and_the_others_in_order() {
        let hosts = hosts();
        for (primary, expected) in [
            ("a", vec!["a"]),
            ("c", vec!["a", "b", "c"]),
            ("c", vec!["c"]),
            ("b", vec!["c", "a", "b"]),
        ] {
            let (connected, tried) = tried(&hosts, primary).await;
            assert_eq!(connected.unwrap(), primary);
            assert_eq!(tried, expected);
        }
        assert_eq!(name(hosts.last()), "b");
    }

    #[tokio::test]
    async fn error_names_every_host() {
        let (connected, tried) = tried(&hosts(), "none").await;
        assert_eq!(tried.len(), 3);
        let message = connected.unwrap_err().to_string();
        for host in ["a:5432: connection refused", "; b:5432: ", "; c:5432: "] {
            assert!(message.contains(host), "{message}");
        }
    }

    #[tokio::test]
    async fn refusal_of_one_server_is_the_error() {
        let connect = |server: Arc<Server>| {
            let is_reached = name(&server) == "b";
            async move {
                Err::<(), _>(match is_reached {
                    true => sqlx::Error::Configuration("a refusal".into()),
                    false => down(),
                })
            }
        };
        let error = hosts().connect(connect).await.unwrap_err();
        assert!(matches!(error, sqlx::Error::Configuration(_)), "{error}");
    }

    #[tokio::test]
    async fn unresponsive_host_does_not_block_the_others() {
        let connect = |server: Arc<Server>| async move {
            match name(&server).as_str() {
                "a" => std::future::pending().await,
                "b" => Err(down()),
                name => Ok(name.to_owned()),
            }
        };
        assert_eq!(hosts().connect(connect).await.unwrap(), "c");
    }
}
