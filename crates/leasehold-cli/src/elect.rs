//! `leasehold elect`: one of many machines runs CMD, for ever.
//!
//! A term is a [`run`](crate::run): it stands in the queue, runs CMD while it holds the lock, and releases. Then it
//! stands again, whatever ended the term: CMD itself, a lock that was lost, a store that is away. It ends when
//! it is told to (INT, QUIT, TERM), and where another term could only end as this one did: CMD is not there, or
//! what was asked for is refused.
//!
//! Between two terms it pauses, longer each time, so that a CMD which fails at once is no burden; who has led for
//! a while stands again after a second. Others lead meanwhile.

use std::cell::Cell;
use std::process::ExitCode;
use std::time::Duration;

use crate::args::ElectArgs;
use crate::end::End;
use crate::events::{Event, Events, Style};
use crate::exit::{self, Failure};
use crate::run::{run, told};
use crate::signals::Signals;
use crate::table::short;

/// The pauses between terms, at first and at most. After a term that was longer than the longest it is the first
/// again.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

pub(crate) fn main(args: ElectArgs) -> ExitCode {
    told(Style::of(args.json, args.verbose), async |events, signals| {
        elect(args, events, signals).await
    })
}

async fn elect(args: ElectArgs, events: &Events, signals: &mut Signals) -> Result<End, Failure> {
    let args = args.term();
    let [first, longest] = PAUSES;
    let mut pause = first;
    loop {
        let led_since = Cell::default();
        let term = run(&args, None, events, signals, &led_since).await;
        let is_over = match &term {
            Ok(End::Signal(_) | End::Interrupted) => true,
            _ if signals.told_to_end() => true,
            // What CMD itself exits with is its own, whatever the number.
            Ok(End::Code(_)) => false,
            Err(failure) => {
                [exit::USAGE, exit::NOT_FOUND, exit::NOT_EXECUTABLE].contains(&failure.code)
            }
        };
        if is_over {
            return term;
        }
        if led_since.get().is_some_and(|since| since.elapsed() > longest) {
            pause = first;
        }
        let why = match term {
            Ok(End::Code(code)) => format!("the command exited with {code}"),
            Ok(_) => "the term is over".to_owned(),
            Err(failure) => failure.message,
        };
        let message = format!("{why}; standing again in {}", short(pause));
        events.tell(&Event::Warning { message });
        if let Some(number) = rest(pause, signals).await {
            return Ok(End::Signal(number));
        }
        pause = (pause * 2).min(longest);
    }
}

/// The signal that ends the pause, and us, if one comes.
async fn rest(pause: Duration, signals: &mut Signals) -> Option<i32> {
    let mut over = std::pin::pin!(tokio::time::sleep(pause));
    loop {
        tokio::select! {
            () = &mut over => return None,
            number = signals.next() => if signals.told_to_end() {
                return Some(number);
            },
        }
    }
}
