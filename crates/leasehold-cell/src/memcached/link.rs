//! The connection to one memcached server, and the task that has it.
//!
//! All calls of a client go over one connection, in the order in which they came: what is asked for while
//! an answer is under way goes out together, and nobody waits behind one that is slow for long, since the
//! server computes nothing. A caller that is dropped takes its request along if it was not yet sent;
//! otherwise the answer is read and thrown away, so that nobody gets another's. After anything unexpected
//! the connection is given up, and all who wait for an answer are told that it is unknown; the next
//! request makes another. One that ends while nobody waits is found out then, and costs nobody an answer.
//!
//! Written by hand, since it is little: four commands of one line, of a protocol that is documented. The
//! clients that there are hide on which connection a value was read, and that is what versions need.
//! What is read is bounded, by lines and by values.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use leasehold_core::kit::{Host, wall_micros};
use leasehold_core::{Clock, Error, ErrorKind, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::fault::{refused, stranger, unreachable};
use super::url::MemcachedUrl;
use super::wire::{self, Head};
use crate::cells::{Answer, Request};

/// How long connecting, and all that comes first, may take.
const CONNECT: Duration = Duration::from_secs(3);
/// How long the answers to what was sent together may take, at least and at most: as long as a session
/// waits for its next touch.
const ANSWER: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(3)];
/// How far this machine's wall clock may be off the server's and is still believed, in microseconds.
const OFF: i64 = 2_000_000;
/// The longest line that is read.
const LINE: usize = 4_096;
/// So much is sent together, about.
const TOGETHER: usize = 64 * 1_024;

/// What callers have of the connection.
#[derive(Debug)]
pub(super) struct Link {
    host: Host,
    jobs: UnboundedSender<Job>,
    shared: Arc<Shared>,
}

/// What is known of the server's clock, and how much was sent.
#[derive(Debug)]
struct Shared {
    clock: Clock,
    /// What the server's clock is ahead of our boot clock by, at least and at most, in microseconds.
    ahead: [AtomicI64; 2],
    round_trips: AtomicU64,
}

#[derive(Debug)]
struct Job {
    requests: Vec<Request>,
    reply: oneshot::Sender<Result<Vec<Answer>>>,
}

impl Link {
    /// Begins with this connection, or makes one when it is needed; the task lives on the present runtime until this is
    /// dropped.
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
        // It was being read as its time was over.
        answer.await.unwrap_or_else(|_| Err(unreachable(&self.host, "no reply in time")))
    }

    pub(super) fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(Relaxed)
    }

    /// This machine's wall clock, held to the server's. That tells whole seconds, and may be off by as many
    /// as it had when it was started: where clients agree with each other, theirs is the better.
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
        let Told { asked, answered, time } = connection.told;
        let time = i64::try_from(time).unwrap_or(0).saturating_mul(1_000_000);
        self.ahead[0].store(time.saturating_sub(answered), Relaxed);
        self.ahead[1].store(time.saturating_add(1_000_000).saturating_sub(asked), Relaxed);
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

/// Resolves when a connection over which nothing was asked is closed, or says something.
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

/// Kind, cause and hint of an error, for another caller.
fn copy(error: &Error) -> Error {
    let copied = Error::new(error.kind(), error.reason());
    match error.hint() {
        Some(hint) => copied.with_hint(hint),
        None => copied,
    }
}

/// Sends all of it, and hands out the answers. The connection, if it is still good.
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
        async { write.write_all(&bytes).await.map_err(|e| unreachable(host, &e.to_string())) };
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
        // It was one answer that was not to be had: others of the same time may be.
        Ok(Err(_)) => tell_all(jobs.map(|(job, _)| job), || unreachable(host, "unexpected reply")),
        Err(_) => tell_all(jobs.map(|(job, _)| job), || unreachable(host, "no reply in time")),
    }
    None
}

/// Reads the answers to these, or what one of them was refused with; an error of the outer kind leaves the
/// connection out of step.
async fn answers(
    read: &mut BufReader<OwnedReadHalf>,
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
            // A whole answer: the server has passed over what came with the request.
            Head::Refused(said) if said.starts_with("SERVER_ERROR") => {
                refusal = refusal.or_else(|| Some(refused(&said)));
                Answer::Refused
            }
            Head::Refused(said) => return Err(refused(&said)),
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

/// One line, without its end.
async fn line(read: &mut BufReader<OwnedReadHalf>, host: &Host) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let got = read.take(LINE as u64).read_until(b'\n', &mut line).await;
    got.map_err(|e| unreachable(host, &e.to_string()))?;
    if line.is_empty() {
        return Err(unreachable(host, "the server closed the connection"));
    }
    // Those of the crawler end without a return.
    match line.strip_suffix(b"\n") {
        Some(whole) => Ok(whole.strip_suffix(b"\r").unwrap_or(whole).to_vec()),
        None => Err(stranger(host, &line)),
    }
}

/// A connection that was greeted.
#[derive(Debug)]
pub(super) struct Connection {
    read: BufReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    host: Host,
    told: Told,
}

/// What the server's clock showed, in whole seconds since 1970, between two moments of our boot clock.
#[derive(Clone, Copy, Debug)]
struct Told {
    asked: i64,
    answered: i64,
    time: u64,
}

impl Connection {
    /// Connects, shows who we are, and asks what is there.
    pub(super) async fn open(url: &MemcachedUrl) -> Result<Self> {
        let host = &url.host;
        let opened = timeout(CONNECT, Self::greeted(url)).await;
        opened.unwrap_or_else(|_| Err(unreachable(host, "no reply in time")))
    }

    async fn greeted(url: &MemcachedUrl) -> Result<Self> {
        let host = &url.host;
        let failed = |e: std::io::Error| unreachable(host, &e.to_string());
        let stream = TcpStream::connect((host.name.as_str(), host.port)).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (read, write) = stream.into_split();
        let told = Told { asked: 0, answered: 0, time: 0 };
        let mut open = Self { read: BufReader::new(read), write, host: host.clone(), told };
        if let Some((user, password)) = &url.login {
            let login = format!("{user} {password}");
            let said = open.say(&format!("set auth 0 0 {}\r\n{login}", login.len())).await?;
            match &said[..] {
                b"STORED" => {}
                _ if said.starts_with(b"CLIENT_ERROR") => {
                    let what = "memcached rejected the user name or the password";
                    let hint = "check the URL: memcached://user:password@host";
                    return Err(Error::new(ErrorKind::Denied, what).with_hint(hint));
                }
                _ => return Err(stranger(host, &said)),
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
            said if said.starts_with(b"CLIENT_ERROR") => {
                return Err(refused(&String::from_utf8_lossy(said)));
            }
            said if said.starts_with(b"ERROR Too many open connections") => {
                return Err(unreachable(host, "it has reached its connection limit (-c)"));
            }
            said => return Err(stranger(host, said)),
        }
        let clock = Clock::default();
        let asked = boot_micros(&clock);
        let stats = open.lines("stats", usize::MAX, |_| true).await?;
        let time = stats.iter().find_map(|line| line.strip_prefix("STAT time ")?.parse().ok());
        let time = time.ok_or_else(|| stranger(host, b"stats without a time"))?;
        open.told = Told { asked, answered: boot_micros(&clock), time };
        Ok(open)
    }

    /// Says one thing; the line that is answered.
    async fn say(&mut self, what: &str) -> Result<Vec<u8>> {
        let sent = self.write.write_all(format!("{what}\r\n").as_bytes()).await;
        sent.map_err(|e| unreachable(&self.host, &e.to_string()))?;
        line(&mut self.read, &self.host).await
    }

    /// Says one thing that is answered by lines and END; keeps so many of those that are wanted.
    pub(super) async fn lines(
        &mut self,
        what: &str,
        most: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let mut kept = Vec::new();
        let mut said = self.say(what).await?;
        while said != b"END" {
            let text = String::from_utf8_lossy(&said);
            if ["ERROR", "CLIENT_ERROR", "SERVER_ERROR", "BUSY"].iter().any(|e| text.starts_with(e))
            {
                let error = Error::new(ErrorKind::Unreachable, "the server rejected the request");
                return Err(error.with_hint("retry later").because(text.into_owned()));
            }
            if kept.len() < most.min(1_000_000) && wanted(&text) {
                kept.push(text.into_owned());
            }
            said = line(&mut self.read, &self.host).await?;
        }
        Ok(kept)
    }
}
