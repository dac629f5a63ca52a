//! Compares `etcd:` with what etcd itself needs. That is a transaction and a deletion to hold a key
//! alone, and one write and one event to wake a waiter. It is also compared with `etcdctl lock`.
//! All use one private member.
//!
//! The raw requests use the same gRPC library, on a connection with a thread of its own like
//! leasehold's.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::etcd::EtcdStore;
use leasehold::{Builder, Client};
use prost::Message;
use testbed::Etcd;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use crate::figures::Kind;
use crate::kept;
use crate::measure::{
    Effort, Measured, Result, Subject, alternate, digits, duration, keep, now, percentile, rate,
    table,
};
use crate::queued;

const CONTENDERS: [usize; 2] = [8, 32];
/// Number of clients that the contenders share.
const CLIENTS: usize = 8;
const MANY: &str = "etcd:, many want one lock";
/// Number of names that are locked at once.
const NAMES: usize = 32;

pub(crate) fn all(effort: Effort) -> Result<()> {
    let server = Etcd::start();
    // The runtime of the raw connections.
    let elsewhere =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let raw = Raw::connect(&server, elsewhere.handle())?;
    pair(effort, &server, &raw)?;
    many_names(effort, &server, &raw)?;
    hand_over(effort, &server, &raw)
}

fn two_threads() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Measures one task alone, in nanoseconds per pair.
fn pair(effort: Effort, server: &Etcd, raw: &Raw) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let lock = locks.mutex("pair");
    let lease = runtime.block_on(raw.grant())?;
    let each = |pair: &dyn Fn() -> Result<()>| -> Result<f64> {
        let (started, mut pairs) = (Instant::now(), 0_u32);
        while started.elapsed() < effort.time {
            pair()?;
            pairs += 1;
        }
        Ok(started.elapsed().as_nanos() as f64 / f64::from(pairs))
    };
    let bare = || each(&|| runtime.block_on(raw.pair(b"raw/pair", lease)));
    let ours =
        || each(&|| runtime.block_on(async { Ok(lock.lock().await?.release().await.map(drop)?) }));
    let theirs = || {
        each(&|| {
            let mut command = server.etcdctl_command();
            command.args(["lock", "theirs", "true"]).stdin(Stdio::null());
            match command.status()?.success() {
                true => Ok(()),
                false => Err("etcdctl lock failed".into()),
            }
        })
    };
    let subjects = vec![
        Subject::new("transaction + deletion", bare),
        Subject::new("leasehold, lock + release", ours),
        Subject::new("etcdctl lock, a process each", theirs),
    ];
    let measured = alternate(effort, subjects)?;
    let row = |m: &Measured<'_, f64>| {
        let nanos = m.median(|n| *n);
        vec![
            m.name.to_owned(),
            duration(nanos),
            rate(1e9 / nanos),
            digits(measured[0].ratio(m, |n| *n)),
        ]
    };
    let head = ["", "time", "pairs/s", "speed relative to the raw requests"];
    keep(Kind::Pair, "etcd:, uncontended pair", &measured, |nanos| *nanos);
    table("etcd:, uncontended pair", &head, measured.iter().map(row).collect());
    Ok(())
}

/// Measures many tasks, each with its own name, in pairs per second of all together.
fn many_names(effort: Effort, server: &Etcd, raw: &Raw) -> Result<()> {
    let runtime = two_threads()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let lease = runtime.block_on(raw.grant())?;
    let together = |job: &dyn Fn(usize) -> Job| -> Result<f64> {
        runtime.block_on(async {
            let started = Instant::now();
            let mut running = JoinSet::new();
            for n in 0..NAMES {
                running.spawn(job(n).until(started + effort.time));
            }
            let mut pairs = 0;
            for count in running.join_all().await {
                pairs += count?;
            }
            Ok(f64::from(pairs) / started.elapsed().as_secs_f64())
        })
    };
    let bare = || together(&|n| Job::Raw(raw.clone(), format!("raw/many-{n}").into_bytes(), lease));
    let ours = || together(&|n| Job::Ours(locks.mutex(format!("many-{n}"))));
    let subjects = vec![
        Subject::new("transaction + deletion", bare),
        Subject::new("leasehold, lock + release", ours),
    ];
    let measured = alternate(effort, subjects)?;
    let row = |m: &Measured<'_, f64>| {
        let speed = digits(m.ratio(&measured[0], |r| *r));
        vec![m.name.to_owned(), rate(m.median(|r| *r)), speed]
    };
    let head = ["", "pairs/s", "of the raw requests"];
    table(&format!("etcd:, {NAMES} tasks, a name each"), &head, measured.iter().map(row).collect());
    Ok(())
}

/// The operation that one task repeats.
enum Job {
    Raw(Raw, Vec<u8>, i64),
    Ours(leasehold::Mutex),
}

impl Job {
    async fn until(self, until: Instant) -> Result<u32> {
        let mut pairs = 0;
        while Instant::now() < until {
            match &self {
                Self::Raw(raw, key, lease) => raw.pair(key, *lease).await?,
                Self::Ours(lock) => lock.lock().await?.release().await.map(drop)?,
            }
            pairs += 1;
        }
        Ok(pairs)
    }
}

/// Measures contention for one lock, compared with the bare wake-up.
fn hand_over(effort: Effort, server: &Etcd, raw: &Raw) -> Result<()> {
    let runtime = two_threads()?;
    let hops = || runtime.block_on(raw.hops(effort.time));
    let measured = alternate(effort, vec![Subject::new("write + event, bare", hops)])?;
    keep(Kind::HandOver, MANY, &measured, |hops| percentile(hops.clone(), 0.5));
    let hop = measured[0].median(|hops| percentile(hops.clone(), 0.5));
    let slow = measured[0].median(|hops| percentile(hops.clone(), 0.99));
    let mut rows = vec![vec![
        "write + event, bare".to_owned(),
        String::new(),
        duration(hop),
        digits(1.0),
        duration(slow),
        String::new(),
        String::new(),
    ]];
    let mut clients = Vec::new();
    // One more client holds the lock until all contenders are in the queue.
    for _ in 0..=CLIENTS {
        let store = Arc::new(runtime.block_on(EtcdStore::open(&server.url(), runtime.handle()))?);
        clients.push((Builder::default().store(store.clone())?, store));
    }
    for n in CONTENDERS {
        rows.push(contended(n, effort, &runtime, &clients, hop)?);
    }
    let theirs = etcdctl(effort, server, CONTENDERS[0])?;
    let name = format!("etcdctl lock, {} loops of processes", CONTENDERS[0]);
    kept::keep(Kind::HandOver, MANY, &name, vec![percentile(theirs.clone(), 0.5)]);
    rows.push(vec![
        name,
        rate(1e9 / percentile(theirs.clone(), 0.5)),
        duration(percentile(theirs.clone(), 0.5)),
        digits(percentile(theirs.clone(), 0.5) / hop),
        duration(percentile(theirs, 0.99)),
        String::new(),
        String::new(),
    ]);
    let head =
        ["", "turns/s", "hand-over p50", "of the bare hop", "p99", "Jain", "requests a turn"];
    table(MANY, &head, rows);
    // This is last and on its own, because it takes long.
    let longer = Effort { rounds: effort.rounds.min(3), time: effort.time * 4, ..effort };
    let crowd = contended(effort.crowd, longer, &runtime, &clients, hop)?;
    table("etcd:, a crowd wants one lock", &head, vec![crowd]);
    Ok(())
}

/// Measures one row of leasehold's.
fn contended(
    n: usize,
    effort: Effort,
    runtime: &Runtime,
    clients: &[(Client, Arc<EtcdStore>)],
    hop: f64,
) -> Result<Vec<String>> {
    let (locks, stores): (Vec<_>, Vec<_>) = clients.iter().cloned().unzip();
    let sent = async || Ok(stores.iter().map(|store| store.requests()).sum::<u64>() as f64);
    let ours = || runtime.block_on(queued::contend(&locks, n, effort, Duration::ZERO, sent));
    let measured = alternate(effort, vec![Subject::new("leasehold", ours)])?;
    let m = &measured[0];
    let name = format!("leasehold, {n} contenders on {CLIENTS} clients");
    kept::keep(
        Kind::HandOver,
        MANY,
        &name,
        m.rounds.iter().map(|outcome| outcome.handover_p50).collect(),
    );
    let row = vec![
        name,
        rate(m.median(|o| o.turns_per_second)),
        duration(m.median(|o| o.handover_p50)),
        digits(m.median(|o| o.handover_p50) / hop),
        duration(m.median(|o| o.handover_p99)),
        format!("{:.3}", m.median(|o| o.jain)),
        digits(m.median(|o| o.statements_per_turn)),
    ];
    Ok(row)
}

/// Returns the times between turns of `etcdctl lock`, in nanoseconds.
fn etcdctl(effort: Effort, server: &Etcd, n: usize) -> Result<Vec<f64>> {
    let until = Instant::now() + effort.time * 4;
    let one = || -> Result<Vec<u64>> {
        let mut notes = Vec::new();
        while Instant::now() < until {
            let mut command = server.etcdctl_command();
            command.args(["lock", "theirs", "--", "date", "+%s%N"]).stdin(Stdio::null());
            let out = command.output()?;
            // An attempt that gave up on a busy machine had no turn.
            if out.status.success() {
                notes.push(String::from_utf8(out.stdout)?.trim().parse()?);
            }
        }
        Ok(notes)
    };
    let notes: Result<Vec<Vec<u64>>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..n).map(|_| scope.spawn(one)).collect();
        running.into_iter().map(|t| t.join().map_err(|_| "a contender panicked")?).collect()
    });
    let mut notes: Vec<u64> = notes?.into_iter().flatten().collect();
    notes.sort_unstable();
    Ok(notes.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect())
}

/// The few messages of the raw requests, with etcd's published field numbers.
mod wire {
    use prost::{Message, Oneof};

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Put {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) key: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")]
        pub(super) value: Vec<u8>,
        #[prost(int64, tag = "3")]
        pub(super) lease: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Key {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) key: Vec<u8>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Lock {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) name: Vec<u8>,
        #[prost(int64, tag = "2")]
        pub(super) lease: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Locked {
        #[prost(bytes = "vec", tag = "2")]
        pub(super) key: Vec<u8>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Number {
        #[prost(int64, tag = "1")]
        pub(super) number: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Granted {
        #[prost(int64, tag = "2")]
        pub(super) id: i64,
    }

    #[derive(Clone, PartialEq, Oneof)]
    pub(super) enum Op {
        #[prost(message, tag = "1")]
        Range(Key),
        #[prost(message, tag = "2")]
        Put(Put),
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Request {
        #[prost(oneof = "Op", tags = "1, 2")]
        pub(super) op: Option<Op>,
    }

    /// A condition that a key's create revision (target 1) equals (0) 0.
    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Compare {
        #[prost(int32, tag = "2")]
        pub(super) target: i32,
        #[prost(bytes = "vec", tag = "3")]
        pub(super) key: Vec<u8>,
        #[prost(int64, optional, tag = "5")]
        pub(super) create_revision: Option<i64>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Txn {
        #[prost(message, repeated, tag = "1")]
        pub(super) compare: Vec<Compare>,
        #[prost(message, repeated, tag = "2")]
        pub(super) success: Vec<Request>,
        #[prost(message, repeated, tag = "3")]
        pub(super) failure: Vec<Request>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Done {
        #[prost(bool, tag = "2")]
        pub(super) succeeded: bool,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Nothing {}

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Watch {
        #[prost(message, optional, tag = "1")]
        pub(super) create: Option<Key>,
    }
}

/// A bare connection to etcd.
#[derive(Clone)]
struct Raw {
    channel: Channel,
}

impl Raw {
    fn connect(server: &Etcd, runtime: &Handle) -> Result<Self> {
        let endpoint = Endpoint::from_shared(server.url().replace("etcd:", "http:"))?;
        let _context = runtime.enter();
        Ok(Self { channel: endpoint.tcp_nodelay(true).connect_lazy() })
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        Ok(grpc.unary(Request::new(request), path, codec).await?.into_inner())
    }

    async fn grant(&self) -> Result<i64> {
        // The lease is longer than all measurements.
        let ttl = wire::Number { number: 3_600 };
        let granted: wire::Granted = self.call("/etcdserverpb.Lease/LeaseGrant", ttl).await?;
        Ok(granted.id)
    }

    /// Creates a key that does not exist, and deletes it: a lock without queue, waiters or holder.
    async fn pair(&self, key: &[u8], lease: i64) -> Result<()> {
        let key = key.to_vec();
        let compare = wire::Compare { target: 1, key: key.clone(), create_revision: Some(0) };
        let put = wire::Op::Put(wire::Put { key: key.clone(), value: Vec::new(), lease });
        let get = wire::Op::Range(wire::Key { key: key.clone() });
        let txn = wire::Txn {
            compare: vec![compare],
            success: vec![wire::Request { op: Some(put) }],
            failure: vec![wire::Request { op: Some(get) }],
        };
        let done: wire::Done = self.call("/etcdserverpb.KV/Txn", txn).await?;
        if !done.succeeded {
            return Err("another client holds the raw key".into());
        }
        let _: wire::Nothing = self.call("/etcdserverpb.KV/DeleteRange", wire::Key { key }).await?;
        Ok(())
    }

    /// Measures the time from before a key is written to the arrival of the event, in nanoseconds.
    async fn hops(&self, time: Duration) -> Result<Vec<f64>> {
        let key = b"raw/hop".to_vec();
        let (orders, requests) = mpsc::unbounded_channel();
        orders.send(wire::Watch { create: Some(wire::Key { key: key.clone() }) })?;
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let requests = Request::new(UnboundedReceiverStream::new(requests));
        let codec = ProstCodec::<wire::Watch, wire::Nothing>::default();
        let mut events: Streaming<wire::Nothing> =
            grpc.streaming(requests, path, codec).await?.into_inner();
        // This message confirms the watch.
        events.message().await?;
        let (until, mut hops) = (Instant::now() + time, Vec::new());
        while Instant::now() < until {
            let put = wire::Put { key: key.clone(), value: Vec::new(), lease: 0 };
            let (raw, sent) = (self.clone(), Instant::now());
            let writing = tokio::spawn(async move {
                raw.call::<_, wire::Nothing>("/etcdserverpb.KV/Put", put).await
            });
            events.message().await?;
            hops.push(sent.elapsed().as_nanos() as f64);
            writing.await??;
        }
        Ok(hops)
    }
}

/// A connection to the lock service of etcd, with a lease.
#[derive(Clone)]
pub(crate) struct Locks {
    raw: Raw,
    lease: i64,
}

impl Locks {
    pub(crate) fn open(server: &Etcd, runtime: &Runtime) -> Result<Self> {
        let raw = Raw::connect(server, runtime.handle())?;
        let lease = runtime.block_on(raw.grant())?;
        Ok(Self { raw, lease })
    }

    /// Acquires the lock with this name, notes the time, and releases it.
    pub(crate) async fn turn(&self, name: Vec<u8>) -> Result<u64> {
        let lock = wire::Lock { name, lease: self.lease };
        let locked: wire::Locked = self.raw.call("/v3lockpb.Lock/Lock", lock).await?;
        let note = now();
        let key = wire::Key { key: locked.key };
        let _: wire::Nothing = self.raw.call("/v3lockpb.Lock/Unlock", key).await?;
        Ok(note)
    }

    pub(crate) async fn pair(&self, name: Vec<u8>) -> Result<()> {
        self.turn(name).await.map(drop)
    }
}
