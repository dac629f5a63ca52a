//! Replicas in this process, and claims.

use std::net::Ipv4Addr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold::store::{Claim, Joined};
use leasehold::{Kind, Name, Result, Token};
use leasehold_server::{Access, Limits, Listener, Service, serve};
use leasehold_test_support::PATIENCE;
use tokio::runtime::{Builder, Handle, Runtime};

/// Returns the runtime of proxies.
pub(crate) fn runtime() -> &'static Handle {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(new_runtime);
    RUNTIME.handle()
}

fn new_runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// A server in this process, on its own runtime.
pub(crate) struct Replica {
    store: String,
    port: u16,
    runtime: Option<Runtime>,
}

impl Replica {
    /// Starts a server over the store of this URL.
    pub(crate) fn over(store: &str) -> Self {
        let mut replica = Self { store: store.to_owned(), port: 0, runtime: None };
        replica.restart();
        replica
    }

    /// Starts a server over a store in memory that no other server has.
    pub(crate) fn over_memory() -> Self {
        Self::over(&new_memory())
    }

    /// Starts a server over another store in memory, at the same port.
    pub(crate) fn restart_empty(&mut self) {
        self.store = new_memory();
        self.restart();
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        url_of(&[self.port])
    }

    /// Ends the server without notifying its clients or its store.
    pub(crate) fn kill(&mut self) {
        let runtime = self.runtime.take().expect("the server has stopped already");
        // Returns when all tasks are dropped. A thread of an async runtime must not wait for that.
        let ending = std::thread::spawn(move || runtime.shutdown_timeout(PATIENCE));
        ending.join().expect("the runtime's thread panicked");
    }

    /// Starts the server again, at the same port.
    pub(crate) fn restart(&mut self) {
        let runtime = new_runtime();
        let (store, port) = (self.store.clone(), self.port);
        let (sender, listening) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            let locks = leasehold::connect(store).await.expect("cannot connect to the store");
            let service = Service::new(locks, Access::open(), Limits::default()).unwrap();
            let listener = loop {
                // The connections of the server that was killed may still be closing.
                match tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                    Ok(listener) => break listener,
                    Err(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
                }
            };
            sender.send(listener.local_addr().unwrap().port()).unwrap();
            serve(service, vec![Listener::Tcp(listener)], std::future::pending()).await;
        });
        self.port = listening.recv().expect("the server does not listen");
        self.runtime = Some(runtime);
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn new_memory() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("memory:replica-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the URL of servers at these ports of this machine.
pub(crate) fn url_of(ports: &[u16]) -> String {
    let hosts: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("http://{}/", hosts.join(","))
}

pub(crate) fn claim(name: &str, kind: Kind, weight: u32, capacity: u32) -> Claim {
    Claim::new(Name::new(name).unwrap(), kind, weight, capacity).unwrap()
}

/// Returns the token of a claim that holds the lock.
#[track_caller]
pub(crate) fn holding(joined: Result<Joined>) -> Token {
    match joined {
        Ok(Joined::Holding { token, .. }) => token,
        other => panic!("{other:?}"),
    }
}
