//! `leasehold top` on a pseudo-terminal, seen through a terminal emulator. The tests check what is
//! on the screen, not which bytes were sent.
#![cfg(feature = "top")]

use std::num::NonZero;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use nix::libc;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;

use crate::common::{LEASEHOLD, PATIENCE, Place, Running, is_cause_and_hint};
use crate::terminal::{CTRL_C, CTRL_Z, Session};

const ESC: &str = "\x1b";

/// `leasehold top` on a terminal.
pub(crate) struct Top {
    session: Session,
    /// The number of lines and columns.
    size: (u16, u16),
    /// The original settings of the terminal.
    before: Termios,
}

impl Top {
    pub(crate) fn start(place: &Place, words: &[&str]) -> Self {
        Self::start_on("TERM=xterm-256color", place, words)
    }

    /// Starts with this variable in the environment.
    fn start_on(set: &str, place: &Place, words: &[&str]) -> Self {
        let term = if set.starts_with("TERM=") { set } else { "TERM=xterm-256color" };
        let plain = ["env", "-u", "NO_COLOR", "-u", "COLORTERM", term, set, LEASEHOLD, "top"];
        let words = [&plain[..], &["--every", "50ms"], words].concat();
        let before = tcgetattr(openpty(None, None).unwrap().master).unwrap();
        Self { session: Session::start(place, &words), size: (24, 80), before }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.session.press(keys);
    }

    pub(crate) fn resize(&mut self, lines: u16, columns: u16) {
        self.size = (lines, columns);
        let size = libc::winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let keys = std::os::fd::AsRawFd::as_raw_fd(&self.session.keys);
        // SAFETY: The call reads one structure of this size, which lives as long as the call.
        assert_eq!(unsafe { libc::ioctl(keys, libc::TIOCSWINSZ, &size) }, 0);
    }

    fn emulated(&self) -> vt100::Parser {
        emulate(self.size, &self.session.since(0))
    }

    /// Returns what is on the screen now.
    fn screen(&self) -> String {
        self.emulated().screen().contents()
    }

    /// Waits for a line on the screen that contains all of these parts.
    #[track_caller]
    pub(crate) fn sees(&self, parts: &[&str]) {
        let is_there =
            |screen: &str| screen.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        self.waits_for(&format!("a line with {parts:?}"), is_there);
    }

    #[track_caller]
    fn waits_for(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return;
            }
            assert!(std::time::Instant::now() < end, "{what} is missing in\n{screen}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Waits until the program ends and the terminal is restored.
    #[track_caller]
    pub(crate) fn ends(mut self) -> std::process::ExitStatus {
        let status = self.session.shell.wait().unwrap();
        let is_back = |top: &Self| {
            let seen = top.emulated();
            !seen.screen().alternate_screen() && !seen.screen().hide_cursor()
        };
        assert!(self.session.since(0).contains("\x1b[?1049h"), "`top` never opened its screen");
        crate::common::eventually("the screen is restored", || is_back(&self));
        assert_eq!(tcgetattr(&self.session.keys).unwrap(), self.before);
        status
    }
}

/// Returns a terminal of this size that has received these bytes.
fn emulate(size: (u16, u16), bytes: &str) -> vt100::Parser {
    let [lines, columns] = [size.0, size.1].map(|n| NonZero::new(n).unwrap());
    let mut parser = vt100::Parser::new(lines, columns, 0);
    parser.process(bytes.as_bytes());
    parser
}

/// Starts a holder and a waiter of a lock.
fn busy(place: &Place, name: &str) -> [Running; 2] {
    let holder = place.hold_with(&["--label", "job"], name, "echo ready; exec sleep 1000");
    let words = ["run", "--label", "later", name, "--", "sh", "-c", "exec sleep 1000"];
    let waiter = Running::start(place.leasehold(words));
    crate::common::eventually("the waiter is in the queue", || place.claims(name) == 2);
    [holder, waiter]
}

#[test]
fn top_shows_locks_holders_and_waiters() {
    let place = Place::new();
    let [holder, waiter] = busy(&place, "report");
    let other = place.hold("other", "echo ready; exec sleep 1000");
    let mut top = Top::start(&place, &[]);
    let pid = format!("pid {}", holder.child.id());
    // This lock has been held longest, so it is first.
    top.sees(&["> report", "mutex", "1/1   1 ", &pid, "(job)"]);
    top.sees(&["  other", "mutex", "1/1   0 "]);
    assert!(!top.session.since(0).contains('\n'), "`top` scrolled the terminal");

    top.press("\r");
    top.sees(&["report (mutex)", &place.store()[..20]]);
    top.sees(&["> held", &holder.child.id().to_string(), "job"]);
    top.sees(&["  waiting", &waiter.child.id().to_string(), "later"]);
    top.press("\x1b[B");
    top.sees(&["> waiting"]);
    // The second hold ends, and the screen is updated automatically.
    top.press(ESC);
    top.sees(&["> report"]);
    drop(other);
    top.waits_for("end of the other", |screen| !screen.contains("other"));
    top.press("?");
    top.sees(&["Ctrl-Z", "fg resumes"]);
    top.press("?");
    top.press("/nothing such");
    top.sees(&["/nothing such_"]);
    top.sees(&["no lock matches the filter"]);
    top.press(ESC);
    top.sees(&["> report"]);
    top.press("\rq");
    top.sees(&["q quit"]);
    top.press("q");
    assert_eq!(top.ends().code(), Some(0));
}

#[test]
fn top_lists_only_names_with_the_given_prefix() {
    let place = Place::new();
    let _held =
        [place.hold("a:1", "echo ready; sleep 1000"), place.hold("b:1", "echo ready; sleep 1000")];
    let mut top = Top::start(&place, &["b:"]);
    top.sees(&["> b:1"]);
    assert!(!top.screen().contains("a:1"));
    top.press(CTRL_C);
    assert_eq!(top.ends().code(), Some(0));
}

#[test]
fn holder_is_evicted_after_confirmation() {
    let place = Place::new();
    let [_holder, waiter] = busy(&place, "x");
    let token = || place.show("x")["claims"][0]["token"].to_string();
    let (first, pid) = (token(), waiter.child.id());
    let mut top = Top::start(&place, &[]);
    top.sees(&["> x "]);
    top.press("\r");
    top.sees(&["> held"]);
    for no in ["n", ESC] {
        top.press("e");
        top.sees(&[&format!("Evict token {first}? y/n")]);
        top.sees(&["may still be working"]);
        top.press(no);
        top.sees(&["nothing was evicted"]);
        assert_eq!((place.claims("x"), token()), (2, first.clone()));
        // The message disappears on the next key.
        top.press("k");
        top.waits_for("silence", |screen| !screen.contains("nothing was evicted"));
    }
    top.press("e");
    top.sees(&[&format!("Evict token {first}? y/n")]);
    top.press("y");
    top.sees(&[&format!("evicted token {first} of x")]);
    // Only this claim was evicted, and the waiter has acquired the lock.
    top.sees(&["> held", &pid.to_string(), "later"]);
    let now = place.show("x");
    assert_eq!(
        (now["claims"].as_array().unwrap().len(), now["claims"][0]["pid"] == pid),
        (1, true)
    );
    top.press("qq");
    assert_eq!(top.ends().code(), Some(0));
}

/// Of several holders, only the selected one is evicted.
#[test]
fn only_the_selected_holder_is_evicted() {
    let place = Place::new();
    let hold = |label| {
        place.hold_with(&["--max", "3", "--label", label], "x", "echo ready; exec sleep 1000")
    };
    let _held = [hold("one"), hold("two"), hold("three")];
    let mut top = Top::start(&place, &[]);
    top.sees(&["> x ", "semaphore", "3/3"]);
    top.press("\rj");
    top.sees(&["> held", "two"]);
    top.press("e");
    top.sees(&["Evict token"]);
    top.sees(&["x: held by", "two"]);
    top.press("y");
    top.sees(&["evicted token"]);
    let left = place.show("x");
    let labels = left["claims"].as_array().unwrap().iter().map(|claim| &claim["label"]);
    assert_eq!(labels.collect::<Vec<_>>(), ["one", "three"]);
    top.press("qq");
    assert_eq!(top.ends().code(), Some(0));
}

#[test]
fn frozen_lock_is_unfrozen_after_confirmation() {
    let place = Place::new();
    assert_eq!(place.code(&["freeze", "x", "--for", "1h", "--reason", "moved"]), 0);
    let mut top = Top::start(&place, &[]);
    top.sees(&["> x ", "0/1", "frozen for"]);
    top.press("\re");
    top.sees(&["x: frozen for", "moved"]);
    top.press("y");
    top.sees(&["evicted token"]);
    assert_eq!(place.claims("x"), 0);
    top.sees(&["x (free)"]);
}

#[test]
fn terminal_is_restored_after_any_signal() {
    let place = Place::new();
    let _held = place.hold("x", "echo ready; exec sleep 1000");
    for signal in
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1]
    {
        let top = Top::start(&place, &[]);
        top.sees(&["> x "]);
        assert_ne!(
            tcgetattr(&top.session.keys).unwrap(),
            top.before,
            "the terminal must be in raw mode"
        );
        assert!(
            top.emulated().screen().alternate_screen() && top.emulated().screen().hide_cursor()
        );
        kill(Pid::from_raw(top.session.shell.id() as i32), signal).unwrap();
        assert_eq!(top.ends().signal(), Some(signal as i32));
    }
}

#[test]
fn ctrl_z_suspends_top_and_fg_resumes_it() {
    let place = Place::new();
    let _held = place.hold("held", "echo ready; exec sleep 1000");
    let session = Session::bash(&place);
    let before = tcgetattr(&session.keys).unwrap();
    let mut top = Top { session, size: (24, 80), before };
    top.session.enter("TERM=xterm leasehold top --every 50ms");
    top.sees(&["> held"]);
    for how in ["key", "signal"] {
        match how {
            "key" => top.press(CTRL_Z),
            // The signal goes to the whole job, like a shell's `kill -TSTP %1`.
            _ => {
                let group = nix::unistd::tcgetpgrp(&top.session.keys).unwrap();
                nix::sys::signal::killpg(group, Signal::SIGTSTP).unwrap();
            }
        }
        top.session.expect("Stopped");
        top.session.prompt();
        assert!(!top.emulated().screen().alternate_screen(), "{how}");
        assert!(!top.emulated().screen().hide_cursor(), "{how}");
        top.session.enter("stty -a | grep -o '.ica''non'; echo shell=he''re");
        top.session.expect(" icanon");
        top.session.expect("shell=here");
        top.session.enter("fg");
        top.sees(&["> held"]);
    }
    // Keys are read in raw mode again. Without waiting for the prompt, the terminal would discard what is typed
    // while `top` restores its mode.
    top.press("q");
    top.session.expect("\u{1b}[?1049l");
    top.session.prompt();
    top.session.enter("echo co''de=$?");
    top.session.expect("code=0");
}

/// A stopped job must end on SIGTERM, although it is in the background.
#[test]
fn suspended_top_ends_on_sigterm() {
    let place = Place::new();
    let _held = place.hold("held", "echo ready; exec sleep 1000");
    let session = Session::bash(&place);
    let before = tcgetattr(&session.keys).unwrap();
    let mut top = Top { session, size: (24, 80), before };
    top.session.enter("TERM=xterm leasehold top --every 50ms");
    top.sees(&["> held"]);
    top.press(CTRL_Z);
    top.session.expect("Stopped");
    top.session.prompt();
    top.session.enter("kill %1");
    // bash reports that before a prompt.
    crate::common::eventually("`top` is terminated", || {
        top.session.enter("");
        top.session.since(0).contains("Terminated")
    });
}

/// Returns the numbers of each sequence that sets the style of text.
fn looks(bytes: &str) -> Vec<Vec<u32>> {
    let sequences = bytes.split("\x1b[").skip(1).filter_map(|rest| {
        let (numbers, _) = rest.split_once('m')?;
        let all = numbers.bytes().all(|b| b.is_ascii_digit() || b == b';');
        all.then(|| numbers.split(';').map(|n| n.parse().unwrap_or(0)).collect())
    });
    sequences.collect()
}

fn has_colour(bytes: &str) -> bool {
    let is_colour =
        |look: &Vec<u32>| look.iter().any(|n| matches!(n, 30..=49 | 58..=59 | 90..=107));
    looks(bytes).iter().any(is_colour)
}

#[test]
fn colors_are_used_only_if_supported_and_not_disabled() {
    let place = Place::new();
    let [..] = &busy(&place, "x");
    let colours = |set: &str| {
        let mut top = Top::start_on(set, &place, &[]);
        // This lock has a waiter, so its row has a color.
        top.sees(&["> x ", "(job)"]);
        top.press("\r");
        top.sees(&["> held"]);
        top.sees(&["  waiting"]);
        top.press("e");
        top.sees(&["Evict token"]);
        top.press("nqq");
        let screen = top.session.since(0);
        assert_eq!(top.ends().code(), Some(0));
        assert!(!looks(&screen).is_empty(), "the selection must be visible without colors");
        has_colour(&screen)
    };
    assert!(colours("TERM=xterm-256color"));
    for without in ["NO_COLOR=1", "TERM=dumb", "TERM=vt220"] {
        assert!(!colours(without), "{without}");
    }
}

// S90
#[test]
fn label_with_control_sequences_is_shown_escaped() {
    let place = Place::new();
    let words = ["run", "--min-hold", "1h", "--label", "nightly", "x", "--", "true"];
    assert_eq!(place.code(&words), 0);
    // Another program may have written this.
    let evil = r"\u001b]0;title\u0007\u001b[2J\u009b31m\u202eevil";
    let files = || walk(&place.path("store"));
    let written = files().into_iter().find_map(|path| {
        let text = std::fs::read_to_string(&path).ok()?;
        text.contains("\"nightly\"").then(|| std::fs::write(path, text.replace("nightly", evil)))
    });
    written.expect("a file has the label").unwrap();
    let mut top = Top::start(&place, &[]);
    top.sees(&["> x ", "in cooldown for"]);
    top.press("\r");
    top.sees(&["> cooldown", "\\u{1b}]0;title"]);
    top.press("e");
    top.sees(&["\\u{1b}]0;title", "\\u{9b}31m"]);
    top.press("nqq");
    let screen = top.session.since(0);
    for raw in ["\x1b]", "\u{7}", "\u{9b}", "\u{202e}"] {
        assert!(!screen.contains(raw), "{raw:?} in {screen:?}");
    }
    assert_eq!(top.ends().code(), Some(0));
}

fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    // FIFOs for notifications are skipped, because a read would block.
    let files = |path: std::path::PathBuf| match path.is_dir() {
        true => walk(&path),
        false => Vec::from_iter(path.is_file().then_some(path)),
    };
    entries.flat_map(files).collect()
}

#[test]
fn top_fits_any_terminal_and_follows_resizes() {
    let place = Place::new();
    let _held = place.hold_with(&["--label", "job"], "x", "echo ready; exec sleep 1000");
    let mut top = Top::start(&place, &[]);
    top.sees(&["> x ", "(job)"]);
    for (lines, columns) in [(5, 20), (1, 1), (2, 3), (30, 120)] {
        // What was drawn for another size would be garbled in this one.
        let from = top.session.since(0).len();
        top.resize(lines, columns);
        let is_drawn = || {
            let text = emulate((lines, columns), &top.session.since(from)).screen().contents();
            !text.is_empty()
                && (columns < 20 || text.contains("> x "))
                && (columns < 120 || text.contains("(job)"))
        };
        crate::common::eventually("the screen is drawn in this size", is_drawn);
    }
    top.press("q");
    assert_eq!(top.ends().code(), Some(0));
}

#[test]
fn top_requires_a_terminal() {
    let place = Place::new();
    let pty = openpty(None, None).unwrap();
    let stream = |is_terminal: bool| match is_terminal {
        true => Stdio::from(pty.slave.try_clone().unwrap()),
        false => Stdio::null(),
    };
    for (stdin, stdout) in [(false, false), (true, false), (false, true)] {
        let mut command = place.leasehold(["top"]);
        command.stdin(stream(stdin)).stdout(stream(stdout)).stderr(Stdio::piped());
        let ended = command.spawn().unwrap().wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{stderr}");
        assert!(is_cause_and_hint(&stderr) && stderr.contains("needs a terminal"), "{stderr}");
    }
    assert_eq!(place.code(&["top", "--every", "1ms"]), 2);
}

/// The server does not answer any longer. The last data must stay, and `q` must still work.
#[cfg(feature = "redis")]
#[test]
fn unreachable_store_is_reported_and_the_last_view_stays() {
    let redis = testbed::redis();
    let proxy = testbed::Proxy::before(redis.port());
    let place = Place::new();
    let name = "top:away";
    let mut command = place.leasehold([
        "run",
        "--lease",
        "10min",
        name,
        "--",
        "sh",
        "-c",
        "echo ready; exec sleep 1000",
    ]);
    command.env("LEASEHOLD_STORE", redis.url());
    let mut held = Running::start(command);
    held.wait_for("ready");
    let mut top =
        Top::start(&place, &["--store", &proxy.in_front_of(redis.port(), &redis.url()), name]);
    top.sees(&["> top:away"]);
    proxy.freeze();
    top.sees(&["STALE, from ", " ago: "]);
    top.sees(&["> top:away"]);
    proxy.thaw();
    top.waits_for("news", |screen| {
        !screen.contains("STALE, from") && screen.contains("> top:away")
    });
    proxy.freeze();
    top.sees(&["STALE, from "]);
    let pressed = std::time::Instant::now();
    top.press("q");
    assert_eq!(top.ends().code(), Some(0));
    assert!(pressed.elapsed() < std::time::Duration::from_secs(30));
}
