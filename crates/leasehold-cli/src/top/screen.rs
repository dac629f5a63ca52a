//! Controls the terminal in full-screen mode: raw input, the alternate screen, and restoring the
//! terminal at the end.
//!
//! **The terminal is restored on every exit, including a panic.** Its original settings are stored
//! in a static variable. The first caller that restores the terminal takes them from there.
//!
//! **The full-screen mode starts only in the foreground.** A background process that changes the
//! terminal would disturb the foreground process. When the mode is left in the background, the
//! settings are not restored, because they belong to another process by then.
//!
//! A frame is drawn into memory, and its differences from the previous frame are written at once.
//! The code never queries the terminal, because the answers would be mixed with the keys.

use std::fs::File;
use std::io::{self, Read, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::sync::{Mutex, Once};
use std::thread;
use std::time::Duration;

use leasehold::store::kit::locked;
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

/// Switches to the alternate screen, hides the cursor and clears the screen.
const ON: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[0m\x1b[2J";
/// Undoes [`ON`].
const OFF: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
/// Clears the screen.
const CLEAR: &[u8] = b"\x1b[0m\x1b[2J";

/// The original settings, while the full-screen mode is on.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal on stdin and stdout.
#[derive(Debug)]
pub(crate) struct Screen {
    out: File,
    /// What the terminal currently shows.
    shown: Buffer,
}

impl Screen {
    /// Prepares the terminal, without changing it yet.
    pub(crate) fn open(colours: Colours) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let others = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                turn_off();
                others(panic);
            }));
        });
        // Otherwise the backend writes sequences that reset colors even if colors are disabled.
        ratatui::crossterm::style::force_color_output(colours.0);
        let out = File::from(stdout().as_fd().try_clone_to_owned()?);
        Ok(Self { out, shown: Buffer::empty(Rect::ZERO) })
    }

    pub(crate) fn is_on(&self) -> bool {
        locked(&BEFORE).is_some()
    }

    /// Turns the full-screen mode on if this process is in the foreground. If the mode is already
    /// on, this repairs what other programs have changed.
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

    /// Returns the size of the terminal.
    pub(crate) fn area(&self) -> Rect {
        match rustix::termios::tcgetwinsize(&self.out) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                Rect::new(0, 0, size.ws_col, size.ws_row)
            }
            // The terminal does not report its size.
            _ => Rect::new(0, 0, 80, 24),
        }
    }

    /// Draws a frame and writes the changes.
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

/// Restores the terminal if the full-screen mode is on.
pub(crate) fn turn_off() {
    let Some(before) = locked(&BEFORE).take() else { return };
    let mut ttou = SigSet::empty();
    ttou.add(Signal::SIGTTOU);
    // In the background, both the write and the new settings would stop this process.
    let mask = ttou.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    // Errors are ignored, because a terminal that has hung up needs nothing.
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

/// Returns whether this process group may change the terminal. A terminal that is not the
/// controlling terminal of a session may be changed by any process.
fn in_front() -> bool {
    tcgetpgrp(stdin()).map_or(true, |group| group == getpgrp())
}

/// Writes all bytes, even if another program has made the terminal non-blocking.
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

/// Pause before a read that failed in the background is repeated.
const BEHIND: Duration = Duration::from_millis(100);

/// Returns a channel of typed bytes, which ends when the terminal is gone. A separate thread reads,
/// because the reads block. The terminal must stay in blocking mode, because the mode also applies
/// to the parent shell.
pub(crate) fn typed() -> io::Result<mpsc::UnboundedReceiver<Vec<u8>>> {
    let (tell, typed) = mpsc::unbounded_channel();
    let mut from = File::from(stdin().as_fd().try_clone_to_owned()?);
    let read = move || {
        // With SIGTTIN blocked, a read in the background fails in this thread. Otherwise it would
        // stop the whole process.
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

    /// The environment variable with which the test starts itself on a terminal.
    const INSIDE: &str = "LEASEHOLD_TEST_ON_A_TERMINAL";

    #[test]
    fn panic_restores_the_terminal_before_its_message() {
        if std::env::var_os(INSIDE).is_some() {
            let mut screen = Screen::open(Colours(false)).unwrap();
            screen.turn_on().unwrap();
            screen.draw(|_, _| panic!("as asked")).unwrap();
        }
        let pty = openpty(None, None).unwrap();
        let before = tcgetattr(&pty.master).unwrap();
        let stream = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "top::screen::tests::panic_restores_the_terminal_before_its_message";
        command.args(["--exact", name, "--nocapture"]).env(INSIDE, "1").env("RUST_BACKTRACE", "0");
        let status = command.stdin(stream()).stdout(stream()).stderr(stream()).status().unwrap();
        assert!(!status.success());
        drop((command, pty.slave));
        let (mut printed, mut master) = (Vec::new(), File::from(pty.master));
        assert_eq!(tcgetattr(&master).unwrap(), before);
        // The read ends with an error, because the other end is closed.
        let _ = master.read_to_end(&mut printed);
        let printed = String::from_utf8_lossy(&printed);
        let at =
            |text: &str| printed.find(text).unwrap_or_else(|| panic!("no {text:?} in {printed:?}"));
        let [on, off] = [ON, OFF].map(|bytes| at(std::str::from_utf8(bytes).unwrap()));
        assert!(on < off && off < at("as asked"), "{printed:?}");
    }
}
