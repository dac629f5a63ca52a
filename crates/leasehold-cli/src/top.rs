//! `leasehold top`: a live view of locks and queues on a terminal.
//!
//! The [state](state) contains the data and the effect of each key. The [view](view) draws it.
//! Neither has side effects. This module connects them with the store, the [terminal](screen) and
//! the signals. A request that is not answered does not block the keys, and the last data stays on
//! the screen.
//!
//! There is at most one poll at a time. The next poll starts a while after the last answer. No poll
//! starts while the process is stopped or in the background.

mod colours;
mod fitted;
mod keys;
mod screen;
mod state;
mod view;

use std::io::{IsTerminal, stdin, stdout};
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use leasehold::store::{Evict, LockInfo};
use leasehold::{Client, ErrorKind};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep_until};

use self::colours::Colours;
use self::keys::{Decoder, Key};
use self::screen::Screen;
use self::state::{Action, State, Victim};
use crate::args::TopArgs;
use crate::block_on::block_on;
use crate::exit::{Failure, USAGE};
use crate::signals::{self, Signals};
use crate::slots;
use crate::take::with_store;
use crate::terminal::stop_our_group;

/// Pause after a poll that failed.
const AGAIN: Duration = Duration::from_secs(1);
/// Maximum interval between updates of the shown age of the data.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which a background process checks whether it is in the foreground.
const BEHIND: Duration = Duration::from_millis(100);
/// Time after an ESC byte during which more bytes may belong to the same key.
const DOUBT: Duration = Duration::from_millis(50);

pub(crate) fn main(args: &TopArgs) -> ExitCode {
    if !stdin().is_terminal() || !stdout().is_terminal() {
        let what = "top needs a terminal on stdin and stdout";
        let hint = "for programs: leasehold ls --json, or leasehold events --json";
        return Failure::new(USAGE, what).hint(hint).report();
    }
    let ended = block_on(with_store(&args.store, async |locks| {
        let caught = |e| Failure::system("cannot catch signals", e);
        let mut signals = Signals::while_waiting().map_err(caught)?;
        // The other signals would end this process too, and leave the terminal in full-screen mode.
        signals.all().map_err(caught)?;
        let ended = Top::new(args, locks)?.run(&mut signals).await;
        signals.let_go();
        ended
    }));
    match ended {
        Ok(Ended::Quit) => ExitCode::SUCCESS,
        Ok(Ended::By(number)) => ExitCode::from(signals::die_of(number)),
        Err(failure) => failure.report(),
    }
}

/// The reason why the program ends.
enum Ended {
    Quit,
    /// The signal with this number.
    By(i32),
}

impl Ended {
    /// The terminal is gone. A SIGHUP for it would have arrived a moment later.
    const HUNG_UP: Self = Self::By(Signal::SIGHUP as i32);
}

/// A request in progress.
type InFlight<'a, T> = Option<Pin<Box<dyn Future<Output = leasehold::Result<T>> + 'a>>>;

/// Waits for the reply to the request, or forever if there is no request.
///
/// Cancel safe: dropping the future changes nothing.
async fn answer<T>(request: &mut InFlight<'_, T>) -> leasehold::Result<T> {
    let answer = match request {
        Some(request) => request.await,
        None => std::future::pending().await,
    };
    *request = None;
    answer
}

struct Top<'a> {
    locks: &'a Client,
    args: &'a TopArgs,
    colours: Colours,
    screen: Screen,
    state: State,
    decoder: Decoder,
    /// Until this moment, an ESC byte may be the beginning of a longer key sequence.
    doubt: Option<Instant>,
    answered: Option<Instant>,
    next_look: Instant,
    listing: InFlight<'a, Vec<LockInfo>>,
    evicting: InFlight<'a, usize>,
}

impl<'a> Top<'a> {
    fn new(args: &'a TopArgs, locks: &'a Client) -> Result<Self, Failure> {
        let colours = Colours::of(|name| std::env::var(name).ok());
        let screen = Screen::open(colours);
        Ok(Self {
            locks,
            args,
            colours,
            screen: screen.map_err(|e| Failure::system("cannot use the terminal", e))?,
            state: State::new(locks.url(), &args.prefix, args.every),
            decoder: Decoder::default(),
            doubt: None,
            answered: None,
            next_look: Instant::now(),
            listing: None,
            evicting: None,
        })
    }

    async fn run(mut self, signals: &mut Signals) -> Result<Ended, Failure> {
        let mut typed =
            screen::typed().map_err(|e| Failure::system("cannot read the terminal", e))?;
        loop {
            if self.show().is_err() {
                return Ok(Ended::HUNG_UP);
            }
            self.look();
            let until = self.until();
            let ended = tokio::select! {
                bytes = typed.recv() => match bytes {
                    Some(bytes) => self.read(&bytes),
                    None => Some(Ended::HUNG_UP),
                },
                number = signals.next() => self.obey(number),
                found = answer(&mut self.listing) => { self.see(found)?; None }
                ended = answer(&mut self.evicting) => { self.evicted(ended); None }
                () = sleep_until(until) => self.settle(),
            };
            if let Some(ended) = ended {
                return Ok(ended);
            }
        }
    }

    fn age(&self) -> Option<Duration> {
        self.answered.map(|answered| answered.elapsed())
    }

    /// Draws the current state if this process is in the foreground.
    fn show(&mut self) -> std::io::Result<()> {
        if !self.screen.is_on() {
            self.screen.turn_on()?;
        }
        if !self.screen.is_on() {
            return Ok(());
        }
        let (state, age, colours) = (&self.state, self.age(), self.colours);
        self.screen.draw(|area, buffer| view::draw(state, age, colours, area, buffer))
    }

    /// Polls the store if a poll is due.
    fn look(&mut self) {
        if self.listing.is_none() && self.screen.is_on() && self.next_look <= Instant::now() {
            self.listing = Some(Box::pin(self.locks.list(&self.args.prefix)));
        }
    }

    /// Returns the moment at which the next action is due if no event arrives earlier.
    fn until(&self) -> Instant {
        let now = Instant::now();
        let tick = now + if self.screen.is_on() { TICK } else { BEHIND };
        let look = match self.listing.is_none() && self.screen.is_on() {
            true => self.next_look.max(now),
            false => tick,
        };
        tick.min(look).min(self.doubt.unwrap_or(tick))
    }

    fn read(&mut self, bytes: &[u8]) -> Option<Ended> {
        let keys = self.decoder.feed(bytes);
        self.doubt = self.decoder.is_in_doubt().then(|| Instant::now() + DOUBT);
        keys.into_iter().find_map(|key| self.press(key))
    }

    fn settle(&mut self) -> Option<Ended> {
        if self.doubt.is_some_and(|until| until <= Instant::now()) {
            self.doubt = None;
            let key = self.decoder.settle()?;
            return self.press(key);
        }
        None
    }

    fn press(&mut self, key: Key) -> Option<Ended> {
        let page = view::page(&self.state, self.age(), self.screen.area());
        match self.state.press(key, page) {
            Action::None => {}
            Action::Quit => return Some(Ended::Quit),
            Action::Suspend => self.suspend(),
            Action::Redraw => return self.redraw(),
            Action::Evict(Victim { name, token }) => {
                let locks = self.locks;
                let evict = async move { locks.evict(name, Evict::Token(token)).await };
                self.evicting = Some(Box::pin(evict));
            }
        }
        None
    }

    fn obey(&mut self, number: i32) -> Option<Ended> {
        match Signal::try_from(number) {
            // The next frame is drawn with the current size in any case.
            Ok(Signal::SIGWINCH) => None,
            Ok(Signal::SIGTSTP) => {
                self.suspend();
                None
            }
            // Another program may have changed the terminal in the meantime.
            Ok(Signal::SIGCONT) => self.redraw(),
            _ => Some(Ended::By(number)),
        }
    }

    fn suspend(&mut self) {
        screen::turn_off();
        stop_our_group();
        self.next_look = Instant::now();
    }

    fn redraw(&mut self) -> Option<Ended> {
        self.screen.turn_on().err().map(|_| Ended::HUNG_UP)
    }

    fn see(&mut self, found: leasehold::Result<Vec<LockInfo>>) -> Result<(), Failure> {
        let now = Instant::now();
        match found {
            Ok(locks) => {
                self.state.see(slots::hidden(locks));
                (self.answered, self.next_look) = (Some(now), now + self.args.every);
            }
            Err(error) if error.is_retryable() => {
                self.state.miss(&error.reason());
                self.next_look = now + AGAIN;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn evicted(&mut self, ended: leasehold::Result<usize>) {
        self.state.evicted(ended.map_err(|error| match error.kind() {
            ErrorKind::Unreachable => {
                format!("it may or may not have been evicted: {}", error.reason())
            }
            _ => format!("not evicted: {}", error.reason()),
        }));
        // A poll that started before the eviction does not show its result.
        (self.listing, self.next_look) = (None, Instant::now());
    }
}
