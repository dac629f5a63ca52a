//! `leasehold elect`: keeps CMD running on one of many machines.
//!
//! A term is a [`run`](crate::run): the candidate waits in the queue, runs CMD while it holds the
//! lock, and releases. Then it rejoins the queue, whatever ended the term. CMD may have exited, the
//! lock may have been lost, or the store may be unreachable. The candidate ends on SIGINT, SIGQUIT
//! and SIGTERM. It also ends if another term would fail in the same way, because CMD does not exist
//! or the options are invalid.
//!
//! Between two terms it pauses, longer each time, so that a CMD that fails immediately causes
//! little load. After a long term the pause is one second. During the pause other candidates lead.

use std::process::ExitCode;
use std::time::Duration;

use crate::args::ElectArgs;
use crate::command_end::CommandEnd;
use crate::events::{Event, Events, Style};
use crate::exit::{self, Failure};
use crate::run::{Term, report_outcome, run, settle};
use crate::signals::Signals;
use crate::table::short;

/// The first and the longest pause between terms. After a term that was longer than the longest
/// pause, or ended by `--max-hold`, the next pause is the first one again.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

pub(crate) fn main(args: ElectArgs) -> ExitCode {
    report_outcome(Style::of(args.json, args.verbose), async |events, signals| {
        elect(args, events, signals).await
    })
}

async fn elect(
    args: ElectArgs,
    events: &Events,
    signals: &mut Signals,
) -> Result<CommandEnd, Failure> {
    let mut args = args.term();
    let max_hold = settle(&mut args);
    let [first, longest] = PAUSES;
    let mut pause = first;
    let term = Term::default();
    loop {
        term.held_since.set(None);
        let ended = run(&args, max_hold, events, signals, &term).await;
        let is_over = match &ended {
            Ok(CommandEnd::Signal(_) | CommandEnd::Interrupted) => true,
            _ if signals.told_to_end() => true,
            // The exit code of CMD has no meaning here.
            Ok(CommandEnd::Code(_)) => false,
            Err(failure) => match failure.code {
                // The options were valid in an earlier term or a moment ago, so the store or a
                // proxy is being changed.
                exit::USAGE => !term.was_accepted.get(),
                code => [exit::NOT_FOUND, exit::NOT_EXECUTABLE].contains(&code),
            },
        };
        if is_over {
            return ended;
        }
        // A term that `--max-hold` ended is somewhat shorter.
        let long = max_hold.map_or(longest, |most| longest.min(most / 2));
        if term.held_since.get().is_some_and(|since| since.elapsed() > long) {
            pause = first;
        }
        let why = match ended {
            Ok(CommandEnd::Code(code)) => format!("the command exited with {code}"),
            Ok(_) => "the term ended".to_owned(),
            Err(failure) => failure.message,
        };
        let message = format!("{why}; rejoining the queue in {}", short(pause));
        events.print(&Event::Warning { message });
        if let Some(number) = rest(pause, signals).await {
            return Ok(CommandEnd::Signal(number));
        }
        pause = (pause * 2).min(longest);
    }
}

/// Pauses. Returns the signal that ends the candidacy, if one arrives.
async fn rest(pause: Duration, signals: &mut Signals) -> Option<i32> {
    let mut over = std::pin::pin!(tokio::time::sleep(pause));
    loop {
        tokio::select! {
            () = &mut over => return None,
            number = signals.next_while_idle() => if signals.told_to_end() {
                return Some(number);
            },
        }
    }
}
