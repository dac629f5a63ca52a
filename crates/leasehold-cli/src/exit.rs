//! Exit codes: what a script learns without reading our words.
//!
//! CMD's own code passes through untouched, so ours keep to the numbers of sysexits.h, where a
//! program rarely has its own, and to the shells' 126, 127 and 128+n.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use leasehold::{Error, ErrorKind};
use nix::errno::Errno;

use crate::events::Event;

/// Nothing was held, so nothing was released; or there is nothing to show.
pub(crate) const NOT_HELD: u8 = 1;
/// The doctor found a promise broken.
pub(crate) const BROKEN: u8 = 1;
/// Usage, an invalid name, or options that cannot work.
pub(crate) const USAGE: u8 = 2;
/// The store cannot be reached, or cannot be used (EX_UNAVAILABLE).
pub(crate) const UNAVAILABLE: u8 = 69;
/// The system refused: no more processes, no more files (EX_OSERR).
pub(crate) const SYSTEM: u8 = 71;
/// The lock was lost while it was relied on (EX_IOERR).
pub(crate) const LOST: u8 = 74;
/// The lock was not acquired (EX_TEMPFAIL).
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// CMD is there but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// CMD is not there.
pub(crate) const NOT_FOUND: u8 = 127;

/// Why leasehold itself ends: a code, and one line for stderr.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
    /// Told only to those who want to hear of everything.
    pub(crate) silent: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), silent: false }
    }

    /// The system refused something that this process needs.
    pub(crate) fn system(what: &str, error: impl std::fmt::Display) -> Self {
        Self::new(SYSTEM, format!("{what}: {error}"))
    }

    /// Says it in one line and gives the code.
    pub(crate) fn report(&self) -> ExitCode {
        // Not eprintln!, which panics when stderr is gone.
        use std::io::Write;
        if !self.silent {
            let _ = writeln!(std::io::stderr(), "leasehold: {}", self.message);
        }
        ExitCode::from(self.code)
    }

    /// The same as an event.
    pub(crate) fn event(&self) -> Event {
        let Self { code, silent, ref message } = *self;
        Event::Failed { code, message: message.clone(), silent }
    }
}

/// Whether the system has no more of something: descriptors, processes, memory.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw);
    matches!(number, Some(Errno::EMFILE | Errno::ENFILE | Errno::EAGAIN | Errno::ENOMEM))
}

/// The same of what lies under an error of the library's, perhaps only in the words of a driver's.
fn comes_of_shortage(error: &Error) -> bool {
    let mut under = std::error::Error::source(error);
    while let Some(source) = under {
        let told = source.downcast_ref::<io::Error>().is_some_and(is_shortage);
        let numbers = [Errno::EMFILE, Errno::ENFILE].map(|n| format!("(os error {})", n as i32));
        if told || numbers.iter().any(|number| source.to_string().contains(number)) {
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
        let error = match error.kind() {
            Mismatch => error.with_hint(
                "leasehold takes a mutex; with --shared or --exclusive, a read-write lock; with --of N, a \
                 semaphore of N",
            ),
            _ => error,
        };
        Self::new(code, error.report().to_string())
    }
}

/// Why a release failed: a lock that was lost before is [`LOST`] here, since it was relied on.
pub(crate) fn released(error: Error) -> Failure {
    let lost = error.kind() == ErrorKind::Lost;
    let failure = Failure::from(error);
    if lost { Failure { code: LOST, ..failure } } else { failure }
}

/// The code that a shell would give for CMD's end.
pub(crate) fn of(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|n| 128 + n));
    code.and_then(|c| u8::try_from(c).ok()).unwrap_or(SYSTEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_has_its_code() {
        let code = |kind| Failure::from(Error::new(kind, "x")).code;
        assert_eq!(code(ErrorKind::Contended), 75);
        assert_eq!(code(ErrorKind::Timeout), 75);
        assert_eq!(code(ErrorKind::Unreachable), 69);
        assert_eq!(code(ErrorKind::Denied), 69);
        assert_eq!(code(ErrorKind::InvalidName), 2);
        assert_eq!(code(ErrorKind::Mismatch), 2);
        // Whatever was being done when there were no more files.
        for kind in [ErrorKind::Config, ErrorKind::Unreachable] {
            let number = io::Error::from_raw_os_error(Errno::EMFILE as i32);
            let drivers = format!("cannot connect: {number}");
            assert_eq!(Failure::from(Error::new(kind, "x").because(number)).code, 71);
            assert_eq!(Failure::from(Error::new(kind, "x").because(drivers)).code, 71);
        }
    }

    #[test]
    fn the_commands_end_is_told_as_a_shell_tells_it() {
        assert_eq!(of(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(of(ExitStatus::from_raw(255 << 8)), 255);
        assert_eq!(of(ExitStatus::from_raw(9)), 137);
        assert_eq!(of(ExitStatus::from_raw(64)), 192);
    }
}
