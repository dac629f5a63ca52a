//! systemd's socket activation: `LISTEN_PID` says which process the sockets in `LISTEN_FDS` are
//! for.
//!
//! CMD inherits them, but it ignores them unless `LISTEN_PID` is its own pid. That is known after
//! fork only, when the environment is a list that std has made already. So where `LISTEN_PID` is
//! ours, the child executes CMD with a list of our own, which was made before fork except for the
//! number.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::ptr;

use nix::libc::{self, c_char};
use nix::unistd::Pid;

const LISTEN_PID: &str = "LISTEN_PID";
/// The same as an identity of a pidfd, which would still be ours.
const LISTEN_PIDFDID: &str = "LISTEN_PIDFDID";
const PREFIX: &[u8] = b"LISTEN_PID=";
/// As many bytes as any pid has digits, and a NUL.
const DIGITS: usize = 11;

/// CMD, to be executed with sockets.
pub(crate) struct Activated {
    program: CString,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    /// The entry that gets the number.
    line: Box<[u8]>,
    /// What the pointers point to.
    _strings: Vec<CString>,
}

// SAFETY: the pointers point into heap memory that this value owns and moves along with it.
unsafe impl Send for Activated {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Activated {}

impl Activated {
    /// `None` unless this process was given sockets. `more`: what CMD's environment has besides
    /// ours.
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

    /// Becomes CMD in this process, or returns why not. Allocates nothing.
    pub(crate) fn exec(&mut self, pid: Pid) -> io::Error {
        let mut digits = &mut self.line[PREFIX.len()..];
        if let Err(error) = write!(digits, "{pid}\0") {
            return error;
        }
        // SAFETY: both lists are of C strings that `self` owns, and end with a null pointer.
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
