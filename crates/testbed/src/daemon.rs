//! What all servers share: a process in a directory on a port, to be broken and mended.

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

/// How long a server may take to start or to end. Only ever reached when something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a test wants of its server.
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
    /// A server that keeps what it acknowledged when it is killed.
    pub fn new() -> Self {
        Self::default()
    }

    /// The oldest version that is tested: the one that is installed on this machine.
    pub fn oldest() -> Self {
        Self { version: Some(Version::Oldest), ..Self::default() }
    }

    /// The newest version that is tested.
    pub fn newest() -> Self {
        Self { version: Some(Version::Newest), ..Self::default() }
    }

    /// The version that was asked for, or that of this run.
    pub(crate) fn version(&self) -> Version {
        self.version.unwrap_or_else(Version::of_this_run)
    }

    /// Valkey, and not Redis. Only the newest of it is there.
    pub fn valkey() -> Self {
        Self { valkey: true, ..Self::newest() }
    }

    /// Does not wait for its disk. Not for tests that kill the server.
    pub fn fast(mut self) -> Self {
        self.fast = true;
        self
    }

    /// Speaks TLS, with a certificate of an authority of its own.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Speaks TLS, and only with clients that show a [certificate](crate::Certificates::client) of the
    /// same authority. (etcd.)
    pub fn client_certificates(mut self) -> Self {
        self.client_certificates = true;
        self.tls()
    }

    /// Has a wall clock that the test can shift while the server runs.
    pub fn movable_clock(mut self) -> Self {
        self.movable_clock = true;
        self
    }

    /// One more argument on the server's command line.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }
}

/// How to run the program of a server.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    /// The user to run as when we are root: some servers refuse root.
    pub(crate) user: Option<&'static str>,
}

impl Launch {
    /// For an emulator of one thread, by which all contenders of a suite are served: it must not get as little of
    /// the processors as each of theirs. Without the right to that, it starts as it is.
    pub(crate) fn before_others(self) -> Self {
        let nice = ["-n".to_owned(), "-10".to_owned(), self.program.display().to_string()];
        let args = nice.into_iter().chain(self.args).collect();
        Self { program: "nice".into(), args, user: self.user }
    }
}

/// A running (or stopped, or killed) server.
#[derive(Debug)]
pub(crate) struct Daemon {
    name: &'static str,
    directory: PathBuf,
    launch: Launch,
    clock: Option<MovableClock>,
    child: Mutex<Option<Child>>,
}

impl Daemon {
    /// Starts the server and returns when `ready` says so; fails, with its log, if it ended before
    /// that, which may be for the caller to retry with another port.
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
        // Ctrl-C is for the tests; the reaper then sees to the servers.
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

    /// How it ended, if it did on its own.
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

    /// All that the server printed.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.directory.join("log")).expect("the log that we made");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The process that was started.
    pub(crate) fn pid(&self) -> u32 {
        self.child().as_ref().map(Child::id).unwrap_or_else(|| panic!("{} is down", self.name))
    }

    pub(crate) fn clock(&self) -> &MovableClock {
        self.clock.as_ref().expect("ask for Setup::movable_clock first")
    }

    /// SIGSTOP for every process of the server: to its clients it just no longer answers.
    pub(crate) fn stop(&self) {
        // The parent first, so that no more children come.
        signal(self.pid().cast_signed(), Signal::STOP);
        self.signal_all(Signal::STOP);
    }

    /// Ends [`stop`](Self::stop).
    pub(crate) fn cont(&self) {
        self.signal_all(Signal::CONT);
    }

    /// kill -9 for every process of the server; returns when they are gone.
    pub(crate) fn kill(&self) {
        let Some(mut child) = self.child().take() else { return };
        // It may have ended on its own: that is what was wanted.
        let _ = child.kill();
        child.wait().expect("our own child");
        let end = Instant::now() + PATIENCE;
        while !reaper::processes_in(&self.directory).is_empty() {
            assert!(Instant::now() < end, "processes of {} do not end", self.name);
            self.signal_all(Signal::KILL);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The same server again: same port, same data. Kills it first if it runs.
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
        // What cannot be deleted now, the reaper deletes.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Whether anybody listens there: what a program that asks whether a server is ready would find out
/// first, at a hundredth of the cost.
pub(crate) fn accepts(port: u16) -> bool {
    std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
}

fn signal(pid: i32, which: Signal) {
    let pid = Pid::from_raw(pid).expect("no process has number 0");
    // It may just have ended.
    let _ = kill_process(pid, which);
}

/// Root is refused by some servers, and is the user in most containers.
pub(crate) fn we_are_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command that runs as `user` if we are root, with the process number that it was spawned with.
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

/// Gives a file or directory to `user` if we are root.
pub(crate) fn give_to(user: &str, path: &Path) {
    if we_are_root() {
        run(Command::new("chown").arg("-R").arg(format!("{user}:{user}")).arg("--").arg(path));
    }
}

/// Starts with new ports until one was free for long enough.
pub(crate) fn start_somewhere<T>(start: impl Fn(u16) -> Result<T, String>) -> T {
    let mut last = String::new();
    for _ in 0..5 {
        match start(crate::port::free()) {
            Ok(server) => return server,
            // Only another's port is worth another try.
            Err(why) if why.to_lowercase().contains("address already in use") => last = why,
            Err(why) => panic!("{why}"),
        }
    }
    panic!("five ports in a row were taken: {last}");
}
