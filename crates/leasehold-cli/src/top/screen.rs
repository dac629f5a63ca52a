//! The terminal while all of it is ours: keys come as they are pressed, and what was on it before comes back.
//!
//! *Turned off* it is again on every way out, also by a panic: what it was like lies in a place of the process,
//! where the first who turns it off takes it from. *Turned on* it is only in the foreground, since who changes
//! a terminal from behind spoils it for whoever is in front; and turning it off from behind leaves its settings
//! to those whom they belong to by then.
//!
//! A frame is drawn into memory, and what differs from the last one is written in one piece. Nothing is asked
//! of the terminal: its answers would come among the keys.

use std::fs::File;
use std::io::{self, Read, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::sync::{Mutex, Once};
use std::thread;
use std::time::Duration;

use leasehold::kit::locked;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};
use ratatui::backend::{Backend, CrosstermBackend};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::mpsc;

use super::colours::Colours;

/// The other screen, without a cursor, empty.
const ON: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[0m\x1b[2J";
const OFF: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
const CLEAR: &[u8] = b"\x1b[0m\x1b[2J";

/// What the terminal was like, while it is on.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal on stdin and stdout.
#[derive(Debug)]
pub(crate) struct Screen {
    out: File,
    /// What is on it.
    shown: Buffer,
}

impl Screen {
    /// It, still as it is.
    pub(crate) fn open(colours: Colours) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let others = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                turn_off();
                others(panic);
            }));
        });
        // Else what resets a colour is written even where there are none.
        ratatui::crossterm::style::force_color_output(colours.0);
        let out = File::from(stdout().as_fd().try_clone_to_owned()?);
        Ok(Self { out, shown: Buffer::empty(Rect::ZERO) })
    }

    pub(crate) fn is_on(&self) -> bool {
        locked(&BEFORE).is_some()
    }

    /// Turns it on if we are in front. On one that is on already this puts right what others have done to it.
    pub(crate) fn turn_on(&mut self) -> io::Result<()> {
        if !in_front() {
            return Ok(());
        }
        let mut before = locked(&BEFORE);
        if before.is_none() {
            *before = Some(tcgetattr(stdin())?);
        }
        if let Some(before) = &*before {
            let mut raw = before.clone();
            cfmakeraw(&mut raw);
            tcsetattr(stdin(), SetArg::TCSANOW, &raw)?;
        }
        drop(before);
        self.shown = Buffer::empty(Rect::ZERO);
        write(&self.out, ON)
    }

    /// How large it is.
    pub(crate) fn area(&self) -> Rect {
        match rustix::termios::tcgetwinsize(&self.out) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                Rect::new(0, 0, size.ws_col, size.ws_row)
            }
            // One that does not know it.
            _ => Rect::new(0, 0, 80, 24),
        }
    }

    /// Shows what is drawn.
    pub(crate) fn draw(&mut self, draw: impl FnOnce(Rect, &mut Buffer)) -> io::Result<()> {
        let area = self.area();
        let mut bytes = Vec::new();
        if self.shown.area != area {
            bytes.extend(CLEAR);
            self.shown = Buffer::empty(area);
        }
        let mut next = Buffer::empty(area);
        draw(area, &mut next);
        let changes = self.shown.diff(&next);
        if !changes.is_empty() {
            CrosstermBackend::new(&mut bytes).draw(changes.into_iter())?;
        }
        self.shown = next;
        write(&self.out, &bytes)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        turn_off();
    }
}

/// Makes the terminal what it was, if it is on.
pub(crate) fn turn_off() {
    let Some(before) = locked(&BEFORE).take() else { return };
    let mut ttou = SigSet::empty();
    ttou.add(Signal::SIGTTOU);
    // From behind, either would stop us.
    let mask = ttou.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    // A terminal that has hung up needs nothing any more.
    if let Ok(out) = stdout().as_fd().try_clone_to_owned() {
        let _ = write(&File::from(out), OFF);
    }
    if in_front() {
        let _ = tcsetattr(stdin(), SetArg::TCSANOW, &before);
    }
    if let Ok(mask) = mask {
        let _ = mask.thread_set_mask();
    }
}

/// Whether the terminal is our group's to change; one that controls no session is anybody's.
fn in_front() -> bool {
    tcgetpgrp(stdin()).map_or(true, |group| group == getpgrp())
}

/// All of it, also where another program has made the terminal one that does not wait.
fn write(mut to: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait(to, PollFlags::OUT)?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn wait(on: &File, what: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(on, what)], None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// How long who reads from behind waits before it tries again.
const BEHIND: Duration = Duration::from_millis(100);

/// What is typed, until the terminal is gone. Read by a thread of its own, since who waits for a terminal may do
/// nothing else, and a terminal that does not wait would not wait for the shell above either.
pub(crate) fn typed() -> io::Result<mpsc::UnboundedReceiver<Vec<u8>>> {
    let (tell, typed) = mpsc::unbounded_channel();
    let mut from = File::from(stdin().as_fd().try_clone_to_owned()?);
    let read = move || {
        // From behind, reading is an error for this thread then, and does not stop us all.
        let mut ttin = SigSet::empty();
        ttin.add(Signal::SIGTTIN);
        let _ = ttin.thread_block();
        let mut chunk = [0; 1024];
        loop {
            match from.read(&mut chunk) {
                Ok(length @ 1..) if tell.send(chunk[..length].to_vec()).is_ok() => {}
                Ok(_) => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if wait(&from, PollFlags::IN).is_err() {
                        return;
                    }
                }
                Err(e) if e.raw_os_error() == Some(Errno::EIO as i32) && !in_front() => {
                    thread::sleep(BEHIND);
                }
                Err(_) => return,
            }
        }
    };
    thread::Builder::new().name("stdin".into()).spawn(read)?;
    Ok(typed)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use nix::pty::openpty;

    use super::*;

    /// The test starts itself on a terminal, with this in the environment.
    const INSIDE: &str = "LEASEHOLD_TEST_ON_A_TERMINAL";

    #[test]
    fn a_panic_is_read_on_a_terminal_that_is_as_before() {
        if std::env::var_os(INSIDE).is_some() {
            let mut screen = Screen::open(Colours(false)).unwrap();
            screen.turn_on().unwrap();
            screen.draw(|_, _| panic!("as asked")).unwrap();
        }
        let pty = openpty(None, None).unwrap();
        let before = tcgetattr(&pty.master).unwrap();
        let stream = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "top::screen::tests::a_panic_is_read_on_a_terminal_that_is_as_before";
        command.args(["--exact", name, "--nocapture"]).env(INSIDE, "1").env("RUST_BACKTRACE", "0");
        let status = command.stdin(stream()).stdout(stream()).stderr(stream()).status().unwrap();
        assert!(!status.success());
        drop((command, pty.slave));
        let (mut said, mut master) = (Vec::new(), File::from(pty.master));
        assert_eq!(tcgetattr(&master).unwrap(), before);
        // It ends with an error: nobody has the other end any more.
        let _ = master.read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        let at = |text: &str| said.find(text).unwrap_or_else(|| panic!("no {text:?} in {said:?}"));
        let [on, off] = [ON, OFF].map(|bytes| at(std::str::from_utf8(bytes).unwrap()));
        assert!(on < off && off < at("as asked"), "{said:?}");
    }
}
