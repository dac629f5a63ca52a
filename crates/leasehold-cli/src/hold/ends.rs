//! What ends a hold.
//!
//! Whose it is decides what is listened to. Without `--pid` it is the caller's that talks to us: stdin and
//! stdout are its life. With `--pid` it is that process's: nobody has to read our stdout, and stdin's end
//! means nothing any more once `stay` was written there. Until then it does, so that a caller which dies
//! before it has handed the lock on leaves nothing held.
//!
//! With `--caller` the end of that process ends the hold as well as the end of the pipes. The kernel may have no
//! pidfd, or a sandbox may refuse it: then the pipes alone decide, as without the option.

use std::fs::File;
use std::io::{self, BufRead, stdin};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::thread;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::args::HoldArgs;
use crate::door::{Asker, Door};
use crate::exit::{Failure, SYSTEM};
use crate::process::{Process, watch_caller};
use crate::reader;
use crate::signals::Signals;

/// Written to stdin by a caller that hands the hold on to the process of `--pid`.
pub(crate) const STAY: &str = "stay";

#[derive(Debug)]
pub(super) enum End {
    /// The caller wants it so.
    Asked,
    /// Whoever it was held for is gone.
    Gone,
    /// `leasehold release` asks for it, and waits for the answer.
    Knocked(Asker),
    Signal(i32),
}

impl End {
    /// The signal that we are to end by, if any.
    pub(super) fn signal(&self) -> Option<i32> {
        if let Self::Signal(number) = self { Some(*number) } else { None }
    }
}

enum News {
    End(End),
    Stay,
}

/// Tells when the hold is to end.
pub(super) struct Ends {
    news: UnboundedReceiver<News>,
    tell: UnboundedSender<News>,
    signals: Signals,
    /// Nobody talks to us any more.
    pub(super) stays: bool,
}

impl Ends {
    pub(super) fn new(args: &HoldArgs) -> Result<Self, Failure> {
        let refused = |e| Failure::system("cannot catch signals", e);
        let signals = Signals::while_waiting().map_err(refused)?;
        let (tell, news) = unbounded_channel();
        let cannot = |e| Failure::system("cannot watch stdin and stdout", e);
        listen(tell.clone(), args.pid.is_some()).map_err(cannot)?;
        let (says, gone) = (tell.clone(), || News::End(End::Gone));
        if let Some(pid) = args.caller {
            let says = tell.clone();
            match watch_caller(pid, move || _ = says.send(gone())) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    return Err(is_gone("--caller", pid));
                }
                _ => {}
            }
        }
        match args.pid {
            None => reader::watch(move || _ = says.send(gone())).map_err(cannot)?,
            Some(pid) => {
                let watched = Process::with_pid(pid)?.watch(move || _ = says.send(gone()));
                watched.map_err(|e| match e.kind() {
                    io::ErrorKind::NotFound => is_gone("--pid", pid),
                    _ => Failure::system("cannot watch the process given by --pid", e),
                })?;
            }
        }
        Ok(Self { news, tell, signals, stays: false })
    }

    /// From now on `leasehold release` is listened to, if it can be.
    pub(super) fn listen_at(&self, door: Door) {
        let tell = self.tell.clone();
        // It is a shortcut: without it the claim is taken out of the store.
        let _ = door.open(move |asker| _ = tell.send(News::End(End::Knocked(asker))));
    }

    /// Cancel safe.
    pub(super) async fn next(&mut self) -> End {
        loop {
            tokio::select! {
                Some(news) = self.news.recv() => match news {
                    News::End(end) => return end,
                    News::Stay => self.stays = true,
                },
                number = self.signals.next() => return End::Signal(number),
            }
        }
    }

    pub(super) async fn gone(&mut self) {
        while matches!(self.next().await, End::Asked) {}
    }
}

/// The process of this option exited before the lock was requested.
fn is_gone(option: &str, pid: i32) -> Failure {
    Failure::new(SYSTEM, format!("{option} {pid}: the process is gone; the lock was not taken"))
}

/// Reads what the caller says, where it is ours to read.
fn listen(tell: UnboundedSender<News>, may_stay: bool) -> io::Result<()> {
    let kind = File::from(stdin().as_fd().try_clone_to_owned()?).metadata()?.file_type();
    if !kind.is_fifo() && !kind.is_socket() {
        return Ok(());
    }
    let read = move || {
        for line in stdin().lock().split(b'\n').map_while(Result::ok) {
            match line.trim_ascii() {
                b"release" => break,
                word if may_stay && word == STAY.as_bytes() => {
                    let _ = tell.send(News::Stay);
                    return;
                }
                // A caller that speaks of other things is not asking for the end.
                _ => {}
            }
        }
        let _ = tell.send(News::End(End::Asked));
    };
    thread::Builder::new().name("stdin".into()).spawn(read).map(drop)
}
