//! What this build leaves out: subcommands and stores whose cargo feature is off.

#[cfg(any(not(feature = "top"), not(feature = "torture"), not(feature = "lab")))]
use std::process::ExitCode;

/// Reports that a subcommand is not in this build, and how to get it.
#[cfg(any(not(feature = "top"), not(feature = "torture"), not(feature = "lab")))]
pub(crate) fn subcommand(name: &str, feature: &str) -> ExitCode {
    use std::io::Write;
    let text = format!("leasehold {name} is not in this build\nhint: {}\n", install(feature));
    let _ = std::io::stderr().write_all(text.as_bytes());
    ExitCode::from(crate::exit::USAGE)
}

/// The hint for a store whose driver is not in this build.
pub(crate) fn store_hint(feature: &str) -> String {
    format!("{} (all stores: --features full)", install(feature))
}

fn install(features: &str) -> String {
    format!("cargo install --path crates/leasehold-cli --features {features}")
}
