//! `leasehold hold`: a lock for a program in any language.
//!
//! It takes the lock, says on stdout what becomes of it, one line for each thing, and holds it for as long as
//! somebody is there who wants it held. So another program has a lock by starting this one, and a shell
//! by `exec {L}< <(leasehold hold NAME < /dev/null)`, or by [`acquire`](crate::acquire).
//!
//! # Nobody's death leaves it held
//! It gives the lock back and ends when
//! - stdin says `release`, or ends;
//! - nobody reads stdout any more: whoever started us is gone, however that came, and its pipes with it;
//! - the process of `--caller` ends;
//! - a signal ends it.
//!
//! **A fork of the caller does not keep the lock.** A fork inherits both pipes, so a caller that is killed leaves them
//! open for as long as a fork lives. The kernel reports the end of the caller itself through a pidfd.
//!
//! With `--pid` the process of that number takes the reader's place, stdin's end means nothing any more once `stay` was
//! written there, and `leasehold release NAME --token T` ends it too, through [a door](crate::door), and learns
//! whether the lock was held all the time: so one whose lock is lost while nobody reads stays to say so.
//!
//! If *we* die, the caller reads the end of our stdout, which says that the lock is not certain any more. If
//! the lock is lost, that is the last line, and we end with 74.
//!
//! stdin is read where it is a pipe or a socket. A terminal is the shell's to read, and so is a file.
//!
//! We are told of nothing by the caller while it works, so a caller that is stopped or hangs goes on holding:
//! `--max-hold` bounds that.

mod ends;
mod polls;
mod told;

use std::io::{Write, stdout};
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::{LockInfo, Place};
use leasehold::{Guard, Leasehold, State};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use crate::args::HoldArgs;
use crate::door::Door;
use crate::drive::drive;
use crate::events::timed;
use crate::exit::{self, Failure};
use crate::inherited;
use crate::priority;
use crate::process::Process;
use crate::progress::{self, Ahead};
use crate::signals;
use crate::take::{CLOSE_TIMEOUT, Taking, connect_to_take};

pub(crate) use ends::STAY;
use ends::{End, Ends};
use polls::Polls;
use told::{Caller, Certain, Told};

/// How long the store has to say who holds, before we say that we wait without it.
const ASK: Duration = Duration::from_secs(1);

pub(crate) fn main(args: &HoldArgs) -> ExitCode {
    // For `ps`, where `acquire` started us as /proc/self/exe. A cosmetic matter, whatever comes of it.
    let _ = nix::sys::prctl::set_name(c"leasehold");
    priority::raise();
    match drive(hold(args)) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(number)) => ExitCode::from(signals::die_of(number)),
        Err(failure) if args.json => ExitCode::from(failure.code),
        Err(failure) => failure.report(),
    }
}

/// Prints a usage error as the last line too, for a caller that reads JSON. The exit status alone does not reach
/// a caller whose children are reaped by others.
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
    let failed = Told::Failed { code: exit::USAGE, message, hint: None };
    let _ = writeln!(stdout(), "{}", timed(&failed));
}

/// The signal that we are to end by, if any.
async fn hold(args: &HoldArgs) -> Result<Option<i32>, Failure> {
    if inherited::stdout_closed() {
        return Err(Failure::system(
            "cannot report the lock, so it was not taken",
            "stdout is closed",
        ));
    }
    let (caller, writer) = Caller::new(args.json);
    let mut ends = Ends::new(args);
    let done = match &mut ends {
        Ok(ends) => hold_for(args, &caller, ends).await,
        Err(failure) => Err(failure.clone()),
    };
    if let Err(Failure { code, message, hint, .. }) = &done
        && *code != exit::LOST
    {
        caller.tell(&Told::Failed { code: *code, message, hint: hint.as_deref() });
    }
    drop(caller);
    // All is written, or nobody reads it.
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
    ends: &mut Ends,
) -> Result<Option<i32>, Failure> {
    let started = Instant::now();
    let locks = tokio::select! {
        locks = connect_to_take(&args.take, started) => locks?,
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
                ends.listen_at(Door::new(locks.identity(), &args.name, guard.token().get()));
            }
            hold_until(guard, caller, ends).await
        }
        Err(failure) => Err(failure),
    };
    let _ = timeout(CLOSE_TIMEOUT, locks.close()).await;
    done
}

/// Waits our turn, and says so.
async fn wait(
    locks: &Leasehold,
    args: &HoldArgs,
    started: Instant,
    caller: &Caller,
) -> Result<Guard, Failure> {
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
        caller.tell(&Told::waiting(&args.name, place.ahead, number, lock));
    };
    loop {
        let place = tokio::select! {
            guard = &mut taking => {
                // Both may have come at once.
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
        // Who holds is the store's to say, and no reason to be late where we have it.
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

/// Holds until that is to end, and gives back. The signal that ended it, if any.
async fn hold_until(
    guard: Guard,
    caller: &Caller,
    ends: &mut Ends,
) -> Result<Option<i32>, Failure> {
    let (done, end) = match stay(&guard, caller, ends).await {
        Some(end) => (give_back(guard, caller).await, end),
        None => {
            let failure = lost(&guard, caller);
            if !ends.stays {
                return Err(failure);
            }
            // Whoever works under it asks later how that went.
            (Err(failure), ends.next().await)
        }
    };
    let number = end.signal();
    if let End::Knocked(asker) = end {
        asker.answer(&done).await;
    }
    done.map(|()| number)
}

/// Holds until that is to end. `None`: it was lost.
async fn stay(guard: &Guard, caller: &Caller, ends: &mut Ends) -> Option<End> {
    let name = guard.name().as_str();
    let mut watch = guard.watch();
    let certain = |watch: &leasehold::Watch| Certain::for_the_next(watch.remaining());
    caller.tell(&Told::Held {
        name,
        token: guard.token().get(),
        sequencer: guard.sequencer().to_string(),
        certain: certain(&watch),
    });
    let mut at_risk = false;
    loop {
        match watch.state() {
            State::Lost(_) => return None,
            State::AtRisk(_) if !at_risk => {
                at_risk = true;
                caller.tell(&Told::AtRisk { name, certain: certain(&watch) });
            }
            State::Held if at_risk => {
                at_risk = false;
                caller.tell(&Told::Recovered { name, certain: certain(&watch) });
            }
            _ => {}
        }
        tokio::select! {
            _ = watch.changed() => {}
            end = ends.next() => return Some(end),
        }
    }
}

/// Says that it was lost.
fn lost(guard: &Guard, caller: &Caller) -> Failure {
    let name = guard.name().as_str();
    let state = guard.state();
    let reason = match &state {
        State::Lost(reason) => reason.as_str(),
        _ => "gone",
    };
    caller.tell(&Told::Lost { name, reason });
    Failure::new(exit::LOST, format!("lost {name:?}: {reason}"))
}

async fn give_back(guard: Guard, caller: &Caller) -> Result<(), Failure> {
    let (name, token) = (guard.name().as_str().to_owned(), guard.token().get());
    let released = timeout(CLOSE_TIMEOUT, guard.release()).await;
    match released {
        Ok(Err(error)) if error.kind() == leasehold::ErrorKind::Lost => {
            let reason = error.lost_reason().map_or("gone", |reason| reason.as_str());
            caller.tell(&Told::Lost { name: &name, reason });
            Err(exit::released(error))
        }
        released => {
            use leasehold::Released::{Now, Shared};
            let answered = matches!(released, Ok(Ok(Now | Shared)));
            caller.tell(&Told::Released { name: &name, token, answered });
            Ok(())
        }
    }
}
