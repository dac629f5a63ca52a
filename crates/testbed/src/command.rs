//! Commands that are run to their end, and where programs are.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs a command to its end and returns what it printed; panics if it fails.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{printed}\n{errors}", output.status);
    printed
}

/// Runs a command to its end and tells whether it succeeded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Cargo, for a test that has it do something: as from a shell, and not as from within the run of tests
/// that cargo has begun. What that says to test programs (whose package they are, that they may use what
/// is unstable) some packages' builds are told to look at: they would all be built again here, with all
/// that stands on them, and then once more by whoever builds next.
pub fn cargo() -> Command {
    const TOLD: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];
    const MORE: [&str; 3] = ["CARGO_PRIMARY_PACKAGE", "OUT_DIR", "RUSTC_BOOTSTRAP"];
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        if MORE.contains(&text) || TOLD.iter().any(|told| text.starts_with(told)) {
            cargo.env_remove(text);
        }
    }
    cargo
}

/// Where a program is: in one of the folders, or on the PATH.
pub(crate) fn program(name: &str, folders: &[PathBuf], package: &str) -> PathBuf {
    find(name, folders).unwrap_or_else(|| {
        panic!("no {name} on this machine: run ./test.sh, or install the package {package}")
    })
}

/// The same, if it is there.
pub(crate) fn find(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Daemons are in folders that an ordinary user's PATH does not have.
    let system = [PathBuf::from("/usr/sbin"), PathBuf::from("/usr/local/sbin")];
    let all = folders.iter().cloned().chain(std::env::split_paths(&path)).chain(system);
    all.map(|folder| folder.join(name)).find(|path| path.is_file())
}
