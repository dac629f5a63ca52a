//! Runs commands to their end, and finds programs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs a command to its end and returns its output. Panics if it fails.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{printed}\n{errors}", output.status);
    printed
}

/// Runs a command to its end and returns whether it succeeded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns a cargo command for a test to run, with the environment that it would have in a shell.
/// Cargo sets variables for test programs, such as the package name and permission for unstable
/// features. Some packages' build scripts depend on these variables. With them, these packages and
/// all that depend on them would be built again here, and once more by the next build outside the
/// tests.
pub fn cargo() -> Command {
    const TOLD: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];
    const MORE: [&str; 3] = ["CARGO_PRIMARY_PACKAGE", "OUT_DIR", "RUSTC_BOOTSTRAP"];
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        if MORE.contains(&text) || TOLD.iter().any(|prefix| text.starts_with(prefix)) {
            cargo.env_remove(text);
        }
    }
    cargo
}

/// Returns the path of a program in one of the folders, or on the PATH. Panics if it does not
/// exist.
pub(crate) fn program(name: &str, folders: &[PathBuf], package: &str) -> PathBuf {
    find(name, folders).unwrap_or_else(|| {
        panic!("no {name} on this machine: run ./test.sh, or install the package {package}")
    })
}

/// Returns the path of a program, if it exists.
pub(crate) fn find(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Daemons are in folders that are not on an ordinary user's PATH.
    let system = [PathBuf::from("/usr/sbin"), PathBuf::from("/usr/local/sbin")];
    let all = folders.iter().cloned().chain(std::env::split_paths(&path)).chain(system);
    all.map(|folder| folder.join(name)).find(|path| path.is_file())
}
