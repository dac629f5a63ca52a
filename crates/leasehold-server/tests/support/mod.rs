//! A service in this process, and a client that writes requests byte by byte.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::Arc;
use std::time::Duration;

use leasehold::Client;
use leasehold::store::MemoryStore;
use leasehold_server::{Access, Limits, Listener, Service, serve};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A time limit that is longer than any wait on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A service on a free port.
pub(crate) struct Server {
    pub(crate) port: u16,
    pub(crate) service: Service,
    stop: Option<oneshot::Sender<()>>,
    pub(crate) task: JoinHandle<()>,
}

impl Server {
    /// Starts a server over the store of this URL. `memory:` is a separate store for each test.
    pub(crate) async fn open(url: &str) -> Self {
        let locks = match url {
            "memory:" => memory(),
            url => leasehold::connect(url).await.unwrap(),
        };
        Self::start(locks, Access::open(), Limits::default()).await
    }

    pub(crate) async fn start(locks: Client, access: Access, limits: Limits) -> Self {
        Self::bind(0, locks, access, limits).await
    }

    /// Starts a server on the port of a server that has ended.
    pub(crate) async fn start_at(port: u16, locks: Client, access: Access) -> Self {
        Self::bind(port, locks, access, Limits::default()).await
    }

    async fn bind(port: u16, locks: Client, access: Access, limits: Limits) -> Self {
        let service = Service::new(locks, access, limits).unwrap();
        // A server that is shutting down may use the port for a moment.
        let listener = loop {
            match TcpListener::bind(("127.0.0.1", port)).await {
                Err(error) if port != 0 && error.kind() == std::io::ErrorKind::AddrInUse => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                bound => break bound.unwrap(),
            }
        };
        let port = listener.local_addr().unwrap().port();
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let task = tokio::spawn(serve(service.clone(), vec![Listener::Tcp(listener)], shutdown));
        Self { port, service, stop: Some(stop), task }
    }

    /// Shuts the server down as SIGTERM does.
    pub(crate) fn shut_down(&mut self) {
        drop(self.stop.take());
    }

    /// Returns a handle. Dropping it shuts the server down as SIGTERM does.
    pub(crate) fn stop(&mut self) -> Option<oneshot::Sender<()>> {
        self.stop.take()
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    /// Sends these bytes, and reads until the server closes the connection.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect().await;
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(bytes).await;
        let mut read = Vec::new();
        let _ = timeout(PATIENCE, stream.read_to_end(&mut read)).await.unwrap();
        Answer::parse(&read)
    }

    /// Sends a request with these header lines.
    pub(crate) async fn with(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        self.raw(request(method, path, headers, body).as_bytes()).await
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.with(method, path, "", &body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, Value::Null).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, body).await
    }

    /// Opens a stream of JSON lines.
    pub(crate) async fn stream(&self, method: &str, path: &str, headers: &str) -> Lines {
        let mut stream = self.connect().await;
        let text = request(method, path, headers, "");
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut lines = Lines(BufReader::new(stream));
        let status = lines.text().await.unwrap();
        assert!(status.contains(" 200 "), "{status}");
        lines
    }
}

/// Returns a client of a store that no other test uses.
pub(crate) fn memory() -> Client {
    Client::with_store(Arc::new(MemoryStore::new())).unwrap()
}

fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    let typed = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}{typed}\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) text: String,
}

impl Answer {
    fn parse(read: &[u8]) -> Self {
        let read = String::from_utf8_lossy(read).into_owned();
        let (head, text) = read.split_once("\r\n\r\n").unwrap_or((&read, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Self { status, head: head.to_owned(), text: text.to_owned() }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Panics with the whole response if the status is another one.
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }
}

pub(crate) struct Lines(pub(crate) BufReader<TcpStream>);

impl Lines {
    async fn text(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = timeout(PATIENCE, self.0.read_line(&mut line)).await.expect("a line in time");
        (read.unwrap_or(0) > 0).then_some(line)
    }

    /// Returns the next event that is not a ping, or `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        loop {
            let line = self.text().await?;
            // Headers and the lengths of chunks are not JSON objects.
            match serde_json::from_str::<Value>(&line) {
                Ok(event) if event.is_object() && event["event"] != "ping" => return Some(event),
                _ => {}
            }
        }
    }

    /// Returns the next ping.
    pub(crate) async fn ping(&mut self) -> Option<Value> {
        loop {
            let line = self.text().await?;
            match serde_json::from_str::<Value>(&line) {
                Ok(event) if event["event"] == "ping" => return Some(event),
                _ => {}
            }
        }
    }

    /// Returns the next event of this kind.
    pub(crate) async fn until(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next().await.unwrap_or_else(|| panic!("no event {kind:?}"));
            if event["event"] == kind {
                return event;
            }
        }
    }
}

/// Returns the hash of a token, as the file of the identities has it.
pub(crate) fn hash(token: &str) -> String {
    Sha256::digest(token).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a claim ID with this number.
pub(crate) fn id(n: u128) -> String {
    format!("{n:032x}")
}

/// The log that all tests of a binary share.
pub(crate) mod logged {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex, OnceLock};

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    static LOG: OnceLock<Log> = OnceLock::new();

    /// Begins to log everything.
    pub(crate) fn begin() {
        LOG.get_or_init(|| {
            let log = Log::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
                .with_writer(move || writer.clone())
                .init();
            log
        });
    }

    pub(crate) fn text() -> String {
        let log = LOG.get().map(|log| log.0.lock().unwrap().clone()).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }
}
