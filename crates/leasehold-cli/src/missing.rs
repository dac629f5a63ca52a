//! The parts that this build does not contain: subcommands and stores whose cargo feature is off.

#[cfg(not(all(feature = "top", feature = "torture", feature = "lab", feature = "serve")))]
use std::process::ExitCode;

/// Reports that a subcommand is not in this build, and how to get it. Returns the exit code.
#[cfg(not(all(feature = "top", feature = "torture", feature = "lab", feature = "serve")))]
pub(crate) fn subcommand(name: &str, feature: &str) -> ExitCode {
    use std::io::Write;
    let text =
        format!("leasehold was built without the command {name}\nhint: {}\n", install(feature));
    let _ = std::io::stderr().write_all(text.as_bytes());
    ExitCode::from(crate::exit::USAGE)
}

/// Returns the hint for a store whose driver is not in this build.
pub(crate) fn store_hint(feature: &str) -> String {
    format!("{} (all stores: --features full)", install(feature))
}

fn install(features: &str) -> String {
    format!("cargo install --path crates/leasehold-cli --features {features}")
}
