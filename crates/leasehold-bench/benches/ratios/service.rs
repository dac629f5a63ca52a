//! Measures `leasehold serve` over a store in memory, next to the lock services of etcd (`v3lock`)
//! and Consul (sessions and its key-value API).
//!
//! Each service runs in a process of its own. Clients and service share the machine's processors.
//! Consul is measured if the environment variable `CONSUL` has the path of the program.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_server::{Access, Limits, Listener, Service, serve};
use rustix::process::{Resource, getrlimit, setrlimit};
use testbed::Etcd;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::contention;
use crate::etcd::Locks;
use crate::measure::{Effort, Result, Subject, alternate, digits, duration, rate, table};
use crate::queued;

/// The number of connections that acquire and release.
const CONNECTIONS: usize = 64;
/// The number of waiters of a hand-over.
const CONTENDERS: usize = 8;
/// The number of waiting streams for each of the crowd.
const STREAMS_PER_CROWD: usize = 20;

/// A program that this benchmark has started. It ends when this is dropped.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A lock service in a process of its own.
struct Leasehold {
    program: Program,
    port: u16,
}

impl Leasehold {
    fn start() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Program(command.spawn()?);
        let mut line = String::new();
        let output = program.0.stdout.as_mut().ok_or("no pipe")?;
        BufReader::new(output).read_line(&mut line)?;
        Ok(Self { program, port: line.trim().parse()? })
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// Returns the memory that the process uses, in bytes.
    fn memory(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.program.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: f64 =
            line.and_then(|line| line.split_whitespace().next()).unwrap_or("").parse()?;
        Ok(kib * 1024.0)
    }
}

/// Runs the lock service until standard input ends.
pub(crate) fn child() -> Result<()> {
    allow_many_files()?;
    let runtime = two_threads()?;
    runtime.block_on(async {
        let locks = leasehold::connect("memory:service").await?;
        let service = Service::new(locks, Access::open(), Limits::default())?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?.port());
        let ended = async {
            let read = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
            let _ = read.await;
        };
        serve(service, vec![Listener::Tcp(listener)], ended).await;
        Ok(())
    })
}

/// A Consul agent in development mode, which keeps its data in memory.
struct Consul {
    _program: Program,
    port: u16,
}

impl Consul {
    /// Starts an agent, if `CONSUL` names the program.
    fn start(runtime: &Runtime) -> Result<Option<Self>> {
        let Some(path) = std::env::var_os("CONSUL") else { return Ok(None) };
        let free = || -> Result<u16> {
            Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
        };
        let port = free()?;
        let mut command = Command::new(path);
        command.args(["agent", "-dev", "-bind=127.0.0.1", "-dns-port=-1", "-grpc-port=-1"]);
        command.args(["-serf-wan-port=-1", "-log-level=err", &format!("-http-port={port}")]);
        command.args([format!("-server-port={}", free()?), format!("-serf-lan-port={}", free()?)]);
        let program = Program(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        let started = Instant::now();
        loop {
            let leader = runtime.block_on(async {
                Http::open(port).await?.call("GET", "/v1/status/leader", "").await
            });
            match leader {
                Ok((200, leader)) if leader.len() > 4 => break,
                _ if started.elapsed() > Duration::from_secs(60) => {
                    return Err("Consul elected no leader".into());
                }
                _ => std::thread::sleep(Duration::from_millis(100)),
            }
        }
        Ok(Some(Self { _program: program, port }))
    }
}

/// A connection that stays open between requests.
struct Http {
    stream: tokio::io::BufReader<TcpStream>,
}

impl Http {
    async fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: tokio::io::BufReader::new(stream) })
    }

    async fn send(&mut self, method: &str, path: &str, body: &str) -> Result<()> {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        Ok(self.stream.write_all(request.as_bytes()).await?)
    }

    /// Returns the status and the body of the response.
    async fn call(&mut self, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
        self.send(method, path, body).await?;
        let (mut status, mut length) = (0, 0);
        let mut line = String::new();
        loop {
            line.clear();
            self.stream.read_line(&mut line).await?;
            let text = line.trim_end().to_ascii_lowercase();
            if let Some(rest) = text.strip_prefix("http/1.1 ") {
                status = rest.split(' ').next().unwrap_or_default().parse()?;
            } else if let Some(rest) = text.strip_prefix("content-length: ") {
                length = rest.parse()?;
            } else if text.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).await?;
        Ok((status, String::from_utf8(body)?))
    }

    async fn expect(&mut self, status: u16, method: &str, path: &str, body: &str) -> Result<()> {
        match self.call(method, path, body).await? {
            (found, _) if found == status => Ok(()),
            other => Err(format!("{method} {path}: {other:?}").into()),
        }
    }
}

/// Runs a loop on each connection, and returns the time per pair of all together, in nanoseconds.
fn together<S, F>(
    runtime: &Runtime,
    effort: Effort,
    clients: &[Arc<tokio::sync::Mutex<S>>],
    pair: fn(Arc<tokio::sync::Mutex<S>>, usize, u64) -> F,
) -> Result<f64>
where
    S: Send + 'static,
    F: Future<Output = Result<()>> + Send + 'static,
{
    runtime.block_on(async {
        let mut running = JoinSet::new();
        let started = Instant::now();
        for (n, client) in clients.iter().cloned().enumerate() {
            running.spawn(async move {
                let mut pairs = 0_u64;
                while started.elapsed() < effort.time {
                    pair(client.clone(), n, pairs).await?;
                    pairs += 1;
                }
                Ok(pairs)
            });
        }
        let pairs: Result<Vec<u64>> = running.join_all().await.into_iter().collect();
        Ok(started.elapsed().as_nanos() as f64 / pairs?.iter().sum::<u64>() as f64)
    })
}

type Shared<S> = Arc<tokio::sync::Mutex<S>>;

fn shared<S>(clients: Vec<S>) -> Vec<Shared<S>> {
    clients.into_iter().map(|client| Arc::new(tokio::sync::Mutex::new(client))).collect()
}

async fn bare_pair(http: Shared<Http>, _: usize, _: u64) -> Result<()> {
    let mut http = http.lock().await;
    http.expect(200, "GET", "/healthz", "").await?;
    http.expect(200, "GET", "/healthz", "").await
}

async fn claim_pair(http: Shared<Http>, n: usize, pair: u64) -> Result<()> {
    let mut http = http.lock().await;
    let (id, pid) = (format!("{n:08x}{pair:016x}{:08x}", pair >> 8), std::process::id());
    let body = format!(
        r#"{{"id":"{id}","claim":{{"name":"pair-{n}","lease_ms":60000,"host":"bench","pid":{pid}}}}}"#
    );
    http.expect(201, "POST", "/v1/claims", &body).await?;
    let path = format!("/v1/claims/{id}?name=pair-{n}&lease_ms=60000&host=bench&pid={pid}");
    http.expect(200, "DELETE", &path, "").await
}

async fn library_pair(lock: Shared<leasehold::Mutex>, _: usize, _: u64) -> Result<()> {
    lock.lock().await.lock().await?.release().await?;
    Ok(())
}

async fn etcd_pair(locks: Shared<Locks>, n: usize, _: u64) -> Result<()> {
    locks.lock().await.pair(format!("pair-{n}").into_bytes()).await
}

/// A connection to Consul, and its session.
struct Session {
    http: Http,
    id: String,
}

impl Session {
    async fn open(port: u16) -> Result<Self> {
        let mut http = Http::open(port).await?;
        let settings = r#"{"TTL":"3600s","LockDelay":"0s"}"#;
        let (_, created) = http.call("PUT", "/v1/session/create", settings).await?;
        let id = created.split('"').nth(3).ok_or("no session")?.to_owned();
        Ok(Self { http, id })
    }
}

async fn consul_pair(session: Shared<Session>, n: usize, _: u64) -> Result<()> {
    let mut session = session.lock().await;
    for verb in ["acquire", "release"] {
        let path = format!("/v1/kv/pair-{n}?{verb}={}", session.id);
        match session.http.call("PUT", &path, "").await? {
            (200, done) if done.trim() == "true" => {}
            other => return Err(format!("{path}: {other:?}").into()),
        }
    }
    Ok(())
}

/// Compares pairs of acquire and release of a lock per connection.
pub(crate) fn pairs(effort: Effort) -> Result<()> {
    let runtime = two_threads()?;
    let service = Leasehold::start()?;
    let etcd = Etcd::start();
    let consul = Consul::start(&runtime)?;
    let all = || 0..CONNECTIONS;
    let opened: Result<Vec<Http>> =
        all().map(|_| runtime.block_on(Http::open(service.port))).collect();
    let connections = shared(opened?);
    let locks = |n: usize| -> Result<leasehold::Mutex> {
        let client = runtime.block_on(leasehold::connect(service.url()))?;
        Ok(client.mutex(format!("library-{n}")))
    };
    let library = shared(all().map(locks).collect::<Result<Vec<_>>>()?);
    let channels = all().map(|_| Locks::open(&etcd, &runtime)).collect::<Result<Vec<_>>>();
    let channels = shared(channels?);
    let sessions: Result<Vec<Session>> = match &consul {
        None => Ok(Vec::new()),
        Some(consul) => all().map(|_| runtime.block_on(Session::open(consul.port))).collect(),
    };
    let sessions = shared(sessions?);
    let mut subjects = vec![
        Subject::new("2 × GET /healthz", || together(&runtime, effort, &connections, bare_pair)),
        Subject::new("leasehold serve, requests", || {
            together(&runtime, effort, &connections, claim_pair)
        }),
        Subject::new("leasehold serve, Rust client", || {
            together(&runtime, effort, &library, library_pair)
        }),
        Subject::new("etcd v3lock, gRPC", || together(&runtime, effort, &channels, etcd_pair)),
    ];
    if consul.is_some() {
        subjects.push(Subject::new("Consul, HTTP", || {
            together(&runtime, effort, &sessions, consul_pair)
        }));
    }
    let measured = alternate(effort, subjects)?;
    let row = |m: &crate::measure::Measured<'_, f64>| {
        let nanos = m.median(|n| *n);
        let relative = digits(measured[0].ratio(m, |n| *n));
        vec![m.name.to_owned(), rate(1e9 / nanos), relative]
    };
    let title = format!("Lock services, {CONNECTIONS} connections with a lock each");
    table(&title, &["", "pairs/s", "of 2 × GET"], measured.iter().map(row).collect());
    Ok(())
}

/// Compares hand-overs through the service with those of its store, and with etcd's lock service.
pub(crate) fn hand_over(effort: Effort) -> Result<()> {
    let runtime = two_threads()?;
    let service = Leasehold::start()?;
    let etcd = Etcd::start();
    let clients = |url: &str| -> Result<Vec<leasehold::Client>> {
        // One more client holds the lock until all contenders wait.
        (0..=CONTENDERS).map(|_| Ok(runtime.block_on(leasehold::connect(url))?)).collect()
    };
    let (own, through) = (clients("memory:own")?, clients(&service.url())?);
    let contend = |clients: &[leasehold::Client]| {
        let count = async || Ok(0.0);
        runtime.block_on(queued::contend(clients, CONTENDERS, effort, Duration::ZERO, count))
    };
    let channels: Result<Vec<Locks>> =
        (0..CONTENDERS).map(|_| Locks::open(&etcd, &runtime)).collect();
    let channels = channels?;
    let theirs = || {
        let turn = |locks: &Locks| -> contention::Turn {
            let locks = locks.clone();
            Box::new(move || {
                let locks = locks.clone();
                Box::pin(async move { locks.turn(b"contention".to_vec()).await })
            })
        };
        runtime.block_on(contention::each(effort, channels.iter().map(turn).collect()))
    };
    let subjects = vec![
        Subject::new("the store itself (memory:)", || contend(&own)),
        Subject::new("leasehold serve", || contend(&through)),
        Subject::new("etcd v3lock, gRPC", theirs),
    ];
    let title = format!("Lock services, {CONTENDERS} contenders");
    contention::show_only(&title, &alternate(effort, subjects)?, 1);
    Ok(())
}

/// Measures the memory of the service with many waiting streams.
pub(crate) fn streams(effort: Effort) -> Result<()> {
    // Both processes have other files, too.
    let possible = allow_many_files()?.saturating_sub(100);
    let runtime = two_threads()?;
    let service = Leasehold::start()?;
    let before = service.memory()?;
    let many = possible.min(effort.crowd * STREAMS_PER_CROWD);
    let started = Instant::now();
    let streams: Result<Vec<Http>> = runtime.block_on(async {
        let mut streams = Vec::with_capacity(many);
        let mut opening = JoinSet::new();
        for n in 0..many {
            let port = service.port;
            opening.spawn(async move {
                let mut http = Http::open(port).await?;
                http.send("POST", &format!("/v1/locks/crowd-{}/hold", n % 100), "").await?;
                let mut line = String::new();
                // The first stream of each lock holds it, and the others wait.
                while !line.contains(r#""event":"waiting""#) && !line.contains(r#""event":"held""#)
                {
                    line.clear();
                    if http.stream.read_line(&mut line).await? == 0 {
                        return Err("a stream has ended".into());
                    }
                }
                Ok(http)
            });
            if opening.len() >= 64 {
                streams.push(opening.join_next().await.ok_or("none")??);
            }
        }
        for stream in opening.join_all().await {
            streams.push(Ok(stream?));
        }
        streams.into_iter().collect()
    });
    let (streams, took) = (streams?, started.elapsed());
    let used = service.memory()? - before;
    let row = vec![
        streams.len().to_string(),
        format!("{} MiB", digits(used / f64::from(1 << 20))),
        format!("{} KiB", digits(used / 1024.0 / many as f64)),
        duration(took.as_nanos() as f64),
    ];
    let head = ["streams", "memory of the service", "of each stream", "opened in"];
    table("leasehold serve, waiting streams", &head, vec![row]);
    Ok(())
}

/// Raises the soft limit of open files, since each stream needs one. Returns the limit.
fn allow_many_files() -> Result<usize> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)?;
    Ok(limit.maximum.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX))
}

fn two_threads() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}
