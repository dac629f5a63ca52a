//! The common part of all servers: a process with its own directory and port, which tests can break
//! and restart.

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::clock::MovableClock;
use crate::command::run;
use crate::reaper;
use crate::version::Version;

/// Time limit for a server to start or end. It is only reached if something is wrong.
const PATIENCE: Duration = Duration::from_secs(120);

/// A test's requirements for its server.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    pub(crate) fast: bool,
    pub(crate) tls: bool,
    pub(crate) client_certificates: bool,
    pub(crate) movable_clock: bool,
    pub(crate) args: Vec<String>,
    pub(crate) valkey: bool,
    version: Option<Version>,
}

impl Setup {
    /// Requires a server that keeps acknowledged writes when it is killed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires the oldest version that is tested, which is the one installed on this machine.
    pub fn oldest() -> Self {
        Self { version: Some(Version::Oldest), ..Self::default() }
    }

    /// Requires the newest version that is tested.
    pub fn newest() -> Self {
        Self { version: Some(Version::Newest), ..Self::default() }
    }

    /// Returns the required version, or the version of this run.
    pub(crate) fn version(&self) -> Version {
        self.version.unwrap_or_else(Version::of_this_run)
    }

    /// Requires Valkey instead of Redis. Only its newest version is available.
    pub fn valkey() -> Self {
        Self { valkey: true, ..Self::newest() }
    }

    /// Disables durable writes. Not for tests that kill the server.
    pub fn fast(mut self) -> Self {
        self.fast = true;
        self
    }

    /// Enables TLS, with a certificate of a private authority.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Enables TLS, and accepts only clients with a [certificate](crate::Certificates::client) of
    /// the same authority. (etcd, NATS, memcached.)
    pub fn client_certificates(mut self) -> Self {
        self.client_certificates = true;
        self.tls()
    }

    /// Gives the server a wall clock that the test can shift while it runs.
    pub fn movable_clock(mut self) -> Self {
        self.movable_clock = true;
        self
    }

    /// Adds an argument to the server's command line.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }
}

/// The command line of a server's program.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    /// The user to run as if the tests run as root, because some servers refuse root.
    pub(crate) user: Option<&'static str>,
}

impl Launch {
    /// Raises the server's priority. This is for object stores and emulators that serve all
    /// contenders of a suite. They need more processor time than each contender: on a busy machine,
    /// a reply would take seconds. Without the permission for that, the priority is unchanged.
    pub(crate) fn before_others(self) -> Self {
        let nice = ["-n".to_owned(), "-10".to_owned(), self.program.display().to_string()];
        let args = nice.into_iter().chain(self.args).collect();
        Self { program: "nice".into(), args, user: self.user }
    }
}

/// A server that runs, is paused, or is killed.
#[derive(Debug)]
pub(crate) struct Daemon {
    name: &'static str,
    directory: PathBuf,
    launch: Launch,
    clock: Option<MovableClock>,
    child: Mutex<Option<Child>>,
}

impl Daemon {
    /// Starts the server and waits until `ready` returns true.
    ///
    /// # Errors
    /// The server's log, if the server ended before it was ready. The caller may retry with another
    /// port.
    pub(crate) fn start(
        name: &'static str,
        directory: PathBuf,
        launch: Launch,
        clock: Option<MovableClock>,
        ready: &dyn Fn() -> bool,
    ) -> Result<Self, String> {
        let daemon = Self { name, directory, launch, clock, child: Mutex::new(None) };
        daemon.spawn(ready)?;
        Ok(daemon)
    }

    fn spawn(&self, ready: &dyn Fn() -> bool) -> Result<(), String> {
        let log = self.log_file();
        let mut command = as_user(self.launch.user, &self.launch.program);
        command.args(&self.launch.args).current_dir(&self.directory).env("LC_ALL", "C");
        command.stdin(Stdio::null());
        command.stdout(log.try_clone().expect("one more descriptor")).stderr(log);
        // Ctrl-C only ends the tests. The reaper then ends the servers.
        command.process_group(0);
        if let Some(clock) = &self.clock {
            clock.preload(&mut command);
        }
        let child = command.spawn();
        let child = child.unwrap_or_else(|e| panic!("cannot run {:?}: {e}", self.launch.program));
        *self.child() = Some(child);
        let end = Instant::now() + PATIENCE;
        while !ready() {
            if let Some(status) = self.ended() {
                return Err(format!("{} ended with {status}:\n{}", self.name, self.log()));
            }
            assert!(Instant::now() < end, "{} does not get ready:\n{}", self.name, self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns how the server ended, if it ended on its own.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        let mut child = self.child();
        child.as_mut()?.try_wait().expect("our own child")
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log_file(&self) -> File {
        let path = self.directory.join("log");
        OpenOptions::new().create(true).append(true).open(path).expect("a log in our directory")
    }

    /// Returns everything that the server printed.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.directory.join("log")).expect("the log that we made");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the ID of the process that was started.
    pub(crate) fn pid(&self) -> u32 {
        self.child().as_ref().map(Child::id).unwrap_or_else(|| panic!("{} is down", self.name))
    }

    pub(crate) fn clock(&self) -> &MovableClock {
        self.clock.as_ref().expect("ask for Setup::movable_clock first")
    }

    /// Sends SIGSTOP to every process of the server, so that it no longer answers its clients.
    pub(crate) fn stop(&self) {
        // The parent is paused first, so that it starts no more children.
        signal(self.pid().cast_signed(), Signal::STOP);
        self.signal_all(Signal::STOP);
    }

    /// Resumes a server that was paused by [`stop`](Self::stop).
    pub(crate) fn cont(&self) {
        self.signal_all(Signal::CONT);
    }

    /// Sends SIGKILL to every process of the server, and waits until they are gone.
    pub(crate) fn kill(&self) {
        let Some(mut child) = self.child().take() else { return };
        // The server may have ended on its own, which has the same result.
        let _ = child.kill();
        child.wait().expect("our own child");
        let end = Instant::now() + PATIENCE;
        while !reaper::processes_in(&self.directory).is_empty() {
            assert!(Instant::now() < end, "processes of {} do not end", self.name);
            self.signal_all(Signal::KILL);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Restarts the server with the same port and data. Kills it first if it is running.
    pub(crate) fn restart(&self, ready: &dyn Fn() -> bool) {
        self.kill();
        self.spawn(ready).unwrap_or_else(|why| panic!("cannot restart: {why}"));
    }

    fn signal_all(&self, which: Signal) {
        for pid in reaper::processes_in(&self.directory) {
            signal(pid, which);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        // The reaper deletes the files that cannot be deleted now.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Returns whether a server listens on this port. Each tool that checks whether a server is ready
/// does this first, at a hundred times the cost.
pub(crate) fn accepts(port: u16) -> bool {
    std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
}

fn signal(pid: i32, which: Signal) {
    let pid = Pid::from_raw(pid).expect("no process has number 0");
    // The process may just have ended.
    let _ = kill_process(pid, which);
}

/// Returns whether the tests run as root. Some servers refuse root, and most containers use it.
pub(crate) fn we_are_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns a command that runs as `user` if the tests run as root. The process keeps the ID with
/// which it was spawned.
pub(crate) fn as_user(user: Option<&str>, program: &Path) -> Command {
    match user.filter(|_| we_are_root()) {
        None => Command::new(program),
        Some(user) => {
            let mut command = Command::new("setpriv");
            command.arg(format!("--reuid={user}")).arg(format!("--regid={user}"));
            command.arg("--clear-groups").arg("--").arg(program);
            command
        }
    }
}

/// Gives a file or directory to `user` if the tests run as root.
pub(crate) fn give_to(user: &str, path: &Path) {
    if we_are_root() {
        run(Command::new("chown").arg("-R").arg(format!("{user}:{user}")).arg("--").arg(path));
    }
}

/// Starts a server, and retries with other ports if its port is taken.
pub(crate) fn start_somewhere<T>(start: impl Fn(u16) -> Result<T, String>) -> T {
    let mut last = String::new();
    for _ in 0..5 {
        match start(crate::port::free()) {
            Ok(server) => return server,
            // Only an occupied port is worth another attempt.
            Err(why) if why.to_lowercase().contains("address already in use") => last = why,
            Err(why) => panic!("{why}"),
        }
    }
    panic!("five ports in a row were taken: {last}");
}
