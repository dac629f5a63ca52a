//! Exit codes, for scripts that do not read messages.
//!
//! CMD's own code is passed on unchanged. So most of leasehold's codes are those of sysexits.h,
//! which programs rarely use, and the shells' 126, 127 and 128+n.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use leasehold::{Error, ErrorKind, Kind};
use nix::errno::Errno;

use crate::events::{self, Event};

/// Nothing was held, so nothing was released; or there is nothing to show.
pub(crate) const NOT_HELD: u8 = 1;
/// Some processes wait for each other.
pub(crate) const DEADLOCK: u8 = 1;
/// The doctor found a broken guarantee.
pub(crate) const BROKEN: u8 = 1;
/// Usage error, an invalid name, or options that cannot work.
pub(crate) const USAGE: u8 = 2;
/// The store cannot be reached, or cannot be used (EX_UNAVAILABLE).
pub(crate) const UNAVAILABLE: u8 = 69;
/// The operating system refused: out of processes or files (EX_OSERR).
pub(crate) const SYSTEM: u8 = 71;
/// The lock was lost while a command relied on it (EX_IOERR).
pub(crate) const LOST: u8 = 74;
/// The lock was not acquired (EX_TEMPFAIL).
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// CMD exists but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// CMD does not exist.
pub(crate) const NOT_FOUND: u8 = 127;

/// The reason why leasehold itself ends: an exit code, the cause for stderr, and the next step.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    /// The cause, in one line.
    pub(crate) message: String,
    /// The next step, as a command or an option.
    pub(crate) hint: Option<String>,
    /// Whether the failure is printed only with `-v`, or with `--json` as an event.
    pub(crate) silent: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None, silent: false }
    }

    /// Creates the failure for an error of the operating system. `what` is what failed.
    pub(crate) fn system(what: &str, error: impl std::fmt::Display) -> Self {
        Self::new(SYSTEM, format!("{what}: {error}"))
    }

    /// Adds the next step.
    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Replaces the option that the failure names by the one with which the user set the value.
    pub(crate) fn naming(self, option: &str, given: &str) -> Self {
        let message = self.message.replace(option, given);
        let hint = self.hint.map(|hint| hint.replace(option, given));
        Self { message, hint, ..self }
    }

    /// Prints the cause and the hint to stderr, and returns the code. Prints nothing if the failure
    /// is silent, unless `-v` was given.
    pub(crate) fn report(&self) -> ExitCode {
        // Not eprintln!, which panics when stderr is gone.
        use std::io::Write;
        if !self.silent || events::is_verbose() {
            let mut text = format!("leasehold: {}\n", self.message);
            text.extend(self.hint.iter().map(|hint| format!("hint: {hint}\n")));
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        ExitCode::from(self.code)
    }

    /// Returns the failure as an event.
    pub(crate) fn event(&self) -> Event {
        let Self { code, silent, .. } = *self;
        Event::Failed { code, message: self.message.clone(), hint: self.hint.clone(), silent }
    }
}

/// Returns whether the system is out of descriptors, processes or memory.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw);
    matches!(number, Some(Errno::EMFILE | Errno::ENFILE | Errno::EAGAIN | Errno::ENOMEM))
}

/// Returns whether a shortage caused this error. Some drivers keep only the text of the cause.
fn comes_of_shortage(error: &Error) -> bool {
    let mut under = std::error::Error::source(error);
    while let Some(source) = under {
        let io_shortage = source.downcast_ref::<io::Error>().is_some_and(is_shortage);
        let numbers = [Errno::EMFILE, Errno::ENFILE].map(|n| format!("(os error {})", n as i32));
        if io_shortage || numbers.iter().any(|number| source.to_string().contains(number)) {
            return true;
        }
        under = source.source();
    }
    false
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        use ErrorKind::{Config, Contended, InvalidName, Lost, Mismatch, Timeout, Unsupported};
        let code = match error.kind() {
            _ if comes_of_shortage(&error) => SYSTEM,
            Contended | Timeout | Lost => NOT_ACQUIRED,
            InvalidName | Config | Unsupported | Mismatch => USAGE,
            _ => UNAVAILABLE,
        };
        let mut message = in_options(&error.reason(), error.kind());
        if let Some(name) = error.name().map(ToString::to_string)
            && !message.contains(&name)
        {
            message.push_str(&format!(" (lock {name})"));
        }
        let store = error.store().filter(|store| !message.contains(store));
        let context = [Some(error.kind().as_str()), store];
        message.push_str(&format!(
            " [{}]",
            context.into_iter().flatten().collect::<Vec<_>>().join(", ")
        ));
        let hint =
            same_kind(&error).or_else(|| error.hint().map(|hint| in_options(hint, error.kind())));
        Self { hint, ..Self::new(code, message) }
    }
}

/// Returns the options that select the kind in use, for a request of another kind.
fn same_kind(error: &Error) -> Option<String> {
    let reason = error.reason();
    let (_, kind) = reason.rsplit_once("but is in use as a ")?;
    Some(match kind.strip_prefix("semaphore of ") {
        Some(capacity) => format!("add --max {capacity}, or use another name"),
        None if kind == Kind::RwLock.to_string() => {
            "add --exclusive (or --shared, to read), or use another name".to_owned()
        }
        None => "remove --shared, --exclusive and --max, or use another name".to_owned(),
    })
}

/// Replaces the names of the library's options by the command's.
fn in_options(text: &str, kind: ErrorKind) -> String {
    const OPTIONS: [(&str, &str); 4] = [
        ("max_hold", "--max-hold"),
        ("min_hold", "--min-hold"),
        ("lock_delay", "--lock-delay"),
        ("min_validity", "the remaining time"),
    ];
    if !matches!(kind, ErrorKind::Config | ErrorKind::Unsupported | ErrorKind::Lost) {
        return text.to_owned();
    }
    OPTIONS.iter().fold(text.to_owned(), |text, (name, option)| text.replace(name, option))
}

/// Returns why a release failed. If the lock was lost before, the code is [`LOST`], because a
/// command relied on it.
pub(crate) fn released(error: Error) -> Failure {
    let lost = error.kind() == ErrorKind::Lost;
    let failure = Failure::from(error);
    if lost { Failure { code: LOST, ..failure } } else { failure }
}

/// Returns the warning that the store has not confirmed a release.
pub(crate) fn not_released(names: &str, why: &str) -> String {
    format!("could not release {names}: {why}; the lock is freed when its lease expires")
}

/// Returns the code that a shell would report for the end of CMD.
pub(crate) fn of(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|n| 128 + n));
    code.and_then(|c| u8::try_from(c).ok()).unwrap_or(SYSTEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_has_its_exit_code() {
        let code = |kind| Failure::from(Error::new(kind, "x")).code;
        assert_eq!(code(ErrorKind::Contended), 75);
        assert_eq!(code(ErrorKind::Timeout), 75);
        assert_eq!(code(ErrorKind::Unreachable), 69);
        assert_eq!(code(ErrorKind::Denied), 69);
        assert_eq!(code(ErrorKind::InvalidName), 2);
        assert_eq!(code(ErrorKind::Mismatch), 2);
        // The code is the same whatever operation ran out of files.
        for kind in [ErrorKind::Config, ErrorKind::Unreachable] {
            let number = io::Error::from_raw_os_error(Errno::EMFILE as i32);
            let drivers = format!("cannot connect: {number}");
            assert_eq!(Failure::from(Error::new(kind, "x").with_source(number)).code, 71);
            assert_eq!(Failure::from(Error::new(kind, "x").with_source(drivers)).code, 71);
        }
    }

    #[test]
    fn command_status_maps_to_an_exit_code_like_in_sh() {
        assert_eq!(of(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(of(ExitStatus::from_raw(255 << 8)), 255);
        assert_eq!(of(ExitStatus::from_raw(9)), 137);
        assert_eq!(of(ExitStatus::from_raw(64)), 192);
    }
}
