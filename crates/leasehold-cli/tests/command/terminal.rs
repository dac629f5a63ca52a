//! `leasehold run` on a terminal, under an interactive bash on a pseudo-terminal: Ctrl-C, Ctrl-Z,
//! `fg`, background jobs, pipelines, scripts, and the line about the queue.
//!
//! The terminal echoes what is typed. So the expected text itself is never typed: the tests type
//! `ma''rk` for "mark".

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use crate::common::{LEASEHOLD, Place, eventually};
use nix::libc;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, setsid};

/// A shell on a terminal.
pub(crate) struct Session {
    pub(crate) shell: Child,
    pub(crate) keys: File,
    seen: Arc<Mutex<String>>,
    read: usize,
}

impl Session {
    pub(crate) fn start(place: &Place, program: &[&str]) -> Self {
        let pty = openpty(None, None).unwrap();
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        let mut command = Command::new(program[0]);
        let dir = std::path::Path::new(LEASEHOLD).parent().unwrap();
        let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
        command
            .args(&program[1..])
            .env("PATH", path)
            .env("LEASEHOLD_STORE", place.store())
            .env("PS1", "$ ")
            .env("TERM", "dumb")
            .current_dir(place.path(""))
            .stdin(copy(&pty.slave))
            .stdout(copy(&pty.slave))
            .stderr(pty.slave);
        let lead = || {
            crate::common::signals_end()?;
            setsid()?;
            // SAFETY: The call makes the terminal on stdin the controlling terminal of this new
            // session. It does not access memory.
            match unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: `lead` makes a few system calls and nothing else.
        unsafe { command.pre_exec(lead) };
        let shell = command.spawn().unwrap();
        drop(command);
        let (mut screen, keys) = (File::from(copy(&pty.master)), File::from(pty.master));
        let seen = Arc::new(Mutex::new(String::new()));
        let shown = seen.clone();
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut chunk) {
                shown.lock().unwrap().push_str(&String::from_utf8_lossy(&chunk[..n]));
            }
        });
        Self { shell, keys, seen, read: 0 }
    }

    pub(crate) fn bash(place: &Place) -> Self {
        Self::start(place, &["bash", "--norc", "--noprofile", "-i"])
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn enter(&mut self, line: &str) {
        self.press(&format!("{line}\n"));
    }

    /// Waits until this text appears, after the text of the previous wait.
    #[track_caller]
    pub(crate) fn expect(&mut self, text: &str) {
        let end = std::time::Instant::now() + crate::common::PATIENCE;
        loop {
            let seen = self.seen.lock().unwrap();
            if let Some(at) = seen[self.read..].find(text) {
                self.read += at + text.len();
                return;
            }
            assert!(
                std::time::Instant::now() < end,
                "{text:?} is missing in {:?}",
                &seen[self.read..]
            );
            drop(seen);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Waits for the prompt of the shell. Input that is typed before a Ctrl-C is handled would be
    /// discarded.
    #[track_caller]
    pub(crate) fn prompt(&mut self) {
        self.expect("$ ");
    }

    pub(crate) fn since(&self, start: usize) -> String {
        self.seen.lock().unwrap()[start..].to_owned()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The terminal hangs up when its last master is closed, which ends the remaining processes
        // of the session.
        let _ = kill(Pid::from_raw(self.shell.id() as i32), Signal::SIGKILL);
        let _ = self.shell.wait();
    }
}

pub(crate) const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
pub(crate) const CTRL_Z: &str = "\x1a";

#[test]
fn ctrl_c_reaches_only_the_command() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    session.enter(
        "leasehold run x -- sh -c 'trap \"echo go\"t\"; exit 3\" INT; echo rea\"\"dy; \
         while :; do sleep 0.02; done'",
    );
    session.expect("ready");
    session.press(CTRL_C);
    session.expect("got");
    session.prompt();
    session.enter("echo co''de=$?");
    session.expect("code=3");
}

#[test]
fn leasehold_dies_of_sigint_if_its_command_does() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    session.enter("leasehold run x -- sh -c 'echo rea\"\"dy; exec sleep 1000'");
    session.expect("ready");
    session.press(CTRL_C);
    session.prompt();
    session.enter("echo co''de=$?");
    session.expect("code=130");
    assert_eq!(place.claims("x"), 0, "released");
}

#[test]
fn ctrl_c_also_ends_the_calling_script() {
    let place = Place::new();
    std::fs::write(
        place.path("script"),
        "leasehold run x -- sh -c 'echo ready; exec sleep 1000'\necho went on\n",
    )
    .unwrap();
    for shell in ["bash", "dash"] {
        let mut session = Session::bash(&place);
        let start = session.read;
        session.enter(&format!("{shell} script"));
        session.expect("ready");
        session.press(CTRL_C);
        session.prompt();
        session.enter("echo co''de=$?");
        session.expect("code=130");
        assert!(!session.since(start).contains("went on"), "{shell}");
    }
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it_with_the_terminal() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    session
        .enter("leasehold run x -- sh -c 'echo rea\"\"dy; while read a; do echo \"[$a]\"; done'");
    session.expect("ready");
    session.enter("one");
    session.expect("[one]");
    for word in ["two", "three"] {
        session.press(CTRL_Z);
        session.expect("Stopped");
        session.prompt();
        session.enter("echo shell=he''re");
        session.expect("shell=here");
        // The job is stopped and the lock is still held.
        assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
        session.enter("fg");
        session.enter(word);
        session.expect(&format!("[{word}]"));
    }
    session.press(CTRL_D);
    session.enter("echo co''de=$?");
    session.expect("code=0");
}

#[test]
fn background_job_gets_the_terminal_on_fg() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    session.enter("leasehold run x -- sh -c 'read a; echo \"[$a]\"' &");
    eventually("the job holds the lock", || place.claims("x") == 1);
    // The job reads, so it is stopped, as every background job would be. bash reports that before a
    // prompt.
    eventually("the job is stopped", || {
        session.enter("");
        session.since(0).contains("Stopped")
    });
    session.expect("Stopped");
    session.enter("fg");
    session.enter("hello");
    session.expect("[hello]");
    session.enter("echo co''de=$?");
    session.expect("code=0");
}

#[test]
fn a_background_job_leaves_the_terminal_alone() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    session.enter("leasehold run x -- sh -c 'exec sleep 1000' &");
    eventually("the job holds the lock", || place.claims("x") == 1);
    session.enter("echo shell=he''re");
    session.expect("shell=here");
    session.prompt();
    session.press(CTRL_C);
    session.prompt();
    session.enter("jo''bs -r; kill %1; wait; echo en''d");
    session.expect("Running");
    session.expect("end");
}

#[test]
fn command_in_a_pipeline_gets_the_terminal_when_it_reads() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    session
        .enter("leasehold run x -- sh -c 'echo rea\"\"dy >/dev/tty; read a; echo \"[$a]\"' | cat");
    session.expect("ready");
    session.enter("hello");
    session.expect("[hello]");
    // In a pipeline leasehold gets Ctrl-C and forwards it.
    session.enter(
        "leasehold run x -- sh -c 'trap \"echo go\"t\"; exit 3\" INT; echo rea\"\"dy; \
                   while :; do sleep 0.02; done' | cat",
    );
    session.expect("ready");
    session.press(CTRL_C);
    session.prompt();
    session.enter("echo shell=he''re");
    session.expect("shell=here");
    eventually("the lock is released", || place.claims("x") == 0);
}

#[test]
fn ctrl_z_is_undone_without_a_parent_shell() {
    // leasehold leads the session itself, as in `ssh -t host leasehold run …`. No process could
    // continue it, so nothing may stay stopped.
    let place = Place::new();
    let script = "echo ready; while read a; do echo \"[$a]\"; done; echo end";
    let mut session = Session::start(&place, &[LEASEHOLD, "run", "x", "--", "sh", "-c", script]);
    session.expect("ready");
    session.press(CTRL_Z);
    session.enter("one");
    session.expect("[one]");
    session.press(CTRL_D);
    session.expect("end");
    assert!(session.shell.wait().unwrap().success());
}

#[test]
fn a_command_that_cannot_start_gives_the_terminal_back() {
    let place = Place::new();
    let mut session = Session::bash(&place);
    std::fs::write(
        place.path("script"),
        "leasehold run x -- no-such-command\necho code=$?\nread a\necho \"[$a]\"\n",
    )
    .unwrap();
    session.enter("dash script");
    session.expect("code=127");
    session.enter("hello");
    session.expect("[hello]");
}

#[test]
fn waiter_on_a_terminal_sees_the_holder() {
    let place = Place::new();
    let holder = place.hold_with(&["--label", "nightly"], "x", "echo ready; sleep 1000");
    let mut session = Session::bash(&place);
    session.enter("leasehold run x -- sh -c 'echo ru\"\"ns'");
    let pid = holder.child.id();
    session.expect("waiting for \"x\" (position 1 in the queue): held by ");
    session.expect(&format!(" pid {pid} (nightly) for "));
    drop(holder);
    // The line is removed before the command begins.
    session.expect("\r\x1b[K");
    session.expect("runs");

    let holder = place.hold("x", "echo ready; sleep 1000");
    session.enter("T=$(leasehold acquire x); echo t''oken=$T");
    session.expect("waiting for \"x\" (position 1 in the queue): held by ");
    drop(holder);
    session.expect("token=1");
}
