//! `leasehold top` on a pseudo-terminal, seen through a terminal emulator: what is on the screen, not which
//! bytes were sent.
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

/// The command on a terminal.
pub(crate) struct Top {
    session: Session,
    /// How many lines and columns it has.
    size: (u16, u16),
    /// What the terminal was like before.
    before: Termios,
}

impl Top {
    pub(crate) fn start(place: &Place, words: &[&str]) -> Self {
        Self::start_on("TERM=xterm-256color", place, words)
    }

    /// With this in the environment.
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
        // SAFETY: the call reads one such size, which lives for as long as the call.
        assert_eq!(unsafe { libc::ioctl(keys, libc::TIOCSWINSZ, &size) }, 0);
    }

    fn emulated(&self) -> vt100::Parser {
        emulate(self.size, &self.session.since(0))
    }

    /// What is on the screen now.
    fn screen(&self) -> String {
        self.emulated().screen().contents()
    }

    /// Waits for a screen with a line of which these are parts.
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
            assert!(std::time::Instant::now() < end, "no {what} in\n{screen}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Waits for its end, and for the terminal to be as it was.
    #[track_caller]
    pub(crate) fn ends(mut self) -> std::process::ExitStatus {
        let status = self.session.shell.wait().unwrap();
        let is_back = |top: &Self| {
            let seen = top.emulated();
            !seen.screen().alternate_screen() && !seen.screen().hide_cursor()
        };
        assert!(self.session.since(0).contains("\x1b[?1049h"), "it never began");
        crate::common::eventually("the screen is as before", || is_back(&self));
        assert_eq!(tcgetattr(&self.session.keys).unwrap(), self.before);
        status
    }
}

/// A terminal of so many lines and columns that was sent this.
fn emulate(size: (u16, u16), bytes: &str) -> vt100::Parser {
    let [lines, columns] = [size.0, size.1].map(|n| NonZero::new(n).unwrap());
    let mut parser = vt100::Parser::new(lines, columns, 0);
    parser.process(bytes.as_bytes());
    parser
}

/// A lock that is held and waited for.
fn busy(place: &Place, name: &str) -> [Running; 2] {
    let holder = place.hold_with(&["--label", "job"], name, "echo ready; exec sleep 1000");
    let words = ["run", "--label", "later", name, "--", "sh", "-c", "exec sleep 1000"];
    let waiter = Running::start(place.leasehold(words));
    crate::common::eventually("it waits", || place.claims(name) == 2);
    [holder, waiter]
}

#[test]
fn what_is_held_and_waited_for_is_seen_and_who() {
    let place = Place::new();
    let [holder, waiter] = busy(&place, "report");
    let other = place.hold("other", "echo ready; exec sleep 1000");
    let mut top = Top::start(&place, &[]);
    let pid = format!("pid {}", holder.child.id());
    // Held for longest, so that it is first.
    top.sees(&["> report", "mutex", "1/1   1 ", &pid, "(job)"]);
    top.sees(&["  other", "mutex", "1/1   0 "]);
    assert!(!top.session.since(0).contains('\n'), "it scrolls nothing");

    top.press("\r");
    top.sees(&["report (mutex)", &place.store()[..20]]);
    top.sees(&["> held", &holder.child.id().to_string(), "job"]);
    top.sees(&["  waiting", &waiter.child.id().to_string(), "later"]);
    top.press("\x1b[B");
    top.sees(&["> waiting"]);
    // The second hold is over: the picture follows by itself.
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
fn names_can_be_chosen_by_how_they_begin() {
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
fn who_holds_is_evicted_after_a_question() {
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
        // What was said goes with the next key.
        top.press("k");
        top.waits_for("silence", |screen| !screen.contains("nothing was evicted"));
    }
    top.press("e");
    top.sees(&[&format!("Evict token {first}? y/n")]);
    top.press("y");
    top.sees(&[&format!("evicted token {first} of x")]);
    // Only that one, and the next one has it.
    top.sees(&["> held", &pid.to_string(), "later"]);
    let now = place.show("x");
    assert_eq!(
        (now["claims"].as_array().unwrap().len(), now["claims"][0]["pid"] == pid),
        (1, true)
    );
    top.press("qq");
    assert_eq!(top.ends().code(), Some(0));
}

/// Of several who hold, the one that is pointed at.
#[test]
fn nobody_else_is_evicted() {
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
fn what_is_kept_closed_is_opened_after_a_question() {
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
fn the_terminal_is_as_before_whichever_signal_ends_it() {
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
            "keys come as they are pressed"
        );
        assert!(
            top.emulated().screen().alternate_screen() && top.emulated().screen().hide_cursor()
        );
        kill(Pid::from_raw(top.session.shell.id() as i32), signal).unwrap();
        assert_eq!(top.ends().signal(), Some(signal as i32));
    }
}

#[test]
fn ctrl_z_stops_it_and_fg_comes_back() {
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
            // All of the job, as a shell's `kill -TSTP %1`.
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
    // And keys come again as they are pressed. (What is typed behind them would be its own to read.)
    top.press("q");
    crate::common::eventually("it leaves", || !top.emulated().screen().alternate_screen());
    top.session.enter("echo co''de=$?");
    top.session.expect("code=0");
}

/// A stopped job that is told to end does, though it is not in front.
#[test]
fn a_stopped_one_can_be_ended() {
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
    // bash says so before a prompt.
    crate::common::eventually("it is ended", || {
        top.session.enter("");
        top.session.since(0).contains("Terminated")
    });
}

/// The numbers of each sequence that sets how text looks.
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
fn there_are_colours_only_where_they_are_wanted_and_known() {
    let place = Place::new();
    let [..] = &busy(&place, "x");
    let colours = |set: &str| {
        let mut top = Top::start_on(set, &place, &[]);
        // Waited for: that has a colour.
        top.sees(&["> x ", "(job)"]);
        top.press("\r");
        top.sees(&["> held"]);
        top.sees(&["  waiting"]);
        top.press("e");
        top.sees(&["Evict token"]);
        top.press("nqq");
        let said = top.session.since(0);
        assert_eq!(top.ends().code(), Some(0));
        assert!(!looks(&said).is_empty(), "what is pointed at is seen in another way, too");
        has_colour(&said)
    };
    assert!(colours("TERM=xterm-256color"));
    for without in ["NO_COLOR=1", "TERM=dumb", "TERM=vt220"] {
        assert!(!colours(without), "{without}");
    }
}

#[test]
fn s90_a_label_with_sequences_is_shown_harmless() {
    let place = Place::new();
    let words = ["run", "--min-hold", "1h", "--label", "nightly", "x", "--", "true"];
    assert_eq!(place.code(&words), 0);
    // As another program may have written it.
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
    top.sees(&["> departed", "\\u{1b}]0;title"]);
    top.press("e");
    top.sees(&["\\u{1b}]0;title", "\\u{9b}31m"]);
    top.press("nqq");
    let said = top.session.since(0);
    for raw in ["\x1b]", "\u{7}", "\u{9b}", "\u{202e}"] {
        assert!(!said.contains(raw), "{raw:?} in {said:?}");
    }
    assert_eq!(top.ends().code(), Some(0));
}

fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    // Not what a client is told through: who reads that waits for it.
    let files = |path: std::path::PathBuf| match path.is_dir() {
        true => walk(&path),
        false => Vec::from_iter(path.is_file().then_some(path)),
    };
    entries.flat_map(files).collect()
}

#[test]
fn it_fits_into_any_terminal_and_follows_its_size() {
    let place = Place::new();
    let _held = place.hold_with(&["--label", "job"], "x", "echo ready; exec sleep 1000");
    let mut top = Top::start(&place, &[]);
    top.sees(&["> x ", "(job)"]);
    for (lines, columns) in [(5, 20), (1, 1), (2, 3), (30, 120)] {
        // What was drawn for another size would be a mess in this one.
        let from = top.session.since(0).len();
        top.resize(lines, columns);
        let is_drawn = || {
            let text = emulate((lines, columns), &top.session.since(from)).screen().contents();
            !text.is_empty()
                && (columns < 20 || text.contains("> x "))
                && (columns < 120 || text.contains("(job)"))
        };
        crate::common::eventually("it is drawn to this size", is_drawn);
    }
    top.press("q");
    assert_eq!(top.ends().code(), Some(0));
}

#[test]
fn what_is_no_terminal_is_refused() {
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
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{said}");
        assert!(is_cause_and_hint(&said) && said.contains("needs a terminal"), "{said}");
    }
    assert_eq!(place.code(&["top", "--every", "1ms"]), 2);
}

/// A server that says nothing any more: the last picture stays, and who has seen enough is let go.
#[cfg(feature = "redis")]
#[test]
fn a_store_that_is_away_is_said_and_the_last_picture_stays() {
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
