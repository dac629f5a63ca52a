//! The connection to one memcached server, and the task that owns it.
//!
//! All calls of a client use one connection, in the order in which they were made. Requests that
//! arrive while a reply is pending are sent together. A slow request hardly delays others, because
//! the server does not compute anything.
//!
//! If a caller is dropped, its request is dropped too if it was not yet sent. Otherwise the reply
//! is read and discarded, so that no other caller gets it. After an unexpected reply, a failure or
//! a timeout, the connection is closed, and all pending calls fail with an unknown result. The next
//! request opens another connection. If the server closes an idle connection, this is detected
//! immediately, and no call fails because of it.
//!
//! The protocol code is our own, because it is small: four one-line commands of a documented
//! protocol. Existing client libraries hide on which connection a value was read, which is part of
//! a version. The length of lines and values that are read is limited.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use leasehold_core::kit::{Host, Stream, wall_micros};
use leasehold_core::{Clock, Error, ErrorKind, Result};
use tokio::io::{
    AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, ReadHalf, WriteHalf, split,
};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::fault::{refused, stranger, unreachable};
use super::url::MemcachedUrl;
use super::wire::{self, Head};
use crate::cells::{Answer, Request};

/// Time limit for connecting, including the login and the first requests.
const CONNECT: Duration = Duration::from_secs(3);
/// Minimum and maximum of the time limit for the replies to requests that were sent together. The
/// time limit depends on the interval between renewals of the session.
const ANSWER: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(3)];
/// How far this machine's wall clock may differ from the server's, in microseconds.
const OFF: i64 = 2_000_000;
/// Maximum length of a reply line in bytes, including its line ending.
const LINE: usize = 4_096;
/// Approximate number of bytes that are sent together.
const TOGETHER: usize = 64 * 1_024;

/// The callers' side of the connection.
#[derive(Debug)]
pub(super) struct Link {
    host: Host,
    jobs: UnboundedSender<Job>,
    shared: Arc<Shared>,
}

/// The measured clock of the server, and the number of round trips.
#[derive(Debug)]
struct Shared {
    clock: Clock,
    /// The minimum and maximum of the server's clock minus our boot clock, in microseconds.
    ahead: [AtomicI64; 2],
    round_trips: AtomicU64,
}

#[derive(Debug)]
struct Job {
    requests: Vec<Request>,
    reply: oneshot::Sender<Result<Vec<Answer>>>,
}

impl Link {
    /// Uses the connection `first`, or opens a connection when one is needed. The task runs on the
    /// current runtime until this value is dropped.
    pub(super) fn new(url: MemcachedUrl, first: Option<Connection>) -> Self {
        let (jobs, todo) = unbounded_channel();
        let ahead = [AtomicI64::new(0), AtomicI64::new(0)];
        let (clock, round_trips) = Default::default();
        let shared = Arc::new(Shared { clock, ahead, round_trips });
        first.iter().for_each(|first| shared.learn(first));
        let host = url.host.clone();
        tokio::spawn(serve(url, first, todo, shared.clone()));
        Self { host, jobs, shared }
    }

    pub(super) async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let (reply, answer) = oneshot::channel();
        let ended = "the runtime of this client was shut down";
        let sent = self.jobs.send(Job { requests, reply });
        sent.map_err(|_| Error::new(ErrorKind::Closed, ended).with_hint("connect again"))?;
        // The time limit passed while the reply was being read.
        answer.await.unwrap_or_else(|_| Err(unreachable(&self.host, "no reply in time")))
    }

    pub(super) fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(Relaxed)
    }

    /// Returns this machine's wall clock, limited to a few seconds around the server's. The
    /// server's clock has whole seconds, and is as wrong as it was when the server started. So this
    /// machine's clock is better if the clients agree with each other.
    pub(super) fn wall_micros(&self) -> u64 {
        let [least, most] = [0, 1].map(|i| self.shared.ahead[i].load(Relaxed));
        let now = boot_micros(&self.shared.clock);
        let theirs = |ahead: i64| now.saturating_add(ahead).max(0).cast_unsigned();
        let (least, most) = (theirs(least.saturating_sub(OFF)), theirs(most.saturating_add(OFF)));
        wall_micros().clamp(least, most.max(least))
    }
}

fn boot_micros(clock: &Clock) -> i64 {
    i64::try_from(clock.now().as_nanos() / 1_000).unwrap_or(i64::MAX)
}

impl Shared {
    fn learn(&self, connection: &Connection) {
        let ServerTime { sent, received, time } = connection.server_time;
        let time = i64::try_from(time).unwrap_or(0).saturating_mul(1_000_000);
        self.ahead[0].store(time.saturating_sub(received), Relaxed);
        self.ahead[1].store(time.saturating_add(1_000_000).saturating_sub(sent), Relaxed);
    }
}

async fn serve(
    url: MemcachedUrl,
    first: Option<Connection>,
    mut todo: UnboundedReceiver<Job>,
    shared: Arc<Shared>,
) {
    let mut connection = first;
    let mut number = 1;
    let limit = (url.options.session / 5).clamp(ANSWER[0], ANSWER[1]);
    loop {
        let job = tokio::select! {
            biased;
            () = ended(&mut connection) => {
                connection = None;
                continue;
            }
            job = todo.recv() => job,
        };
        let Some(job) = job else { return };
        let mut jobs = vec![job];
        while jobs.len() < 256
            && let Ok(job) = todo.try_recv()
        {
            jobs.push(job);
        }
        jobs.retain(|job| !job.reply.is_closed());
        if jobs.is_empty() {
            continue;
        }
        let open = match connection.take() {
            Some(open) => open,
            None => match Connection::open(&url).await {
                Ok(open) => {
                    number += 1;
                    shared.learn(&open);
                    open
                }
                Err(error) => {
                    tell_all(jobs, || copy(&error));
                    continue;
                }
            },
        };
        shared.round_trips.fetch_add(1, Relaxed);
        connection = exchange(open, number, &url.host, jobs, limit).await;
    }
}

/// Completes when an idle connection is closed or receives data.
async fn ended(connection: &mut Option<Connection>) {
    match connection {
        Some(open) => _ = open.read.fill_buf().await,
        None => std::future::pending().await,
    }
}

fn tell_all(jobs: impl IntoIterator<Item = Job>, error: impl Fn() -> Error) {
    for job in jobs {
        let _ = job.reply.send(Err(error()));
    }
}

/// Copies the kind, reason and hint of an error for another caller.
fn copy(error: &Error) -> Error {
    let copied = Error::new(error.kind(), error.reason());
    match error.hint() {
        Some(hint) => copied.with_hint(hint),
        None => copied,
    }
}

/// Sends all requests and delivers the replies. Returns the connection if it is still usable.
async fn exchange(
    mut open: Connection,
    number: u64,
    host: &Host,
    jobs: Vec<Job>,
    limit: Duration,
) -> Option<Connection> {
    let mut bytes = Vec::with_capacity(TOGETHER);
    let sent: Vec<Vec<bool>> = jobs
        .iter()
        .map(|job| {
            job.requests.iter().map(|request| wire::write(request, number, &mut bytes)).collect()
        })
        .collect();
    let mut jobs = jobs.into_iter().zip(sent);
    let (read, write) = (&mut open.read, &mut open.write);
    let sending =
        async { send(write, &bytes).await.map_err(|e| unreachable(host, &e.to_string())) };
    let reading = async {
        for (job, sent) in &mut jobs {
            match answers(read, number, host, &job.requests, &sent).await {
                Ok(answers) => _ = job.reply.send(answers),
                Err(error) => {
                    let copied = copy(&error);
                    let _ = job.reply.send(Err(error));
                    return Err(copied);
                }
            }
        }
        Ok(())
    };
    let done = timeout(limit, async { tokio::try_join!(sending, reading) }).await;
    match done {
        Ok(Ok(_)) => return Some(open),
        Ok(Err(error)) if error.kind() == ErrorKind::Unreachable => {
            tell_all(jobs.map(|(job, _)| job), || unreachable(host, &error.reason()));
        }
        // Only one reply was unusable, so the other requests of the batch may be repeated.
        Ok(Err(_)) => tell_all(jobs.map(|(job, _)| job), || unreachable(host, "unexpected reply")),
        Err(_) => tell_all(jobs.map(|(job, _)| job), || unreachable(host, "no reply in time")),
    }
    None
}

/// Reads the replies to these requests. The inner error means that the server rejected one of them;
/// the outer error means that the connection is broken.
async fn answers(
    read: &mut Read,
    number: u64,
    host: &Host,
    requests: &[Request],
    sent: &[bool],
) -> Result<Result<Vec<Answer>>> {
    let mut answers = Vec::with_capacity(requests.len());
    let mut refusal = None;
    for (request, sent) in requests.iter().zip(sent) {
        if !sent {
            answers.push(Answer::Refused);
            continue;
        }
        let line = line(read, host).await?;
        answers.push(match wire::head(request, &line, number) {
            Head::Whole(answer) => answer,
            // The reply is complete, because the server has skipped the data of the request.
            Head::Refused(reply) if reply.starts_with("SERVER_ERROR") => {
                refusal = refusal.or_else(|| Some(refused(&reply)));
                Answer::Refused
            }
            Head::Refused(reply) => return Err(refused(&reply)),
            Head::Garbage => return Err(stranger(host, &line)),
            Head::Value { length, number: version, remaining } => {
                let mut value = vec![0; length + 2];
                let all = read.read_exact(&mut value).await;
                all.map_err(|e| unreachable(host, &e.to_string()))?;
                value.truncate(length);
                wire::found(value, number, version, remaining)
            }
        });
    }
    Ok(refusal.map_or(Ok(answers), Err))
}

/// Reads one line, without its end.
async fn line(read: &mut Read, host: &Host) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let got = read.take(LINE as u64).read_until(b'\n', &mut line).await;
    got.map_err(|e| unreachable(host, &e.to_string()))?;
    if line.is_empty() {
        return Err(unreachable(host, "the server closed the connection"));
    }
    // The crawler's lines end without a carriage return.
    match line.strip_suffix(b"\n") {
        Some(whole) => Ok(whole.strip_suffix(b"\r").unwrap_or(whole).to_vec()),
        None => Err(stranger(host, &line)),
    }
}

/// Sends all bytes. TLS may send nothing until the stream is flushed.
async fn send(write: &mut Write, bytes: &[u8]) -> std::io::Result<()> {
    write.write_all(bytes).await?;
    write.flush().await
}

type Read = BufReader<ReadHalf<Box<dyn Stream>>>;
type Write = WriteHalf<Box<dyn Stream>>;

/// A connection after the login and the first requests.
#[derive(Debug)]
pub(super) struct Connection {
    read: Read,
    write: Write,
    host: Host,
    server_time: ServerTime,
}

/// The time of the server's clock in whole seconds since 1970, and when it was requested and
/// received by our boot clock.
#[derive(Clone, Copy, Debug)]
struct ServerTime {
    sent: i64,
    received: i64,
    time: u64,
}

impl Connection {
    /// Connects, logs in, and checks the server.
    pub(super) async fn open(url: &MemcachedUrl) -> Result<Self> {
        let host = &url.host;
        let opened = timeout(CONNECT, Self::greeted(url)).await;
        opened.unwrap_or_else(|_| Err(unreachable(host, "no reply in time")))
    }

    async fn greeted(url: &MemcachedUrl) -> Result<Self> {
        let host = &url.host;
        let failed = |e: std::io::Error| unreachable(host, &e.to_string());
        let reach = |by: Option<IpAddr>| {
            let (host, encryption) = (host.clone(), url.encryption.clone());
            async move {
                let stream = match by {
                    Some(ip) => TcpStream::connect((ip, host.port)).await?,
                    None => TcpStream::connect((host.name.as_str(), host.port)).await?,
                };
                stream.set_nodelay(true)?;
                match encryption {
                    Some(encryption) => encryption.greet(&host, stream).await,
                    None => Ok(Box::new(stream) as Box<dyn Stream>),
                }
            }
        };
        let stream = url.addresses.connect(Some((&host.name, host.port)), reach).await;
        let (read, write) = split(stream.map_err(failed)?);
        let server_time = ServerTime { sent: 0, received: 0, time: 0 };
        let mut open = Self { read: BufReader::new(read), write, host: host.clone(), server_time };
        if let Some((user, password)) = &url.login {
            let login = format!("{user} {}", password.now());
            let reply = open.say(&format!("set auth 0 0 {}\r\n{login}", login.len())).await?;
            match &reply[..] {
                b"STORED" => password.accepted(),
                _ if reply.starts_with(b"CLIENT_ERROR") => {
                    let what = "memcached rejected the user name or the password";
                    let hint = "check the URL: memcached://user:password@host";
                    let denied = Error::new(ErrorKind::Denied, what).with_hint(hint);
                    return Err(password.rejected("memcached", denied));
                }
                _ => return Err(stranger(host, &reply)),
            }
        }
        match &open.say("mn").await?[..] {
            b"MN" => {}
            b"ERROR" => {
                let what =
                    format!("the server at {host} does not support memcached's meta commands");
                let hint = "run memcached 1.6 or later, and connect to it without a proxy";
                return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
            }
            reply if reply.starts_with(b"CLIENT_ERROR") => {
                return Err(refused(&String::from_utf8_lossy(reply)));
            }
            reply if reply.starts_with(b"ERROR Too many open connections") => {
                return Err(unreachable(host, "it has reached its connection limit (-c)"));
            }
            reply => return Err(stranger(host, reply)),
        }
        let clock = Clock::default();
        let sent = boot_micros(&clock);
        let stats = open.lines("stats", usize::MAX, |_| true).await?;
        let time = stats.iter().find_map(|line| line.strip_prefix("STAT time ")?.parse().ok());
        let time = time.ok_or_else(|| stranger(host, b"stats without a time"))?;
        open.server_time = ServerTime { sent, received: boot_micros(&clock), time };
        Ok(open)
    }

    /// Sends one request and returns the first line of the reply.
    async fn say(&mut self, what: &str) -> Result<Vec<u8>> {
        let sent = send(&mut self.write, format!("{what}\r\n").as_bytes()).await;
        sent.map_err(|e| unreachable(&self.host, &e.to_string()))?;
        line(&mut self.read, &self.host).await
    }

    /// Sends one request whose reply consists of lines and a final END. Returns at most `most` of
    /// the wanted lines.
    pub(super) async fn lines(
        &mut self,
        what: &str,
        most: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let mut kept = Vec::new();
        let mut reply = self.say(what).await?;
        while reply != b"END" {
            let text = String::from_utf8_lossy(&reply);
            if ["ERROR", "CLIENT_ERROR", "SERVER_ERROR", "BUSY"].iter().any(|e| text.starts_with(e))
            {
                let error = Error::new(ErrorKind::Unreachable, "the server rejected the request");
                return Err(error.with_hint("retry later").with_source(text.into_owned()));
            }
            if kept.len() < most.min(1_000_000) && wanted(&text) {
                kept.push(text.into_owned());
            }
            reply = line(&mut self.read, &self.host).await?;
        }
        Ok(kept)
    }
}
