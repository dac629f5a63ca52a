//! Connections to one server: one for each runtime that calls, and none that a caller can break.
//!
//! A call from a program's own runtime goes over a connection whose driver runs in that runtime, so
//! no thread hands it to another and back; calls of our own thread (renewals, clean-up, callers
//! without a runtime) have theirs there. So the two never wait for each other: a caller that blocks
//! its executor stops its own takes, and no renewal.
//!
//! - *A connection breaks*: the next call makes a new one. Whoever listens is told
//!   ([`PushListener::interrupted`]) after the new one listens again, since what was said meanwhile went
//!   unheard.
//! - *An answer does not come*: the caller's deadline ends the call, never the connection's; but a
//!   connection on which a call was given up after [`SUSPECT`] is not used for new ones, since the
//!   network may have lost it without a word.
//! - *The address belongs to another server by now*: the new connection is refused ([`Gate`]).
//! - *A caller is dropped*: what it sent may be done; its answer is thrown away when it comes.
//! - *A runtime ends*: its connection ends with it, and is forgotten.
//! - *A runtime has no I/O driver*: connecting there fails in its own task, and its calls then use
//!   our thread's connection.
//!
//! No timer of a caller's runtime is used, which may have none: limits are above, or on ours.

use leasehold_core::kit::locked;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, IntoConnectionInfo, Pipeline,
    ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, RedisError, RedisResult, Value,
};
use tokio::runtime::{Handle, Id};

use super::fault::{self, Refusal};
use super::url::{Address, Login};
use leasehold_core::{Error, ErrorKind, Moment, Result};

/// How long connecting and logging in may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the network may keep what we send unacknowledged before the connection is given up.
const USER_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection that is idle, since it only listens, is asked so often whether it is still there: the
/// network may have forgotten it without a word.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// A connection on which somebody waited in vain for so long gets no new calls.
const SUSPECT: Duration = Duration::from_secs(1);

/// Checks that a connection leads to the store that this client has used. One for each server.
#[async_trait]
pub(crate) trait Gate: fmt::Debug + Send + Sync + 'static {
    /// Refuses a new connection to `at` that leads elsewhere. Nothing was sent over it but the
    /// login.
    async fn admit(&self, connection: &mut MultiplexedConnection, at: &Address) -> RedisResult<()>;
    /// A request that was sent then was answered.
    fn heard(&self, _sent: Moment) {}
    /// The time now, for [`heard`](Self::heard).
    fn now(&self) -> Moment {
        Moment::from_nanos(0)
    }
}

/// Who listens to what a server pushes on a channel of ours.
pub(crate) trait PushListener: fmt::Debug + Send + Sync + 'static {
    /// A message on our channel.
    fn message(&self, text: &[u8]);
    /// Some messages may have gone unheard.
    fn interrupted(&self);
    /// The channels on which messages are expected, of whichever connection they are.
    fn expected(&self) -> Vec<String> {
        Vec::new()
    }
    /// What each connection listens to besides its own channel: what is said to all clients. That it may not is
    /// no failure.
    fn common(&self) -> Option<&'static str> {
        None
    }
}

/// One server, as one client of ours reaches it.
pub(crate) struct Node {
    address: Address,
    client: Client,
    runtime: Handle,
    channel: Option<Channel>,
    gate: Option<Arc<dyn Gate>>,
    links: Mutex<HashMap<Id, Arc<Link>>>,
    /// Channels of connections to other servers that are gone; our own thread's connection to this one
    /// listens to them as well.
    adopted: Mutex<BTreeSet<String>>,
    /// It did not answer lately.
    doubtful: Arc<AtomicBool>,
}

/// What a node's connections listen to.
#[derive(Debug)]
struct Channel {
    /// Each connection's channel is this and its runtime's number.
    name: String,
    hears: Arc<dyn PushListener>,
}

/// The connection of one runtime, be there one or not.
#[derive(Debug)]
struct Link {
    runtime: Handle,
    channel: Option<Arc<str>>,
    current: Mutex<Option<Connected>>,
    /// Held by whoever connects.
    connecting: tokio::sync::Mutex<()>,
    /// It was connected before: then something may have gone unheard.
    was_up: AtomicBool,
    /// Its runtime cannot do I/O.
    unable: AtomicBool,
}

#[derive(Clone, Debug)]
struct Connected {
    connection: MultiplexedConnection,
    broken: Arc<AtomicBool>,
}

/// A script that the server runs in one atomic step.
#[derive(Debug)]
pub(crate) struct Script {
    code: String,
    hash: String,
}

impl Script {
    pub(crate) fn new(code: impl Into<String>) -> Self {
        let code = code.into();
        let hash = redis::Script::new(&code).get_hash().to_owned();
        Self { code, hash }
    }

    /// The same with one part of its text replaced.
    pub(crate) fn with(&self, part: &str, by: &str) -> Self {
        Self::new(self.code.replacen(part, by, 1))
    }

    /// The call of it by its hash, with so many keys; keys and arguments are to be appended.
    pub(crate) fn call(&self, keys: usize) -> Cmd {
        self.sized_call(keys, 0, 0)
    }

    /// The same, with room for so many keys and arguments, and bytes in them.
    pub(crate) fn sized_call(&self, keys: usize, arguments: usize, bytes: usize) -> Cmd {
        const BEFORE: &str = "EVALSHA";
        let mut cmd =
            Cmd::with_capacity(3 + keys + arguments, BEFORE.len() + self.hash.len() + 4 + bytes);
        cmd.arg(BEFORE).arg(&self.hash).arg(keys);
        cmd
    }

    /// The same call with the script in full, which the server then keeps.
    pub(crate) fn in_full(&self, call: &Cmd) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(&self.code);
        for arg in call.args_iter().skip(2) {
            if let redis::Arg::Simple(bytes) = arg {
                cmd.arg(bytes);
            }
        }
        cmd
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Node {
    /// A server that is not connected to yet. With a channel, every connection listens to a channel
    /// of its own, whose name begins so, before anything else is sent over it. With a gate, each is
    /// checked before that.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the certificates of the URL cannot be used.
    pub(crate) fn new(
        address: Address,
        login: &Login,
        runtime: &Handle,
        channel: Option<(String, Arc<dyn PushListener>)>,
        gate: Option<Arc<dyn Gate>>,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            client: client(&address, login)?,
            address,
            runtime: runtime.clone(),
            channel: channel.map(|(name, hears)| Channel { name, hears }),
            gate,
            links: Mutex::default(),
            adopted: Mutex::default(),
            doubtful: Arc::default(),
        }))
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Whether it left a call unanswered since it was last trusted: it may be dead, without the
    /// network having said so.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Relaxed)
    }

    /// Ends [`is_doubtful`](Self::is_doubtful) until the next call that is not answered.
    pub(crate) fn trust_again(&self) {
        self.doubtful.store(false, Ordering::Relaxed);
    }

    /// The channel on which a claim that is sent now, from here, hears of its grant.
    pub(crate) fn channel(&self) -> Option<Arc<str>> {
        self.link().channel.clone()
    }

    /// Whether a connection to this server listens to a channel, or did.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        let ours = self.channel.as_ref().and_then(|c| channel.strip_prefix(&c.name));
        ours.is_some_and(|rest| rest.starts_with(':')) || locked(&self.adopted).contains(channel)
    }

    /// Listens to channels of connections to other servers, which are gone. Whoever listens is told
    /// that something may have gone unheard.
    pub(crate) fn adopt(self: &Arc<Self>, channels: Vec<String>) {
        locked(&self.adopted).extend(channels.iter().cloned());
        let node = self.clone();
        drop(self.runtime.spawn(async move {
            // If there is no connection now, the next one listens to them from its beginning.
            let Ok(mut connected) = node.connected().await else { return };
            for channel in channels {
                if let Err(error) = connected.connection.subscribe(channel).await {
                    return connected.note(&error);
                }
            }
            if let Some(channel) = &node.channel {
                channel.hears.interrupted();
            }
        }));
    }

    /// Runs one command. What is not known is whether a command that failed was done.
    pub(crate) async fn call(&self, cmd: &Cmd) -> RedisResult<Value> {
        self.call_noting(cmd, &mut false).await
    }

    /// The same; `doubt` becomes true where it was sent and not answered, also when this is dropped: then
    /// it may have been done.
    async fn call_noting(&self, cmd: &Cmd, doubt: &mut bool) -> RedisResult<Value> {
        let mut connected = self.connected().await?;
        let watched = Call::on(self, &connected);
        let before = std::mem::replace(doubt, true);
        let sent = self.gate.as_ref().map(|gate| gate.now());
        let answer = connected.connection.send_packed_command(cmd).await;
        watched.answered();
        let answer = answer.and_then(Value::extract_error);
        if !answer.as_ref().is_err_and(fault::is_gone) {
            *doubt = before;
            self.heard(sent);
        }
        answer.inspect_err(|error| connected.note(error))
    }

    /// Runs a script; sends it in full if the server does not know it.
    #[cfg(feature = "redlock")]
    pub(crate) async fn run(&self, script: &Script, call: &Cmd) -> RedisResult<Value> {
        self.run_noting(script, call, &mut false).await
    }

    /// The same. `doubt` becomes true where it may
    /// have been done though it was not answered.
    pub(crate) async fn run_noting(
        &self,
        script: &Script,
        call: &Cmd,
        doubt: &mut bool,
    ) -> RedisResult<Value> {
        match self.call_noting(call, doubt).await {
            Err(error) if fault::refusal(&error) == Some(Refusal::NoScript) => {
                Box::pin(self.call_noting(&script.in_full(call), doubt)).await
            }
            answer => answer,
        }
    }

    /// Runs many commands in one go; one answer for each, which may be an error of the server.
    pub(crate) async fn pipeline(&self, pipeline: &Pipeline) -> RedisResult<Vec<Value>> {
        let mut connected = self.connected().await?;
        let watched = Call::on(self, &connected);
        let sent = self.gate.as_ref().map(|gate| gate.now());
        let answers = connected.connection.send_packed_commands(pipeline, 0, pipeline.len()).await;
        watched.answered();
        let answers = answers.inspect_err(|error| connected.note(error))?;
        self.heard(sent);
        for refused in answers.iter().filter(|answer| matches!(answer, Value::ServerError(_))) {
            let _ = refused.clone().extract_error().inspect_err(|error| connected.note(error));
        }
        Ok(answers)
    }

    /// Has the server tell on a connection of its own which keys change that begin so; each begins with none
    /// of the others.
    pub(crate) async fn track(
        &self,
        prefixes: &[String],
        hears: impl Fn(&[Value]) + Send + Sync + 'static,
    ) -> RedisResult<Tracking> {
        let broken = Arc::new(AtomicBool::new(false));
        let ends = broken.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(CONNECT))
            .set_push_sender(move |push: PushInfo| {
                match push.kind {
                    PushKind::Invalidate => hears(&push.data),
                    PushKind::Disconnection => ends.store(true, Ordering::Relaxed),
                    _ => {}
                }
                Ok::<(), ()>(())
            });
        let mut track = redis::cmd("CLIENT");
        track.arg("TRACKING").arg("ON").arg("BCAST");
        for prefix in prefixes.iter().filter(|prefix| !prefix.is_empty()) {
            track.arg("PREFIX").arg(prefix);
        }
        let door = self.door();
        // In our own runtime, which has a timer, and drives the connection.
        let begun = self.runtime.spawn(async move {
            let mut connection = door.open(&config).await?;
            connection.send_packed_command(&track).await?.extract_error()?;
            Ok(connection)
        });
        let connection = begun.await.unwrap_or_else(|_| Err(ended()))?;
        Ok(Tracking { _connection: connection, broken })
    }

    fn heard(&self, sent: Option<Moment>) {
        if let (Some(gate), Some(sent)) = (&self.gate, sent) {
            gate.heard(sent);
        }
    }

    fn door(&self) -> Door {
        let (client, address, gate) =
            (self.client.clone(), self.address.clone(), self.gate.clone());
        Door { client, address, gate }
    }

    /// The link of the runtime that polls us.
    fn link(&self) -> Arc<Link> {
        // An unwinding thread of a program built to abort has no second chance: there the
        // caller's runtime, which may lack I/O, is not tried.
        let here = Handle::try_current().ok().filter(|_| cfg!(panic = "unwind"));
        let here = here.unwrap_or_else(|| self.runtime.clone());
        let link = self.link_of(here);
        if link.unable.load(Ordering::Relaxed) { self.link_of(self.runtime.clone()) } else { link }
    }

    fn link_of(&self, runtime: Handle) -> Arc<Link> {
        let mut links = locked(&self.links);
        if let Some(link) = links.get(&runtime.id()) {
            return link.clone();
        }
        // Runtimes that are gone took their connections with them.
        links.retain(|_, link| link.is_wanted());
        let channel = self.channel.as_ref().map(|c| format!("{}:{}", c.name, runtime.id()).into());
        let link = Arc::new(Link {
            runtime: runtime.clone(),
            channel,
            current: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            was_up: AtomicBool::new(false),
            unable: AtomicBool::new(false),
        });
        links.insert(runtime.id(), link.clone());
        link
    }

    /// What the connection of a link listens to.
    fn channels(&self, link: &Link) -> Vec<String> {
        let mut channels: Vec<String> = link.channel.iter().map(ToString::to_string).collect();
        if link.runtime.id() == self.runtime.id() {
            channels.extend(locked(&self.adopted).iter().cloned());
        }
        channels
    }

    async fn connected(&self) -> RedisResult<Connected> {
        let link = self.link();
        match link.up() {
            Some(connected) => Ok(connected),
            None => Box::pin(self.connect(link)).await,
        }
    }

    /// Connects, unless somebody else does just now. Dropped, it leaves that to end by itself.
    async fn connect(&self, link: Arc<Link>) -> RedisResult<Connected> {
        let connecting = link.connecting.lock().await;
        if let Some(connected) = link.up() {
            return Ok(connected);
        }
        let watched = Call {
            sent: Instant::now(),
            blamed: Some([self.doubtful.clone(), self.doubtful.clone()]),
        };
        // In a task of the runtime that is to drive the connection; a caller that is dropped leaves
        // it to end by itself.
        let ear = self.channel.as_ref().map(|c| (self.channels(&link), c.hears.clone()));
        let task = link.runtime.spawn(connect(self.door(), ear));
        let limit = {
            let _context = self.runtime.enter();
            tokio::time::sleep(CONNECT)
        };
        let connected = tokio::select! {
            connected = task => connected,
            () = limit => return Err(timed_out()),
        };
        watched.answered();
        match connected {
            Ok(connected) => {
                let connected = connected?;
                *locked(&link.current) = Some(connected.clone());
                drop(connecting);
                if link.was_up.swap(true, Ordering::Relaxed)
                    && let Some(channel) = &self.channel
                {
                    channel.hears.interrupted();
                }
                Ok(connected)
            }
            Err(failed) if failed.is_panic() && link.runtime.id() != self.runtime.id() => {
                link.unable.store(true, Ordering::Relaxed);
                drop(connecting);
                Box::pin(self.connected()).await
            }
            Err(_) => Err(ended()),
        }
    }
}

/// A connection on which the server tells of keys that change, until it is dropped.
#[derive(Debug)]
pub(crate) struct Tracking {
    _connection: MultiplexedConnection,
    broken: Arc<AtomicBool>,
}

impl Tracking {
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

impl Link {
    fn up(&self) -> Option<Connected> {
        let mut current = locked(&self.current);
        match &*current {
            Some(connected) if !connected.broken.load(Ordering::Relaxed) => Some(connected.clone()),
            _ => {
                *current = None;
                None
            }
        }
    }

    /// Whether it has a connection, or is being used for the first time.
    fn is_wanted(&self) -> bool {
        let unused = !self.was_up.load(Ordering::Relaxed);
        unused && !self.unable.load(Ordering::Relaxed)
            || locked(&self.current)
                .as_ref()
                .is_some_and(|connected| !connected.broken.load(Ordering::Relaxed))
    }
}

impl Connected {
    /// A server that takes no writes any more was a master once: whoever has its name or address next
    /// may be another, which only a new connection finds.
    fn note(&self, error: &RedisError) {
        if fault::is_gone(error) || fault::refusal(error) == Some(Refusal::ReadOnly) {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Watches one call: a connection whose answers do not come is not used for new calls.
struct Call {
    sent: Instant,
    blamed: Option<[Arc<AtomicBool>; 2]>,
}

impl Call {
    fn on(node: &Node, connected: &Connected) -> Self {
        let blamed = Some([connected.broken.clone(), node.doubtful.clone()]);
        Self { sent: Instant::now(), blamed }
    }

    fn answered(mut self) {
        if let Some([_, doubtful]) = self.blamed.take() {
            doubtful.store(false, Ordering::Relaxed);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        for blamed in self.blamed.take().filter(|_| self.sent.elapsed() >= SUSPECT).iter().flatten()
        {
            blamed.store(true, Ordering::Relaxed);
        }
    }
}

/// One connection's ear.
#[derive(Debug)]
struct Ear {
    hears: Arc<dyn PushListener>,
    broken: Arc<AtomicBool>,
}

impl Ear {
    fn hear(&self, push: &PushInfo) {
        match (&push.kind, push.data.as_slice()) {
            (PushKind::Message, [_, Value::BulkString(text)]) => self.hears.message(text),
            (PushKind::Disconnection, _) => {
                self.broken.store(true, Ordering::Relaxed);
                self.hears.interrupted();
            }
            _ => {}
        }
    }
}

/// What opens connections to one server.
struct Door {
    client: Client,
    address: Address,
    gate: Option<Arc<dyn Gate>>,
}

impl Door {
    /// Connects, logs in, and checks where the connection leads.
    async fn open(&self, config: &AsyncConnectionConfig) -> RedisResult<MultiplexedConnection> {
        let mut connection =
            self.client.get_multiplexed_async_connection_with_config(config).await?;
        if let Some(gate) = &self.gate {
            gate.admit(&mut connection, &self.address).await?;
        }
        Ok(connection)
    }
}

/// Connects, logs in and listens. Runs in the runtime that is to drive the connection.
async fn connect(
    door: Door,
    ear: Option<(Vec<String>, Arc<dyn PushListener>)>,
) -> RedisResult<Connected> {
    let broken = Arc::new(AtomicBool::new(false));
    let mut config =
        AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let (mut channels, mut common) = (Vec::new(), None);
    if let Some((names, hears)) = ear {
        channels = names;
        common = hears.common();
        let ear = Ear { hears, broken: broken.clone() };
        config = config.set_push_sender(move |push: PushInfo| {
            ear.hear(&push);
            Ok::<(), ()>(())
        });
    }
    let mut connection = door.open(&config).await?;
    for channel in channels {
        connection.subscribe(channel).await?;
    }
    if let Some(common) = common
        && let Err(error) = connection.subscribe(common).await
        && fault::refusal(&error) != Some(Refusal::NoPermission)
    {
        return Err(error);
    }
    Ok(Connected { connection, broken })
}

fn timed_out() -> RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "could not connect within 5 s").into()
}

fn ended() -> RedisError {
    std::io::Error::new(std::io::ErrorKind::NotConnected, "the runtime was shut down").into()
}

fn client(address: &Address, login: &Login) -> Result<Client> {
    let failed = |e: RedisError| {
        Error::new(ErrorKind::Config, "cannot connect with the settings in the URL")
            .because(fault::shown(&e))
    };
    let at = match (address, &login.tls) {
        (Address::Tcp(host, port), None) => ConnectionAddr::Tcp(host.clone(), *port),
        (Address::Tcp(host, port), Some(_)) => ConnectionAddr::TcpTls {
            host: host.clone(),
            port: *port,
            insecure: false,
            tls_params: None,
        },
        (Address::Unix(path), _) => ConnectionAddr::Unix(path.clone()),
    };
    let mut settings = RedisConnectionInfo::default()
        .set_db(login.db)
        .set_protocol(ProtocolVersion::RESP3)
        .set_lib_name("leasehold", env!("CARGO_PKG_VERSION"));
    if let Some(user) = &login.user {
        settings = settings.set_username(user);
    }
    if let Some(password) = &login.password {
        settings = settings.set_password(password);
    }
    let tcp = TcpSettings::default()
        .set_nodelay(true)
        .set_user_timeout(USER_TIMEOUT)
        .set_keepalive(TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE));
    let info = at.into_connection_info().map_err(failed)?;
    let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
    match &login.tls {
        None => Client::open(info),
        #[cfg(feature = "tls")]
        Some(tls) => {
            // The program may have chosen a provider; then that one stays.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let root_cert = tls.ca()?.map(|ca| ca.bytes);
            let client_tls = tls.identity()?.map(|(cert, key)| redis::ClientTlsConfig {
                client_cert: cert.bytes,
                client_key: key.bytes,
            });
            Client::build_with_tls(info, redis::TlsCertificates { client_tls, root_cert })
        }
        #[cfg(not(feature = "tls"))]
        Some(_) => return Err(leasehold_core::kit::no_tls()),
    }
    .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_sent_in_full_with_the_same_arguments() {
        let script = Script::new("return 1");
        assert_eq!(script.hash.len(), 40);
        let mut call = script.call(1);
        call.arg("a key").arg(7);
        let packed = String::from_utf8(script.in_full(&call).get_packed_command()).unwrap();
        let args = "$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n1\r\n$5\r\na key\r\n$1\r\n7\r\n";
        assert_eq!(packed, format!("*5\r\n{args}"));
    }

    #[test]
    fn a_runtime_without_io_uses_our_thread() {
        let mut ours = tokio::runtime::Builder::new_multi_thread();
        let ours = ours.worker_threads(1).enable_all().build().unwrap();
        let server = testbed::redis();
        let address = Address::Tcp("127.0.0.1".into(), server.port());
        let node = Node::new(address, &Login::default(), ours.handle(), None, None).unwrap();
        let bare = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let pong = || bare.block_on(node.call(redis::cmd("PING").arg("x")));
        for _ in 0..2 {
            assert_eq!(pong().unwrap(), Value::BulkString(b"x".to_vec()));
        }
        assert_eq!(locked(&node.links).values().filter(|l| l.up().is_some()).count(), 1);
    }
}
