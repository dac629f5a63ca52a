//! Serves a store in the parent to the workers over a Unix socket. This makes a `memory:` store a
//! remote one, with a connection that can be cut.
//!
//! The protocol is one JSON object per line: numbered requests, and answers with the same number in
//! any order. [`Served`] is the workers' side, a [`Store`] like any other. It connects on the first
//! call and whenever the connection is gone. Calls in flight then fail with
//! [`Unreachable`](ErrorKind::Unreachable), and their outcome is unknown, as on any network.

use leasehold::store::kit::locked;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold::store::{
    Claim, ClaimId, Converted, Evict, Joined, LockInfo, MemoryStore, Mode, Renew, Renewal, Signal,
    Store, StoreInfo,
};
use leasehold::{Error, ErrorKind, Name, Result};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::history::WorkerId;
use super::line::{Line, Lines};
use super::wire::line;

/// Returns whether the store of this URL lives in one process, so that it must be served to the
/// workers.
pub(super) fn is_served(url: &str) -> bool {
    url.split(':').next() == Some("memory")
}

#[derive(Serialize, Deserialize)]
enum Request {
    Join(Claim, Mode),
    Renew(Vec<Renew>),
    Leave(Claim, Option<Duration>),
    Convert(Claim),
    Changed(Claim),
    Read(Name),
    List(String),
    Evict(Name, Evict),
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Joined(Joined),
    Renewed(Vec<Renewal>),
    Left(bool),
    Converted(Converted),
    Changed(Signal),
    Read(Option<LockInfo>),
    Listed(Vec<LockInfo>),
    Evicted(usize),
}

/// The first line of a connection.
#[derive(Serialize, Deserialize)]
struct Hello {
    worker: WorkerId,
}

#[derive(Serialize, Deserialize)]
struct NumberedRequest {
    n: u64,
    request: Request,
}

#[derive(Serialize, Deserialize)]
struct NumberedAnswer {
    n: u64,
    answer: Result<Answer, Refusal>,
}

/// An error in transit.
#[derive(Debug, Serialize, Deserialize)]
struct Refusal {
    kind: String,
    message: String,
}

/// The kinds of error that an in-process store can return.
const KINDS: [ErrorKind; 4] =
    [ErrorKind::Mismatch, ErrorKind::Unsupported, ErrorKind::Config, ErrorKind::Full];

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { kind: format!("{:?}", error.kind()), message: error.to_string() }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let kind = KINDS.into_iter().find(|k| format!("{k:?}") == refusal.kind);
        Self::new(kind.unwrap_or(ErrorKind::Corrupt), refusal.message)
    }
}

/// The workers' side.
#[derive(Debug)]
pub(super) struct Served {
    socket: PathBuf,
    worker: WorkerId,
    info: StoreInfo,
    connection: Mutex<Option<Arc<Connection>>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Connection {
    stream: Mutex<UnixStream>,
    /// Calls in flight. `None` when the connection is gone.
    pending: Mutex<Option<Pending>>,
}

type Pending = HashMap<u64, oneshot::Sender<Result<Answer, Refusal>>>;

impl Served {
    /// Creates a client for the store that is served on `socket`. Nothing is sent yet.
    pub(super) fn new(socket: PathBuf, worker: WorkerId) -> Self {
        Self {
            socket,
            worker,
            info: StoreInfo::new("memory:", MemoryStore::new().info().guarantees.clone()),
            connection: Mutex::new(None),
            next: AtomicU64::new(0),
        }
    }

    fn connection(&self) -> std::io::Result<Arc<Connection>> {
        let mut slot = locked(&self.connection);
        if let Some(connection) = slot.as_ref().filter(|c| locked(&c.pending).is_some()) {
            return Ok(connection.clone());
        }
        let mut stream = UnixStream::connect(&self.socket)?;
        // The parent does not read while the connection is frozen. A full buffer then counts as a
        // dead connection.
        stream.set_write_timeout(Some(Duration::from_millis(100)))?;
        stream.write_all(line(&Hello { worker: self.worker }).as_bytes())?;
        let answers = BufReader::new(stream.try_clone()?);
        let pending = Mutex::new(Some(Pending::new()));
        let connection = Arc::new(Connection { stream: Mutex::new(stream), pending });
        let reader = connection.clone();
        std::thread::Builder::new()
            .name("store".into())
            .spawn(move || reader.read_answers(answers))?;
        *slot = Some(connection.clone());
        Ok(connection)
    }

    async fn call(&self, request: Request) -> Result<Answer> {
        let n = self.next.fetch_add(1, Ordering::SeqCst);
        let connection = self.connection().map_err(unreachable)?;
        let answer = connection.send(NumberedRequest { n, request })?;
        let _forgets = Forgets { connection: &connection, n };
        match answer.await {
            Ok(answer) => answer.map_err(Error::from),
            Err(_) => Err(unreachable("the connection was cut")),
        }
    }
}

fn unreachable(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(ErrorKind::Unreachable, "the served store does not respond").with_source(why)
}

/// Returns the error for an answer of an unexpected kind.
fn confused<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Corrupt, "the served store sent an unexpected reply"))
}

/// Removes a call's entry when the call is dropped.
struct Forgets<'a> {
    connection: &'a Connection,
    n: u64,
}

impl Drop for Forgets<'_> {
    fn drop(&mut self) {
        if let Some(pending) = locked(&self.connection.pending).as_mut() {
            pending.remove(&self.n);
        }
    }
}

impl Connection {
    fn send(&self, request: NumberedRequest) -> Result<oneshot::Receiver<Result<Answer, Refusal>>> {
        let (sender, answer) = oneshot::channel();
        match locked(&self.pending).as_mut() {
            Some(pending) => pending.insert(request.n, sender),
            None => return Err(unreachable("the connection was cut")),
        };
        let written = locked(&self.stream).write_all(line(&request).as_bytes());
        if let Err(e) = written {
            // The line may be partially written, so nothing can follow it.
            self.end();
            return Err(unreachable(e));
        }
        Ok(answer)
    }

    fn read_answers(&self, answers: BufReader<UnixStream>) {
        for line in answers.lines() {
            let answered = line.ok().and_then(|l| serde_json::from_str::<NumberedAnswer>(&l).ok());
            let Some(NumberedAnswer { n, answer }) = answered else { break };
            let waiting = locked(&self.pending).as_mut().and_then(|p| p.remove(&n));
            if let Some(waiting) = waiting {
                let _ = waiting.send(answer);
            }
        }
        self.end();
    }

    fn end(&self) {
        // This drops the senders, so all pending calls fail.
        locked(&self.pending).take();
        let _ = locked(&self.stream).shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(connection) = locked(&self.connection).take() {
            connection.end();
        }
    }
}

#[async_trait]
impl Store for Served {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        match self.call(Request::Join(claim.clone(), mode)).await? {
            Answer::Joined(joined) => Ok(joined),
            _ => confused(),
        }
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        match self.call(Request::Renew(renewals.to_vec())).await? {
            Answer::Renewed(renewed) => Ok(renewed),
            _ => confused(),
        }
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        match self.call(Request::Leave(claim.clone(), keep)).await? {
            Answer::Left(held) => Ok(held),
            _ => confused(),
        }
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        match self.call(Request::Convert(claim.clone())).await? {
            Answer::Converted(converted) => Ok(converted),
            _ => confused(),
        }
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        match self.call(Request::Changed(claim.clone())).await? {
            Answer::Changed(signal) => Ok(signal),
            _ => confused(),
        }
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        match self.call(Request::Read(name.clone())).await? {
            Answer::Read(info) => Ok(info),
            _ => confused(),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        match self.call(Request::List(prefix.to_owned())).await? {
            Answer::Listed(infos) => Ok(infos),
            _ => confused(),
        }
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        match self.call(Request::Evict(name.clone(), which)).await? {
            Answer::Evicted(n) => Ok(n),
            _ => confused(),
        }
    }
}

/// The parent's side.
#[derive(Debug)]
pub(super) struct Server {
    store: Arc<dyn Store>,
    directory: PathBuf,
    pub(super) lines: Lines,
    /// The task that waits for a change of each claim. A claim has one listener, the last one that
    /// subscribed.
    listeners: Mutex<HashMap<ClaimId, AbortHandle>>,
}

impl Server {
    /// Serves `store` on a socket in a directory that only this user can enter. Must be called in a
    /// tokio runtime, which does the work.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the socket cannot be created.
    pub(super) fn start(store: Arc<dyn Store>) -> Result<Arc<Self>> {
        let name = format!("leasehold-torture-{}", ClaimId::random()?.to_hex());
        let directory = std::env::temp_dir().join(name);
        let failed = |e: std::io::Error| {
            let what = format!("cannot create a socket in {} (set TMPDIR)", directory.display());
            Error::new(ErrorKind::Config, what).with_source(e)
        };
        std::fs::DirBuilder::new().mode(0o700).create(&directory).map_err(failed)?;
        let bound = UnixListener::bind(directory.join("store")).map_err(failed);
        let server =
            Self { store, directory, lines: Lines::default(), listeners: Mutex::default() };
        let (server, listener) = (Arc::new(server), bound?);
        tokio::spawn(server.clone().accept(listener));
        Ok(server)
    }

    /// Returns the path of the socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("store")
    }

    async fn accept(self: Arc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(self.clone().serve(stream))),
                // No descriptors are left. Some will be closed soon.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn serve(self: Arc<Self>, stream: tokio::net::UnixStream) {
        let (from, to) = stream.into_split();
        let mut requests = tokio::io::BufReader::new(from).lines();
        let Ok(Some(hello)) = requests.next_line().await else { return };
        let Ok(Hello { worker }) = serde_json::from_str(&hello) else { return };
        let mut line = self.lines.of(worker);
        let (answers, outbox) = mpsc::unbounded_channel();
        // Dropping the set aborts all calls in flight.
        let mut tasks = JoinSet::new();
        tasks.spawn(answer_all(to, outbox, line.clone()));
        loop {
            if line.wait_for(|l| *l != Line::Frozen).await.is_err()
                || *line.borrow() == Line::Closed
            {
                return;
            }
            let next = tokio::select! {
                next = requests.next_line() => next,
                _ = line.changed() => continue,
            };
            let Ok(Some(request)) = next else { return };
            let Ok(request) = serde_json::from_str(&request) else { return };
            // Data that was read while the line is frozen has not arrived yet.
            if line.wait_for(|l| *l != Line::Frozen).await.is_err() {
                return;
            }
            while tasks.try_join_next().is_some() {}
            self.answer(request, &answers, &mut tasks).await;
        }
    }

    async fn answer(
        self: &Arc<Self>,
        NumberedRequest { n, request }: NumberedRequest,
        answers: &mpsc::UnboundedSender<NumberedAnswer>,
        tasks: &mut JoinSet<()>,
    ) {
        let store = &self.store;
        let answer = match request {
            Request::Changed(claim) => return self.listen(n, claim, answers.clone(), tasks),
            Request::Join(claim, mode) => store.join(&claim, mode).await.map(Answer::Joined),
            Request::Renew(renewals) => store.renew(&renewals).await.map(Answer::Renewed),
            Request::Leave(claim, keep) => {
                if let Some(listener) = locked(&self.listeners).remove(&claim.id) {
                    listener.abort();
                }
                store.leave(&claim, keep).await.map(Answer::Left)
            }
            Request::Convert(claim) => store.convert(&claim).await.map(Answer::Converted),
            Request::Read(name) => store.read(&name).await.map(Answer::Read),
            Request::List(prefix) => store.list(&prefix).await.map(Answer::Listed),
            Request::Evict(name, which) => store.evict(&name, which).await.map(Answer::Evicted),
        };
        let _ = answers.send(NumberedAnswer { n, answer: answer.map_err(Refusal::from) });
    }

    fn listen(
        self: &Arc<Self>,
        n: u64,
        claim: Claim,
        answers: mpsc::UnboundedSender<NumberedAnswer>,
        tasks: &mut JoinSet<()>,
    ) {
        let (store, id) = (self.store.clone(), claim.id);
        let listener = tasks.spawn(async move {
            let answer = store.changed(&claim).await.map(Answer::Changed);
            let _ = answers.send(NumberedAnswer { n, answer: answer.map_err(Refusal::from) });
        });
        if let Some(before) = locked(&self.listeners).insert(id, listener) {
            before.abort();
        }
    }
}

/// Sends answers as far as the state of the line allows.
async fn answer_all(
    mut to: tokio::net::unix::OwnedWriteHalf,
    mut outbox: mpsc::UnboundedReceiver<NumberedAnswer>,
    mut line: watch::Receiver<Line>,
) {
    while let Some(answered) = outbox.recv().await {
        let Ok(state) = line.wait_for(|l| *l != Line::Frozen).await.map(|l| *l) else { return };
        if state == Line::Deaf {
            continue;
        }
        if to.write_all(super::wire::line(&answered).as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use leasehold::{Client, Kind};

    use super::*;

    fn start() -> Arc<Server> {
        Server::start(Arc::new(MemoryStore::new())).unwrap()
    }

    fn client(server: &Server, worker: WorkerId) -> Client {
        leasehold::builder().store(Arc::new(Served::new(server.socket(), worker))).unwrap()
    }

    const LEASE: Duration = Duration::from_millis(900);

    #[tokio::test]
    async fn clients_share_the_served_store() {
        let server = start();
        let (a, b) = (client(&server, 1), client(&server, 2));
        let held = a.mutex("m").lock().await.unwrap();
        let busy = b.mutex("m").try_lock().await.unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Contended);
        assert_eq!(busy.holders()[0].token, held.grant());
        let (sender, waits) = oneshot::channel();
        let sender = Mutex::new(Some(sender));
        let callback = move |_| {
            if let Some(sender) = locked(&sender).take() {
                sender.send(()).unwrap();
            }
        };
        let waiting = tokio::spawn(async move { b.mutex("m").on_waiting(callback).lock().await });
        waits.await.unwrap();
        assert_eq!(a.list("").await.unwrap()[0].claims.len(), 2);
        let before = held.token();
        held.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(next.token() > before);
        let other = a.semaphore("m", 3).try_acquire().await.unwrap_err();
        assert_eq!(other.kind(), ErrorKind::Mismatch);
        assert_eq!(a.evict("m", Evict::Holders).await.unwrap(), 1);
        assert!(a.inspect("m").await.unwrap().is_none());
    }

    #[tokio::test]
    async fn cut_connection_leaves_the_outcome_unknown_and_is_reopened() {
        let server = start();
        let store = Served::new(server.socket(), 1);
        let claim = Claim::new(Name::new("m").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let joined = store.join(&claim, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }));
        server.lines.set(1, Line::Closed);
        let error = store.leave(&claim, None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        let other = Served::new(server.socket(), 2);
        assert!(
            other.read(&claim.name).await.unwrap().is_some(),
            "a fault of one line affects another line"
        );
        server.lines.set(1, Line::Up);
        store.leave(&claim, None).await.unwrap();
        assert!(other.read(&claim.name).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn frozen_line_delays_replies_and_deaf_line_drops_them() {
        let server = start();
        let store = Arc::new(Served::new(server.socket(), 1));
        let claim = Claim::new(Name::new("m").unwrap(), Kind::Mutex, 1, 1).unwrap();
        store.read(&claim.name).await.unwrap();

        server.lines.set(1, Line::Frozen);
        let (late, c) = (store.clone(), claim.clone());
        let mut join = tokio::spawn(async move { late.join(&c, Mode::Try).await });
        let wait = tokio::time::timeout(Duration::from_millis(50), &mut join).await;
        assert!(wait.is_err(), "a frozen line passed data");
        server.lines.set(1, Line::Up);
        assert!(matches!(join.await.unwrap().unwrap(), Joined::Holding { .. }));

        server.lines.set(1, Line::Deaf);
        let wait = tokio::time::timeout(Duration::from_millis(50), store.leave(&claim, None)).await;
        assert!(wait.is_err(), "a line that drops replies passed one");
        server.lines.set(1, Line::Up);
        assert!(store.read(&claim.name).await.unwrap().is_none(), "the request was not executed");
    }

    #[tokio::test]
    async fn lease_survives_a_short_cut_and_expires_in_a_long_one() {
        let server = start();
        let (a, b) = (client(&server, 1), client(&server, 2));
        let lease = LEASE * 6;
        let held = a.mutex("m").lease(lease).lock().await.unwrap();
        server.lines.set(1, Line::Closed);
        assert_eq!(a.list("").await.unwrap_err().kind(), ErrorKind::Unreachable);
        server.lines.set(1, Line::Up);
        let lost = tokio::time::timeout(lease * 3 / 2, held.lost()).await;
        assert!(lost.is_err(), "the lock was not renewed over a new connection");
        server.lines.set(1, Line::Closed);
        let next = b.mutex("m").lease(lease).lock().await.unwrap();
        assert!(!held.is_held());
        assert!(next.token() > held.token());
        assert_eq!(held.lost().await, leasehold::LostReason::Expired);
    }

    #[test]
    fn socket_is_private_and_removed_on_drop() {
        use std::os::unix::fs::PermissionsExt;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let server = runtime.block_on(async { start() });
        let directory = server.socket().parent().unwrap().to_owned();
        let mode = std::fs::metadata(&directory).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        drop((server, runtime));
        assert!(!directory.exists());
    }
}
