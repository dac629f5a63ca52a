//! The keeper: holds a lock for a shell script, in the background.
//!
//! It is a session of its own with nothing of the caller's open. It ends, and the lock with it, when
//! - it is told to by `leasehold release NAME --token T`, through a socket that only this user's
//!   processes are listened to on; it answers whether the lock was held all the time;
//! - the shell ends, however it does (a pidfd tells, with -9 too);
//! - `leasehold acquire` goes before the token was delivered.
//!
//! If the lock is lost, it stays to say so when asked.
//!
//! The socket's name is abstract (no file to leave behind) and made of the user, the token, and a
//! digest of store and lock. It is a shortcut: where there is none, `release` takes the claim out of
//! the store. So a name that somebody squats on costs nothing but that.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write, stdin};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{Guard, Leasehold};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::args::KeepArgs;
use crate::drive::drive;
use crate::events::Event;
use crate::exit::{self, Failure};
use crate::progress::{self, Ahead};
use crate::shell::Process;
use crate::take::{Taking, connect_to_take};

/// What `acquire` says once the caller has the token.
pub(crate) const DELIVERED: &[u8] = b"delivered\n";
/// How long either side of the socket waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn main(args: KeepArgs) -> ExitCode {
    // For `ps`: we were started as /proc/self/exe. A cosmetic matter, whatever comes of it.
    let _ = nix::sys::prctl::set_name(c"leasehold");
    match drive(keep(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report(&failure.event());
            ExitCode::from(failure.code)
        }
    }
}

/// One line to `acquire`, which may be gone.
fn report(event: &Event) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{}", event.json()).and_then(|()| stdout.flush());
}

async fn keep(args: &KeepArgs) -> Result<(), Failure> {
    let cannot = |e: io::Error| Failure::system("cannot keep the lock", e);
    let shell = Process { pid: args.pid, started: args.started };
    let mut shell_ended = shell.watch().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Failure::system("the calling shell is gone", "nothing is held"),
        _ => Failure::system("cannot watch the calling shell", e),
    })?;
    let orders = stdin().as_fd().try_clone_to_owned().map_err(cannot)?;
    let mut orders = pipe::Receiver::from_owned_fd(orders).map_err(cannot)?;
    let started = Instant::now();
    let locks = tokio::select! {
        locks = connect_to_take(&args.take, started) => locks?,
        _ = orders.read_u8() => return Ok(()),
        _ = &mut shell_ended => return Ok(()),
    };
    let guard = tokio::select! {
        guard = wait(&locks, args, started, shell) => guard?,
        _ = orders.read_u8() => return close(locks).await,
        _ = &mut shell_ended => return close(locks).await,
    };
    let door = Door::new(locks.identity(), &args.name, guard.token().get());
    let listener = door.open().ok();
    report(&Event::Acquired {
        name: args.name.clone(),
        token: guard.token().get(),
        waited_seconds: started.elapsed().as_secs_f64(),
    });
    let mut word = [0; DELIVERED.len()];
    if orders.read_exact(&mut word).await.is_ok() && word == DELIVERED {
        hold(&mut shell_ended, &door, listener, guard).await;
    }
    close(locks).await
}

/// Gives everything back, and waits until the store knows.
async fn close(locks: Leasehold) -> Result<(), Failure> {
    Ok(locks.close().await?)
}

async fn wait(
    locks: &Leasehold,
    args: &KeepArgs,
    started: Instant,
    shell: Process,
) -> Result<Guard, Failure> {
    let ahead = Ahead::default();
    let learnt = ahead.clone();
    let label = format!("for {} {}", shell.program(), shell.pid);
    let on_waiting = Arc::new(move |name: &str, ahead| _ = learnt.learn(name, ahead));
    let taking = Taking { locks, args: &args.take, started, label, on_waiting };
    let showing = progress::show(locks, &ahead, |line| report(&Event::Progress { line }));
    tokio::select! {
        guard = taking.one(&args.name) => guard,
        never = showing, if args.progress => match never {},
    }
}

/// Holds the lock until the shell is gone or somebody asks for its release, and releases it.
async fn hold(
    shell_ended: &mut oneshot::Receiver<()>,
    door: &Door,
    listener: Option<UnixListener>,
    guard: Guard,
) {
    loop {
        let caller = tokio::select! {
            _ = &mut *shell_ended => None,
            caller = accept(listener.as_ref(), door) => Some(caller),
        };
        let Some(caller) = caller else {
            // Nobody is left to be told how this went; the lease ends what the store missed.
            let _ = guard.release().await;
            return;
        };
        let Some(mut caller) = caller else { continue };
        let released = guard.release().await.map_err(exit::released);
        let failure = released.err().map(|f| (f.code, f.message));
        let answer = serde_json::to_vec(&Answer { failure }).unwrap_or_default();
        let _ = timeout(PATIENCE, caller.write_all(&answer)).await;
        return;
    }
}

/// The next who asks for this very lock's release and may; `None` for anybody else.
async fn accept(listener: Option<&UnixListener>, door: &Door) -> Option<UnixStream> {
    let Some(listener) = listener else { return std::future::pending().await };
    let accepted = listener.accept().await;
    let Ok((stream, _)) = accepted else {
        // Out of descriptors, perhaps: not to be asked again at once.
        tokio::time::sleep(Duration::from_millis(100)).await;
        return None;
    };
    if !is_ours(&stream) {
        return None;
    }
    let mut line = String::new();
    let mut reader = BufReader::new(stream).take(16 * 1024);
    timeout(PATIENCE, reader.read_line(&mut line)).await.ok()?.ok()?;
    let asked: Door = serde_json::from_str(&line).ok()?;
    (asked == *door).then(|| reader.into_inner().into_inner())
}

fn is_ours(stream: &UnixStream) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == ours)
}

/// Where a keeper listens, and what it is asked for.
#[derive(Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Door {
    store: String,
    name: String,
    token: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    failure: Option<(u8, String)>,
}

impl Door {
    pub(crate) fn new(store: &str, name: &str, token: u64) -> Self {
        Self { store: store.to_owned(), name: name.to_owned(), token }
    }

    fn address(&self) -> io::Result<net::SocketAddr> {
        let mut digest = DefaultHasher::new();
        self.hash(&mut digest);
        let user = rustix::process::geteuid().as_raw();
        let name = format!("leasehold-keeper-{user}-{}-{:016x}", self.token, digest.finish());
        net::SocketAddr::from_abstract_name(name)
    }

    fn open(&self) -> io::Result<UnixListener> {
        let listener = net::UnixListener::bind_addr(&self.address()?)?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    }

    /// Asks the keeper behind this door to release; `None` if there is none.
    pub(crate) async fn knock(&self) -> Option<Result<(), Failure>> {
        let stream = net::UnixStream::connect_addr(&self.address().ok()?).ok()?;
        stream.set_nonblocking(true).ok()?;
        let mut stream = UnixStream::from_std(stream).ok()?;
        if !is_ours(&stream) {
            return None;
        }
        let mut request = serde_json::to_vec(self).ok()?;
        request.push(b'\n');
        let mut answer = Vec::new();
        let talk = async {
            stream.write_all(&request).await?;
            stream.read_to_end(&mut answer).await
        };
        // A keeper that died meanwhile holds nothing; one that hangs is passed by.
        timeout(PATIENCE, talk).await.ok()?.ok()?;
        let answer: Answer = serde_json::from_slice(&answer).ok()?;
        Some(answer.failure.map_or(Ok(()), |(code, message)| Err(Failure::new(code, message))))
    }
}
