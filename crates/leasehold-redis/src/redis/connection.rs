//! Connections to one server: one per runtime that sends calls. So a runtime cannot break another
//! runtime's connection.
//!
//! A call from a program's own runtime uses a connection whose driver runs in that runtime, so it
//! needs no hand-over between threads. Calls of leasehold's own thread (renewals, clean-up, callers
//! without a runtime) use a connection there. So a program's calls and leasehold's own calls never
//! wait for each other. A caller that blocks its executor delays its own acquisitions, but no
//! renewal.
//!
//! - *A connection breaks.* The next call opens a new one. The listener is notified
//!   ([`PushListener::interrupted`]) after the new connection has subscribed, because messages in
//!   between were lost.
//! - *A reply does not arrive.* The caller's deadline ends the call, not the connection. But if a
//!   call is abandoned after at least one second, its connection receives no new calls, because
//!   the network may have dropped it silently.
//! - *The address now belongs to another server.* The new connection is refused ([`Gate`]).
//! - *A caller's future is dropped.* Its request may be executed, and the reply is discarded when
//!   it arrives.
//! - *A runtime ends.* Its connection ends with it and is removed.
//! - *A runtime has no I/O driver.* Connecting there fails in its own task. Calls from that runtime
//!   then use the connection of leasehold's thread.
//!
//! Callers' runtimes may lack a timer, so their timers are not used. Time limits are set by the
//! caller, or run on leasehold's own runtime.

use leasehold_core::kit::{Password, locked};
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
use tokio::task::JoinHandle;

use super::fault::{self, Refusal};
use super::url::{Address, Login};
use leasehold_core::{Error, ErrorKind, Moment, Result};

/// Maximum time to connect and log in.
const CONNECT: Duration = Duration::from_secs(5);
/// Maximum time that sent data may stay unacknowledged before the connection is closed.
const USER_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of TCP keep-alive probes. They detect that the network has silently dropped an idle
/// connection, such as one that only listens.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Minimum age at which an abandoned call marks its connection as broken. The connection then
/// receives no new calls.
const SUSPECT: Duration = Duration::from_secs(1);

/// Check that a new connection leads to the store that this client has used before.
#[async_trait]
pub trait Gate: fmt::Debug + Send + Sync + 'static {
    /// Refuses a new connection to `at` that leads to another store. Only the login has been sent
    /// over the connection before.
    async fn admit(&self, connection: &mut MultiplexedConnection, at: &Address) -> RedisResult<()>;
    /// Records that a request that was sent at this time has been answered.
    fn replied(&self, _sent: Moment) {}
    /// Returns the current time, for [`replied`](Self::replied).
    fn now(&self) -> Moment {
        Moment::from_nanos(0)
    }
}

/// Listener for the messages that a server pushes on leasehold's channels.
pub trait PushListener: fmt::Debug + Send + Sync + 'static {
    /// Handles a message on one of the channels.
    fn message(&self, text: &[u8]);
    /// Handles a possible loss of messages.
    fn interrupted(&self);
    /// Returns the channels on which messages are expected, on any connection.
    fn expected(&self) -> Vec<String> {
        Vec::new()
    }
    /// Returns the channel for messages to all clients, to which each connection subscribes in
    /// addition to its own channel. A missing permission for it is not an error.
    fn common(&self) -> Option<&'static str> {
        None
    }
}

/// One server, and this client's connections to it.
pub struct Node {
    address: Address,
    login: Login,
    client: Client,
    runtime: Handle,
    channel: Option<Channel>,
    gate: Option<Arc<dyn Gate>>,
    links: Mutex<HashMap<Id, Arc<Link>>>,
    /// Channels of lost connections to other servers. The connection of leasehold's own thread to
    /// this server subscribes to these channels, too.
    adopted: Mutex<BTreeSet<String>>,
    /// Whether a call was abandoned without a reply since the server last replied.
    doubtful: Arc<AtomicBool>,
}

/// Channels that a node's connections subscribe to.
#[derive(Debug)]
struct Channel {
    /// Prefix of the channels' names. The runtime's number follows it.
    name: String,
    listener: Arc<dyn PushListener>,
}

/// Connection of one runtime, which may or may not be open.
#[derive(Debug)]
struct Link {
    runtime: Handle,
    channel: Option<Arc<str>>,
    current: Mutex<Option<Connected>>,
    /// Lock that is held while connecting.
    connecting: tokio::sync::Mutex<Option<Attempt>>,
    /// Whether the link has been connected before. If so, a new connection may have missed
    /// messages.
    was_up: AtomicBool,
    /// Whether the link's runtime cannot do I/O.
    unable: AtomicBool,
}

#[derive(Clone, Debug)]
struct Connected {
    connection: MultiplexedConnection,
    broken: Arc<AtomicBool>,
}

/// Script that the server runs in one atomic step.
#[derive(Debug)]
pub struct Script {
    code: String,
    hash: String,
}

impl Script {
    pub fn new(code: impl Into<String>) -> Self {
        let code = code.into();
        let hash = redis::Script::new(&code).get_hash().to_owned();
        Self { code, hash }
    }

    /// Returns the script with one part of its text replaced.
    pub(crate) fn with(&self, part: &str, by: &str) -> Self {
        Self::new(self.code.replacen(part, by, 1))
    }

    /// Returns a call of the script by its hash with `keys` keys. The caller appends keys and
    /// arguments.
    pub fn call(&self, keys: usize) -> Cmd {
        self.sized_call(keys, 0, 0)
    }

    /// Returns a call like `call`, with room for the given numbers of keys, arguments and bytes.
    pub(crate) fn sized_call(&self, keys: usize, arguments: usize, bytes: usize) -> Cmd {
        const BEFORE: &str = "EVALSHA";
        let mut cmd =
            Cmd::with_capacity(3 + keys + arguments, BEFORE.len() + self.hash.len() + 4 + bytes);
        cmd.arg(BEFORE).arg(&self.hash).arg(keys);
        cmd
    }

    /// Returns the same call with the script in full, which the server then caches.
    pub fn in_full(&self, call: &Cmd) -> Cmd {
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
    /// Creates a node that is not connected yet.
    ///
    /// With a channel, every connection subscribes to its own channel, whose name begins with
    /// `channel`, before any other request. With a gate, each connection is checked before that.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`]: the certificates of the URL cannot be used.
    pub fn new(
        address: Address,
        login: &Login,
        runtime: &Handle,
        channel: Option<(String, Arc<dyn PushListener>)>,
        gate: Option<Arc<dyn Gate>>,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            client: client(&address, login)?,
            login: login.clone(),
            address,
            runtime: runtime.clone(),
            channel: channel.map(|(name, listener)| Channel { name, listener }),
            gate,
            links: Mutex::default(),
            adopted: Mutex::default(),
            doubtful: Arc::default(),
        }))
    }

    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns whether a call was abandoned without a reply since the server last replied. The
    /// server may have crashed without the network reporting it.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Relaxed)
    }

    /// Resets [`is_doubtful`](Self::is_doubtful) until the next call that goes unanswered.
    pub(crate) fn trust_again(&self) {
        self.doubtful.store(false, Ordering::Relaxed);
    }

    /// Returns the channel for the notifications of claims that the calling runtime sends.
    pub fn channel(&self) -> Option<Arc<str>> {
        self.link().channel.clone()
    }

    /// Returns whether a connection to this server is or was subscribed to a channel.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        let ours = self.channel.as_ref().and_then(|c| channel.strip_prefix(&c.name));
        ours.is_some_and(|rest| rest.starts_with(':')) || locked(&self.adopted).contains(channel)
    }

    /// Subscribes to the channels of lost connections to other servers, in the background. Then
    /// reports to the listener that messages may have been lost.
    pub(crate) fn adopt(self: &Arc<Self>, channels: Vec<String>) {
        locked(&self.adopted).extend(channels.iter().cloned());
        let node = self.clone();
        drop(self.runtime.spawn(async move {
            // Without a connection now, the next one subscribes to them when it opens.
            let Ok(mut connected) = node.connected().await else { return };
            for channel in channels {
                if let Err(error) = connected.connection.subscribe(channel).await {
                    return connected.note(&error);
                }
            }
            if let Some(channel) = &node.channel {
                channel.listener.interrupted();
            }
        }));
    }

    /// Runs one command. If this fails, the command may have been executed.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened.
    pub async fn call(&self, cmd: &Cmd) -> RedisResult<Value> {
        self.call_noting(cmd, &mut false).await
    }

    /// Runs one command like `call`. Sets `doubt` if the command was sent and not answered, even if
    /// this future is dropped. The command may then have been executed.
    async fn call_noting(&self, cmd: &Cmd, doubt: &mut bool) -> RedisResult<Value> {
        let connected = self.connected().await?;
        self.call_on(connected, cmd, doubt).await
    }

    /// Runs one command like `call`, unless `over` returns true once the connection is open. Then
    /// returns `None` and sends nothing. There is no await point between this check and the
    /// connection's queue, so a command that is sent later arrives later.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened.
    pub async fn call_unless(
        &self,
        over: impl Fn() -> bool,
        cmd: &Cmd,
    ) -> RedisResult<Option<Value>> {
        let connected = self.connected().await?;
        if over() {
            return Ok(None);
        }
        self.call_on(connected, cmd, &mut false).await.map(Some)
    }

    /// Runs one command on an open connection, like `call_noting`.
    async fn call_on(
        &self,
        mut connected: Connected,
        cmd: &Cmd,
        doubt: &mut bool,
    ) -> RedisResult<Value> {
        let watched = Call::on(self, &connected);
        let before = std::mem::replace(doubt, true);
        let sent = self.gate.as_ref().map(|gate| gate.now());
        let answer = connected.connection.send_packed_command(cmd).await;
        watched.answered();
        let answer = answer.and_then(Value::extract_error);
        if !answer.as_ref().is_err_and(fault::is_gone) {
            *doubt = before;
            self.replied(sent);
        }
        answer.inspect_err(|error| connected.note(error))
    }

    /// Runs a script, and sends it in full if the server does not have it.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened.
    pub async fn run(&self, script: &Script, call: &Cmd) -> RedisResult<Value> {
        self.run_noting(script, call, &mut false).await
    }

    /// Runs a script, and sends it in full if the server does not have it. Sets `doubt` if the
    /// script may have been executed although no reply arrived.
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

    /// Runs many commands in one batch. Each has its own reply, which may be an error of the
    /// server.
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened.
    pub async fn pipeline(&self, pipeline: &Pipeline) -> RedisResult<Vec<Value>> {
        let mut connected = self.connected().await?;
        let watched = Call::on(self, &connected);
        let sent = self.gate.as_ref().map(|gate| gate.now());
        let answers = connected.connection.send_packed_commands(pipeline, 0, pipeline.len()).await;
        watched.answered();
        let answers = answers.inspect_err(|error| connected.note(error))?;
        self.replied(sent);
        for refused in answers.iter().filter(|answer| matches!(answer, Value::ServerError(_))) {
            let _ = refused.clone().extract_error().inspect_err(|error| connected.note(error));
        }
        Ok(answers)
    }

    /// Subscribes to changes of keys with these prefixes, on a separate connection. No prefix may
    /// be a prefix of another one.
    pub(crate) async fn track(
        &self,
        prefixes: &[String],
        on_change: impl Fn(&[Value]) + Send + Sync + 'static,
    ) -> RedisResult<Tracking> {
        let broken = Arc::new(AtomicBool::new(false));
        let ends = broken.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(CONNECT))
            .set_push_sender(move |push: PushInfo| {
                match push.kind {
                    PushKind::Invalidate => on_change(&push.data),
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
        let settings = self.connect_settings();
        // This runs in leasehold's own runtime, which has a timer and drives the connection.
        let begun = self.runtime.spawn(async move {
            let mut connection = settings.open(&config).await?;
            connection.send_packed_command(&track).await?.extract_error()?;
            Ok(connection)
        });
        let connection = begun.await.unwrap_or_else(|_| Err(ended()))?;
        Ok(Tracking { _connection: connection, broken })
    }

    fn replied(&self, sent: Option<Moment>) {
        if let (Some(gate), Some(sent)) = (&self.gate, sent) {
            gate.replied(sent);
        }
    }

    fn connect_settings(&self) -> ConnectSettings {
        let (address, gate) = (self.address.clone(), self.gate.clone());
        // The password and certificate files of the URL may have changed.
        let client = client(&address, &self.login).unwrap_or_else(|_| self.client.clone());
        ConnectSettings { client, address, gate }
    }

    /// Returns the link of the calling runtime. A caller without a runtime that does I/O gets the
    /// link of leasehold's own runtime.
    fn link(&self) -> Arc<Link> {
        // Detecting a runtime without I/O requires unwinding. A program that aborts on panic uses
        // leasehold's own runtime instead of the caller's.
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
        // The connections of runtimes that ended are closed, so their links are removed.
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

    /// Returns the channels that the connection of a link subscribes to.
    fn channels(&self, link: &Link) -> Vec<String> {
        let mut channels: Vec<String> = link.channel.iter().map(ToString::to_string).collect();
        if link.runtime.id() == self.runtime.id() {
            channels.extend(locked(&self.adopted).iter().cloned());
        }
        channels
    }

    /// Converts the error of a new connection. A rejected password that can change is reported as
    /// outdated.
    fn refused(&self, error: RedisError) -> RedisError {
        let is_changeable = self.login.password.as_ref().is_some_and(Password::is_changeable);
        match fault::refusal(&error) == Some(Refusal::WrongPassword) && is_changeable {
            true => fault::outdated(),
            false => error,
        }
    }

    async fn connected(&self) -> RedisResult<Connected> {
        let link = self.link();
        match link.up() {
            Some(connected) => Ok(connected),
            None => Box::pin(self.connect(link)).await,
        }
    }

    /// Connects. A link has at most one attempt at a time, which continues when the call that
    /// started it is dropped. So dropped calls to a server that does not respond leave at most one
    /// connection behind.
    async fn connect(&self, link: Arc<Link>) -> RedisResult<Connected> {
        let mut connecting = link.connecting.lock().await;
        if let Some(connected) = link.up() {
            return Ok(connected);
        }
        let watched = Call {
            sent: Instant::now(),
            blamed: Some([self.doubtful.clone(), self.doubtful.clone()]),
        };
        connecting.take_if(|a| !a.task.is_finished() && a.until <= Instant::now());
        let had_ended = connecting.as_ref().is_some_and(|a| a.task.is_finished());
        let attempt = connecting.get_or_insert_with(|| {
            let listening =
                self.channel.as_ref().map(|c| (self.channels(&link), c.listener.clone()));
            // The task runs in the runtime that will drive the connection.
            let task = link.runtime.spawn(connect(self.connect_settings(), listening));
            Attempt { task, until: Instant::now() + CONNECT }
        });
        let limit = {
            let _context = self.runtime.enter();
            tokio::time::sleep(attempt.until.saturating_duration_since(Instant::now()))
        };
        let connected = tokio::select! {
            biased;
            connected = &mut attempt.task => connected,
            () = limit => {
                *connecting = None;
                return Err(timed_out());
            }
        };
        *connecting = None;
        // A failure from before this call does not show whether the server works now.
        let is_up = |c: &Connected| !c.broken.load(Ordering::Relaxed);
        if had_ended && !matches!(&connected, Ok(Ok(connected)) if is_up(connected)) {
            drop(connecting);
            return Box::pin(self.connect(link)).await;
        }
        watched.answered();
        match connected {
            Ok(connected) => {
                let connected = connected.map_err(|error| self.refused(error))?;
                self.login.password.iter().for_each(Password::accepted);
                *locked(&link.current) = Some(connected.clone());
                drop(connecting);
                if link.was_up.swap(true, Ordering::Relaxed)
                    && let Some(channel) = &self.channel
                {
                    channel.listener.interrupted();
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

/// Attempt to connect. Dropping it ends the attempt.
#[derive(Debug)]
struct Attempt {
    task: JoinHandle<RedisResult<Connected>>,
    until: Instant,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Connection on which the server reports changed keys. Dropping it closes the connection.
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

    /// Returns whether the link is connected, or is being used for the first time.
    fn is_wanted(&self) -> bool {
        let unused = !self.was_up.load(Ordering::Relaxed);
        unused && !self.unable.load(Ordering::Relaxed)
            || locked(&self.current)
                .as_ref()
                .is_some_and(|connected| !connected.broken.load(Ordering::Relaxed))
    }
}

impl Connected {
    /// Marks the connection as broken if the error requires a new one.
    ///
    /// A server that no longer accepts writes used to be the master. Another server may now have
    /// its name or address, which only a new connection finds.
    fn note(&self, error: &RedisError) {
        if fault::is_gone(error) || fault::refusal(error) == Some(Refusal::ReadOnly) {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Guard of one call. If it is dropped without a reply after at least [`SUSPECT`], the connection
/// receives no new calls.
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

/// Receiver of the messages that the server pushes on one connection.
#[derive(Debug)]
struct PushReceiver {
    listener: Arc<dyn PushListener>,
    broken: Arc<AtomicBool>,
}

impl PushReceiver {
    fn receive(&self, push: &PushInfo) {
        match (&push.kind, push.data.as_slice()) {
            (PushKind::Message, [_, Value::BulkString(text)]) => self.listener.message(text),
            (PushKind::Disconnection, _) => {
                self.broken.store(true, Ordering::Relaxed);
                self.listener.interrupted();
            }
            _ => {}
        }
    }
}

/// Settings for new connections to one server.
struct ConnectSettings {
    client: Client,
    address: Address,
    gate: Option<Arc<dyn Gate>>,
}

impl ConnectSettings {
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

/// Connects, logs in and subscribes. Runs in the runtime that will drive the connection.
async fn connect(
    settings: ConnectSettings,
    listening: Option<(Vec<String>, Arc<dyn PushListener>)>,
) -> RedisResult<Connected> {
    let broken = Arc::new(AtomicBool::new(false));
    let mut config =
        AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let (mut channels, mut common) = (Vec::new(), None);
    if let Some((names, listener)) = listening {
        channels = names;
        common = listener.common();
        let receiver = PushReceiver { listener, broken: broken.clone() };
        config = config.set_push_sender(move |push: PushInfo| {
            receiver.receive(&push);
            Ok::<(), ()>(())
        });
    }
    let mut connection = settings.open(&config).await?;
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
            .with_source(fault::shown(&e))
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
        settings = settings.set_password(password.now());
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
            // If the program has already chosen a provider, this has no effect.
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
    fn eval_of_a_script_has_the_same_arguments() {
        let script = Script::new("return 1");
        assert_eq!(script.hash.len(), 40);
        let mut call = script.call(1);
        call.arg("a key").arg(7);
        let packed = String::from_utf8(script.in_full(&call).get_packed_command()).unwrap();
        let args = "$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n1\r\n$5\r\na key\r\n$1\r\n7\r\n";
        assert_eq!(packed, format!("*5\r\n{args}"));
    }

    #[test]
    fn callers_runtime_without_io_uses_the_clients_thread() {
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
