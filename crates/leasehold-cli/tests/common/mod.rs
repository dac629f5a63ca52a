//! Helpers that the black-box tests share: the built command on a file store of its own.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod count;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::unistd::Pid;

/// Restores the default action of the usual signals. The tests may run under nohup, or in the
/// background of a script, where they are ignored, and ignored signals are inherited.
pub(crate) fn signals_end() -> std::io::Result<()> {
    for which in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
        // SAFETY: The call sets only the default action, so no code of this program runs on a
        // signal.
        unsafe { signal(which, SigHandler::SigDfl) }?;
    }
    Ok(())
}

pub(crate) const LEASEHOLD: &str = env!("CARGO_BIN_EXE_leasehold");
/// Time limit far above the duration of any step. Only a failing test reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// A directory that is removed after the test.
pub(crate) struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn store(&self) -> String {
        format!("file:{}", self.path("store").display())
    }

    /// Returns the command with these arguments.
    pub(crate) fn leasehold<S: AsRef<std::ffi::OsStr>>(
        &self,
        words: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = Command::new(LEASEHOLD);
        command.args(words).env("LEASEHOLD_STORE", self.store()).stdin(Stdio::null());
        // SAFETY: Between fork and exec the closure makes only system calls, which is allowed
        // there.
        unsafe { command.pre_exec(signals_end) };
        command
    }

    /// Runs the command to its end.
    pub(crate) fn output(&self, words: &[&str]) -> Output {
        self.leasehold(words).output().unwrap()
    }

    /// Runs the command and returns its exit code.
    pub(crate) fn code(&self, words: &[&str]) -> i32 {
        let output = self.output(words);
        output.status.code().unwrap_or_else(|| panic!("{words:?}: {output:?}"))
    }

    /// Starts `sh -c script` under the lock. The script prints the line "ready" when it is ready.
    pub(crate) fn hold(&self, name: &str, script: &str) -> Running {
        self.hold_with(&[], name, script)
    }

    pub(crate) fn hold_with(&self, options: &[&str], name: &str, script: &str) -> Running {
        let words = [&["run"], options, &[name, "--", "sh", "-c", script]].concat();
        let mut running = Running::start(self.leasehold(words));
        running.wait_for("ready");
        running
    }

    /// Returns the output of `show --json`.
    pub(crate) fn show(&self, name: &str) -> serde_json::Value {
        let output = self.output(&["show", "--json", name]);
        if String::from_utf8_lossy(&output.stderr).contains("no store found") {
            // The first client that acquires a lock creates the store.
            return serde_json::json!({ "claims": [] });
        }
        // Exit code 1 means that the lock is free.
        assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub(crate) fn claims(&self, name: &str) -> usize {
        self.show(name)["claims"].as_array().unwrap().len()
    }

    /// Writes an executable shell script, and returns its path.
    pub(crate) fn script(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Returns the command as run by root without the right to signal processes of other users.
    pub(crate) fn without_kill(&self, words: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-kill", "--inh-caps=-kill", LEASEHOLD]).args(words);
        command.env("LEASEHOLD_STORE", self.store()).stdin(Stdio::null());
        command
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }
}

/// A running command, and its output on stdout.
pub(crate) struct Running {
    pub(crate) child: Child,
    stdout_lines: mpsc::Receiver<String>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // A separate thread reads, so that a missing line makes the test fail instead of hang.
        let (tell, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        Self { child, stdout_lines: receiver }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Returns the next line, or an empty one at the end.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        match self.stdout_lines.recv_timeout(PATIENCE) {
            Ok(line) => line.trim_end().to_owned(),
            Err(mpsc::RecvTimeoutError::Disconnected) => String::new(),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("the command neither prints a line nor ends")
            }
        }
    }

    /// Reads lines until `wanted` appears.
    pub(crate) fn wait_for(&mut self, wanted: &str) {
        loop {
            let line = self.line();
            assert!(
                !line.is_empty(),
                "the command ended before it printed {wanted}: {}",
                self.errors()
            );
            if line == wanted {
                return;
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Returns all of stderr, once the command has ended.
    pub(crate) fn errors(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().map(|mut e| e.read_to_string(&mut text));
        text
    }

    pub(crate) fn code(&mut self) -> i32 {
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| panic!("{status}: {}", self.errors()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns whether stderr is one failure: the cause in one line, and at most one line with a hint.
pub(crate) fn is_cause_and_hint(text: &str) -> bool {
    let mut lines = text.lines();
    lines.next().is_some_and(|line| line.starts_with("leasehold: "))
        && lines.next().is_none_or(|line| line.starts_with("hint: "))
        && lines.next().is_none()
}

/// Waits until the condition is true.
#[track_caller]
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the pids and the command lines of the watchdogs of this `leasehold run`.
pub(crate) fn watchdogs_of(leasehold: i32) -> Vec<(i32, Vec<String>)> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let watchdog = |pid: i32| {
        let read =
            |what| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
        let words: Vec<String> = read("cmdline").split('\0').map(str::to_owned).collect();
        let stat = read("stat");
        let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<i32>().ok()?;
        let ours = words.first()? == "leasehold" && words.get(1)? == "watchdog";
        (ours && parent == leasehold && runs(pid)).then_some((pid, words))
    };
    pids.filter_map(watchdog).collect()
}

/// Returns whether the process runs. It does not count if it is a zombie, or about to exit (its
/// files are closed a moment earlier).
pub(crate) fn runs(pid: i32) -> bool {
    const EXITING: u32 = 4;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| {
        let flags = rest.split(' ').nth(6).and_then(|flags| flags.parse::<u32>().ok());
        !rest.starts_with(['Z', 'X']) && flags.is_some_and(|flags| flags & EXITING == 0)
    })
}

pub(crate) fn exists(path: &Path) -> bool {
    path.try_exists().unwrap()
}
