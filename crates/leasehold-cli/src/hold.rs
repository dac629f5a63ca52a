//! `leasehold hold`: a lock for a program in any language.
//!
//! It acquires the lock, prints each change of its state as one line on stdout, and holds the lock
//! as long as its caller needs it. So another program can hold a lock by starting this one. A shell
//! does so with `exec {L}< <(leasehold hold NAME < /dev/null)`, or with
//! [`acquire`](crate::acquire).
//!
//! # The lock never stays held after a crash
//! It releases the lock and exits when
//! - stdin contains `release`, or ends;
//! - stdout is closed, because the caller and its pipes are gone for any reason;
//! - the process of `--caller` ends;
//! - a signal ends it.
//!
//! **With `--caller`, a fork of a killed caller does not keep the lock.** The fork has inherited
//! both pipes, so they stay open while it lives. But the kernel reports the end of the caller
//! itself through a pidfd.
//!
//! With `--pid`, the end of that process ends the hold, and a closed stdout does not. The end of
//! stdin has no effect after `stay` was written there. `leasehold release NAME --token T` also ends
//! the hold, through [a control socket](crate::control_socket), and receives the answer whether the
//! lock was held all the time. To give this answer, a hold that lost its lock after `stay` keeps
//! running.
//!
//! If *this process* dies, the caller reads the end of this process's stdout, which means that the
//! lock is not certain any longer. If the lock is lost, the last line says that, and the exit code
//! is 74.
//!
//! stdin is read only if it is a pipe or a socket. A terminal belongs to the shell, and so does a
//! file.
//!
//! The caller sends nothing while it works. So a caller that is paused or hangs keeps holding the
//! lock. `--max-hold` limits that.

mod end_events;
mod lines;
mod polls;

use std::io::{Write, stdout};
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::{LockInfo, Place};
use leasehold::{Client, Hold, State};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use crate::args::HoldArgs;
use crate::block_on::block_on;
use crate::control_socket::ControlSocket;
use crate::events::{note, timed};
use crate::exit::{self, Failure};
use crate::inherited;
use crate::priority;
use crate::process::Process;
use crate::progress::{self, Ahead};
use crate::signals;
use crate::take::{CLOSE_TIMEOUT, Taking, connect_to_take};

pub(crate) use end_events::STAY;
use end_events::{EndEvent, EndEvents};
use lines::{Caller, Certain, HoldLine};
use polls::Polls;

/// Time limit for polling the holders. After it, the wait is reported without them.
const ASK: Duration = Duration::from_secs(1);

pub(crate) fn main(args: &HoldArgs) -> ExitCode {
    // Sets the name that `ps` shows, because `acquire` starts this program as /proc/self/exe. An
    // error has no consequences.
    let _ = nix::sys::prctl::set_name(c"leasehold");
    priority::raise();
    match block_on(hold(args)) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(number)) => ExitCode::from(signals::die_of(number)),
        // The failure was printed on stdout, unless stdout is closed.
        Err(failure) if args.json && !inherited::stdout_closed() => ExitCode::from(failure.code),
        Err(failure) => failure.report(),
    }
}

/// Prints a usage error on stdout too, for a caller that reads JSON. The exit code alone may not
/// reach a caller whose children are reaped by another process.
pub(crate) fn report_usage(error: &clap::Error) {
    let words: Vec<_> = std::env::args_os().skip(1).take_while(|word| word != "--").collect();
    let subcommand = words.iter().find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    let is_ours = subcommand.is_some_and(|word| word == "hold");
    if !is_ours || !error.use_stderr() || !words.iter().any(|word| word == "--json") {
        return;
    }
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let message = first.strip_prefix("error: ").unwrap_or(first);
    let failed = HoldLine::Failed { code: exit::USAGE, message, hint: None };
    let _ = writeln!(stdout(), "{}", timed(&failed));
}

/// Acquires and holds the lock. Returns the signal by which this process must end, if any.
async fn hold(args: &HoldArgs) -> Result<Option<i32>, Failure> {
    if inherited::stdout_closed() {
        return Err(Failure::system(
            "cannot report the lock, so it was not taken",
            "stdout is closed",
        ));
    }
    let (caller, writer) = Caller::new(args.json);
    let mut ends = EndEvents::new(args);
    let done = match &mut ends {
        Ok(ends) => hold_for(args, &caller, ends).await,
        Err(failure) => Err(failed(&caller, failure.clone())),
    };
    drop(caller);
    // Waits until everything is written, or the caller is gone.
    let written = tokio::task::spawn_blocking(|| writer.join());
    match ends {
        Ok(mut ends) => tokio::select! {
            _ = written => {}
            () = ends.gone() => {}
        },
        Err(_) => drop(written.await),
    }
    done
}

async fn hold_for(
    args: &HoldArgs,
    caller: &Caller,
    ends: &mut EndEvents,
) -> Result<Option<i32>, Failure> {
    let started = Instant::now();
    let locks = tokio::select! {
        locks = connect_to_take(&args.take, started) => {
            locks.map_err(|failure| failed(caller, failure))?
        }
        end = ends.next() => return Ok(end.signal()),
    };
    let guard = tokio::select! {
        guard = wait(&locks, args, started, caller) => guard,
        end = ends.next() => {
            let _ = timeout(CLOSE_TIMEOUT, locks.close()).await;
            return Ok(end.signal());
        }
    };
    let done = match guard {
        Ok(guard) => {
            if args.pid.is_some() {
                let token = guard.grant().get();
                ends.listen_at(ControlSocket::new(locks.identity(), &args.name, token));
            }
            hold_until(guard, caller, ends).await
        }
        Err(failure) => Err(failed(caller, failure)),
    };
    let _ = timeout(CLOSE_TIMEOUT, locks.close()).await;
    done
}

/// Reports that the lock was not acquired, and returns the failure.
fn failed(caller: &Caller, failure: Failure) -> Failure {
    let Failure { code, message, hint, .. } = &failure;
    caller.report(&HoldLine::Failed { code: *code, message, hint: hint.as_deref() });
    failure
}

/// Acquires the lock and reports the wait.
async fn wait(
    locks: &Client,
    args: &HoldArgs,
    started: Instant,
    caller: &Caller,
) -> Result<Hold, Failure> {
    let (news, mut waiting) = unbounded_channel();
    let known = Ahead::default();
    let on_waiting = Arc::new(move |name: &str, place: Place| {
        if known.learn(name, place.ahead) {
            let _ = news.send(place);
        }
    });
    let whose = match args.pid.or(args.caller) {
        Some(pid) => Process::with_pid(pid).ok(),
        None => Process::parent(),
    };
    let label =
        whose.map_or_else(|| "hold".into(), |of| format!("for {} {}", of.program(), of.pid));
    let taking = Taking { locks, args: &args.take, started, label, on_waiting };
    let mut taking = pin!(taking.one(&args.name));
    let mut polls = Polls::new(&args.take);
    let tell = |polls: &Polls, place: Place, lock: Option<&LockInfo>| {
        let number = match lock {
            Some(lock) => progress::place(lock, place.ahead),
            None => polls.place(place.ahead),
        };
        caller.report(&HoldLine::waiting(&args.name, place.ahead, number, lock));
    };
    loop {
        let place = tokio::select! {
            guard = &mut taking => {
                // The grant and new positions may have arrived at the same time.
                while let Ok(place) = waiting.try_recv() {
                    tell(&polls, place, None);
                }
                return guard;
            }
            Some(place) = waiting.recv() => place,
        };
        if !polls.is_due(place) {
            tell(&polls, place, None);
            continue;
        }
        // The acquisition continues during the poll, so that a slow poll does not delay a grant.
        tokio::select! {
            guard = &mut taking => {
                tell(&polls, place, None);
                return guard;
            }
            polled = timeout(ASK, locks.holders(&args.name)) => {
                let lock = polled.ok().and_then(Result::ok).flatten();
                polls.polled(lock.as_ref());
                tell(&polls, place, lock.as_ref());
            }
        }
    }
}

/// Holds the lock until the hold must end, and releases it. Returns the signal that ended it, if
/// any.
async fn hold_until(
    guard: Hold,
    caller: &Caller,
    ends: &mut EndEvents,
) -> Result<Option<i32>, Failure> {
    let (done, end) = match stay(&guard, caller, ends).await {
        Some(end) => (give_back(guard, caller).await, end),
        None => {
            let failure = lost(&guard, caller);
            if !ends.stays {
                return Err(failure);
            }
            // The program that works under this lock will request its result later.
            (Err(failure), ends.next().await)
        }
    };
    let number = end.signal();
    if let EndEvent::ReleaseRequested(request) = end {
        request.answer(&done).await;
    }
    done.map(|()| number)
}

/// Holds the lock until the hold must end. Returns `None` if the lock was lost.
async fn stay(guard: &Hold, caller: &Caller, ends: &mut EndEvents) -> Option<EndEvent> {
    let name = guard.name().as_str();
    let mut watch = guard.watch();
    let certain = |watch: &leasehold::Watch| Certain::for_the_next(watch.remaining());
    caller.report(&HoldLine::Held {
        name,
        token: guard.grant().get(),
        sequencer: guard.sequencer().to_string(),
        certain: certain(&watch),
    });
    let mut at_risk = false;
    loop {
        match watch.state() {
            State::Lost(_) => return None,
            State::AtRisk(_) if !at_risk => {
                at_risk = true;
                caller.report(&HoldLine::AtRisk { name, certain: certain(&watch) });
            }
            State::Held if at_risk => {
                at_risk = false;
                caller.report(&HoldLine::Recovered { name, certain: certain(&watch) });
            }
            _ => {}
        }
        tokio::select! {
            _ = watch.changed() => {}
            end = ends.next() => return Some(end),
        }
    }
}

/// Reports that the lock was lost, and returns the failure.
fn lost(guard: &Hold, caller: &Caller) -> Failure {
    let name = guard.name().as_str();
    let state = guard.state();
    let reason = match &state {
        State::Lost(reason) => reason.as_str(),
        _ => "gone",
    };
    caller.report(&HoldLine::Lost { name, reason });
    Failure::new(exit::LOST, format!("lost {name:?}: {reason}"))
}

async fn give_back(guard: Hold, caller: &Caller) -> Result<(), Failure> {
    let (name, token) = (guard.name().as_str().to_owned(), guard.grant().get());
    let released = timeout(CLOSE_TIMEOUT, guard.release()).await;
    match released {
        Ok(Err(error)) if error.kind() == leasehold::ErrorKind::Lost => {
            let reason = error.lost_reason().map_or("gone", |reason| reason.as_str());
            caller.report(&HoldLine::Lost { name: &name, reason });
            Err(exit::released(error))
        }
        released => {
            use leasehold::Released::{Now, Shared};
            let answered = matches!(released, Ok(Ok(Now | Shared)));
            if let Ok(Err(error)) = released {
                note(&exit::not_released(&format!("{name:?}"), &error.reason()));
            }
            caller.report(&HoldLine::Released { name: &name, token, answered });
            Ok(())
        }
    }
}
