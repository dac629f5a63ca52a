//! `leasehold serve`: locks over HTTP, for programs in any language.
//!
//! The service is the crate `leasehold-server`. This module opens the sockets, logs, and handles
//! signals. SIGTERM and SIGINT make the service drain, and SIGHUP makes it read the tokens again.

use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use leasehold_server::{Access, Limits, Listener, Service, Tls, serve};
use listenfd::ListenFd;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::filter::LevelFilter;

use crate::args::ServeArgs;
use crate::events;
use crate::exit::{Failure, USAGE};

/// The name of the default socket in the user's runtime directory.
const SOCKET: &str = "leasehold.sock";
/// The reason why a service without tokens cannot listen on an address that is not loopback.
const NEEDS_TOKENS: &str = "other machines can reach this address, and the service has no tokens";

pub(crate) fn main(args: &ServeArgs, verbose: bool) -> ExitCode {
    log(args.json, verbose);
    // This changes the environment, so there must be no other threads yet.
    let inherited = ListenFd::from_env();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return Failure::system("cannot start", error).report(),
    };
    let served = runtime.block_on(run(args, inherited));
    runtime.shutdown_background();
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Starts logging to stderr: with `-v`, one line per request; otherwise, only warnings and errors.
fn log(json: bool, verbose: bool) {
    let level = if verbose { LevelFilter::INFO } else { LevelFilter::WARN };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr);
    if json { log.json().init() } else { log.with_ansi(false).init() }
}

async fn run(args: &ServeArgs, inherited: ListenFd) -> Result<(), Failure> {
    let access = match (&args.tokens, args.no_auth) {
        (Some(file), _) => Access::tokens(file)?,
        (None, true) => Access::open(),
        (None, false) => Access::same_user(),
    };
    if args.no_auth {
        tracing::warn!("--no-auth: any process on this machine can acquire and evict all locks");
    }
    let tls = tls(args)?;
    // The signals are caught before the first connection, so that none is lost.
    let caught = |kind| signal(kind).map_err(|e| Failure::system("cannot catch signals", e));
    let terminate = caught(SignalKind::terminate())?;
    let interrupt = caught(SignalKind::interrupt())?;
    let hang_up = caught(SignalKind::hangup())?;
    let locks = args.store.connect().await?;
    events::note_store(locks.url());
    let mut limits = Limits::default();
    limits.drain = args.drain;
    let service = Service::new(locks, access, limits)?;
    if let Some(file) = &args.history {
        service.keep_history_in(file)?;
    }
    let mut opened = Opened::inherited(inherited, args, tls.as_ref())?;
    for address in &args.listen {
        opened.push(Opened::new(address, args, tls.as_ref()).await?);
    }
    if opened.is_empty() {
        opened.push(Opened::unix(default_socket()?)?);
    }
    let mut listeners = Vec::new();
    let mut sockets = Vec::new();
    for Opened { listener, address, socket } in opened {
        // The line is also for scripts that start the service and wait for it.
        let _ = writeln!(io::stdout(), "listening on {address}");
        listeners.push(listener);
        sockets.extend(socket);
    }
    let reloading = service.clone();
    tokio::spawn(async move { reload(&reloading, hang_up).await });
    serve(service, listeners, end(terminate, interrupt)).await;
    sockets.iter().for_each(Socket::remove);
    Ok(())
}

fn tls(args: &ServeArgs) -> Result<Option<Arc<Tls>>, Failure> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    Ok(Some(Arc::new(Tls::new(certificate, key, args.tls_client_ca.clone())?)))
}

async fn end(mut terminate: Signal, mut interrupt: Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("draining");
}

async fn reload(service: &Service, mut hang_up: Signal) {
    while hang_up.recv().await.is_some() {
        match service.reload() {
            Ok(()) => tracing::info!("read the token file again"),
            Err(error) => tracing::error!("{error:#}; the current tokens stay valid"),
        }
    }
}

/// Returns the path of the socket in the user's runtime directory, which no other user can enter.
fn default_socket() -> Result<PathBuf, Failure> {
    let directory = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
    let directory = directory.ok_or_else(|| {
        Failure::new(USAGE, "XDG_RUNTIME_DIR is not set, so the default socket has no directory")
            .hint("--listen unix:/some/directory/leasehold.sock, or --listen 127.0.0.1:8484")
    })?;
    Ok(Path::new(&directory).join(SOCKET))
}

/// An open listening socket.
struct Opened {
    listener: Listener,
    address: String,
    /// The file of a Unix socket that this process made. It is removed at the end.
    socket: Option<Socket>,
}

/// The file of a Unix socket that this process made.
struct Socket {
    path: PathBuf,
    /// The device, the inode and the time of the file's last change, because an inode can be
    /// reused. Another server may have replaced the file during the drain.
    file: [i128; 4],
}

impl Socket {
    fn new(path: PathBuf) -> io::Result<Self> {
        let file = file_of(&path)?;
        Ok(Self { path, file })
    }

    fn remove(&self) {
        if file_of(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn file_of(path: &Path) -> io::Result<[i128; 4]> {
    let file = std::fs::symlink_metadata(path)?;
    Ok([file.dev().into(), file.ino().into(), file.ctime().into(), file.ctime_nsec().into()])
}

impl Opened {
    async fn new(address: &str, args: &ServeArgs, tls: Option<&Arc<Tls>>) -> Result<Self, Failure> {
        if let Some(path) = address.strip_prefix("unix:") {
            return Self::unix(PathBuf::from(path));
        }
        let failed = |e| Failure::system(&format!("cannot listen on {address}"), e);
        Self::tcp(TcpListener::bind(address).await.map_err(failed)?, args, tls)
    }

    /// Takes the sockets that systemd or another service manager has opened for this process.
    fn inherited(
        mut sockets: ListenFd,
        args: &ServeArgs,
        tls: Option<&Arc<Tls>>,
    ) -> Result<Vec<Self>, Failure> {
        let failed = |e| Failure::system("cannot use a socket from LISTEN_FDS", e);
        let mut opened = Vec::new();
        for i in 0..sockets.len() {
            // The service manager removes the file of a Unix socket.
            opened.push(match sockets.take_unix_listener(i) {
                Ok(Some(socket)) => {
                    socket.set_nonblocking(true).map_err(failed)?;
                    let listener = UnixListener::from_std(socket).map_err(failed)?;
                    let local = listener.local_addr().map_err(failed)?;
                    let path = local.as_pathname().unwrap_or(Path::new("(no name)"));
                    let address = format!("unix:{}", path.display());
                    Self { listener: Listener::Unix(listener), address, socket: None }
                }
                _ => {
                    let socket = sockets.take_tcp_listener(i).map_err(failed)?;
                    let Some(socket) = socket else { continue };
                    socket.set_nonblocking(true).map_err(failed)?;
                    Self::tcp(TcpListener::from_std(socket).map_err(failed)?, args, tls)?
                }
            });
        }
        Ok(opened)
    }

    fn tcp(
        listener: TcpListener,
        args: &ServeArgs,
        tls: Option<&Arc<Tls>>,
    ) -> Result<Self, Failure> {
        let local = listener.local_addr().map_err(|e| Failure::system("cannot listen", e))?;
        if args.tokens.is_none() && !(args.no_auth && local.ip().is_loopback()) {
            let (what, hint) = match args.no_auth {
                true => (NEEDS_TOKENS, "use --tokens FILE, or an address such as 127.0.0.1:8484"),
                false => (
                    "requests over TCP need tokens",
                    "use --tokens FILE, or --no-auth for tests on this machine",
                ),
            };
            return Err(Failure::new(USAGE, format!("cannot listen on {local}: {what}")).hint(hint));
        }
        let (listener, address) = match tls {
            Some(tls) => (Listener::Tls(listener, tls.clone()), format!("https://{local}")),
            None => (Listener::Tcp(listener), format!("http://{local}")),
        };
        Ok(Self { listener, address, socket: None })
    }

    fn unix(path: PathBuf) -> Result<Self, Failure> {
        let shown = path.display();
        let failed = |e: io::Error| Failure::system(&format!("cannot listen on unix:{shown}"), e);
        let is_socket = std::fs::metadata(&path).is_ok_and(|m| m.file_type().is_socket());
        // The socket of a crashed server refuses connections.
        let refused = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
        if is_socket && UnixStream::connect(&path).is_err_and(refused) {
            std::fs::remove_file(&path).map_err(failed)?;
        }
        let listener = UnixListener::bind(&path).map_err(failed)?;
        // The kernel reports the user of each connection, so other users with a token may connect
        // too.
        let mode = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(&path, mode).map_err(failed)?;
        let address = format!("unix:{shown}");
        let socket = Some(Socket::new(path.clone()).map_err(failed)?);
        Ok(Self { listener: Listener::Unix(listener), address, socket })
    }
}
