//! Independent Redis servers, for locks by majority.

use crate::daemon::Setup;
use crate::redis::Redis;

/// Independent Redis servers.
#[derive(Debug)]
pub struct Redlock {
    nodes: Vec<Redis>,
}

impl Redlock {
    /// Starts this many servers with this setup.
    pub fn with(nodes: usize, setup: Setup) -> Self {
        Self { nodes: (0..nodes).map(|_| Redis::with(setup.clone())).collect() }
    }

    /// Returns the servers, in the order of the URL.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// Returns the URL with all servers, without parameters.
    pub fn url(&self) -> String {
        url_of(self.nodes.iter().map(Redis::port))
    }
}

/// Returns the `redlock:` URL of servers on these ports.
pub fn url_of(ports: impl IntoIterator<Item = u16>) -> String {
    let hosts: Vec<String> = ports.into_iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redlock://{}", hosts.join(","))
}
