//! systemd's socket activation: `LISTEN_PID` names the process that the sockets in `LISTEN_FDS` are
//! for.
//!
//! CMD inherits the sockets, but it ignores them unless `LISTEN_PID` is its own pid. That pid is
//! known only after fork, when std has already built the list of the environment. So if
//! `LISTEN_PID` is leasehold's pid, the child executes CMD with another list. That list was made
//! before fork, except for the pid.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::ptr;

use nix::libc::{self, c_char};
use nix::unistd::Pid;

const LISTEN_PID: &str = "LISTEN_PID";
/// The pidfd ID of the process in `LISTEN_PID`. CMD does not get this variable, because it
/// identifies leasehold.
const LISTEN_PIDFDID: &str = "LISTEN_PIDFDID";
/// The beginning of the variable whose value is replaced.
const PREFIX: &[u8] = b"LISTEN_PID=";
/// The maximum number of digits of a pid, and a NUL.
const DIGITS: usize = 11;

/// CMD, prepared for an exec with sockets.
pub(crate) struct Activated {
    program: CString,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    /// The entry `LISTEN_PID=` of the environment, with room for the pid.
    line: Box<[u8]>,
    /// The owner of the memory that the pointers point to.
    _strings: Vec<CString>,
}

// SAFETY: The pointers point into heap memory that this value owns and that moves along with it.
unsafe impl Send for Activated {}
// SAFETY: See `Send`. Nothing is changed through a shared reference.
unsafe impl Sync for Activated {}

impl Activated {
    /// Prepares the lists. Returns `None` unless this process was given sockets. `more` are the
    /// variables that CMD gets in addition to leasehold's.
    pub(crate) fn new(command: &[OsString], more: &[(&'static str, String)]) -> Option<Self> {
        let ours = std::env::var(LISTEN_PID).ok()?.parse() == Ok(std::process::id());
        let inherited = std::env::vars_os().filter(|(name, _)| {
            name != LISTEN_PID && name != LISTEN_PIDFDID && !more.iter().any(|(n, _)| name == n)
        });
        let more = more.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let lines = inherited.chain(more).map(|(name, value)| [name, value].join(OsStr::new("=")));
        let strings = |words: Vec<OsString>| -> Option<Vec<CString>> {
            words.iter().map(|word| CString::new(word.as_bytes()).ok()).collect()
        };
        let (mut words, lines) = (strings(command.to_vec())?, strings(lines.collect())?);
        let program = words.first()?.clone();
        let line: Box<[u8]> = [PREFIX, &[0; DIGITS]].concat().into();
        let end = [ptr::null()];
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let arguments = pointers(&words).into_iter().chain(end).collect();
        let environment = pointers(&lines).into_iter().chain([line.as_ptr().cast()]).chain(end);
        let environment = environment.collect();
        words.extend(lines);
        ours.then_some(Self { program, arguments, environment, line, _strings: words })
    }

    /// Executes CMD in this process. Returns only if that failed. Allocates nothing.
    pub(crate) fn exec(&mut self, pid: Pid) -> io::Error {
        let mut digits = &mut self.line[PREFIX.len()..];
        if let Err(error) = write!(digits, "{pid}\0") {
            return error;
        }
        // SAFETY: Both lists contain C strings that `self` owns, and end with a null pointer.
        unsafe {
            libc::execvpe(
                self.program.as_ptr(),
                self.arguments.as_ptr(),
                self.environment.as_ptr(),
            );
        }
        io::Error::last_os_error()
    }
}
