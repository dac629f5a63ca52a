//! `pip install ./clients/python` from a clone must build the command and install it with the
//! module.

use std::path::Path;
use std::process::{Command, Output};

fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn pip_installs_the_module_with_its_command() {
    let place = tempfile::tempdir().unwrap();
    let environment = place.path().join("environment");
    succeeds(Command::new("python3").args(["-m", "venv"]).arg(&environment));
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python");
    let mut pip = Command::new(environment.join("bin/pip"));
    pip.args(["install", "--disable-pip-version-check", "--quiet"]).arg(client);
    // Except in long runs, only one driver is built, because all drivers take minutes of both
    // processors. `the_package_contains_every_driver` checks the list of the others.
    if !testbed::sized(true, false) {
        pip.env("MATURIN_PEP517_ARGS", "--features redis");
    }
    succeeds(&mut pip);
    let program = "import leasehold\nwith leasehold.lock('x') as held:\n    print(held.token)";
    let mut python = Command::new(environment.join("bin/python"));
    python.args(["-c", program]).env_remove("LEASEHOLD_COMMAND").current_dir(place.path());
    python.env("LEASEHOLD_STORE", format!("file:{}", place.path().join("store").display()));
    let printed = String::from_utf8(succeeds(&mut python).stdout).unwrap();
    assert!(printed.trim().parse::<u64>().is_ok(), "{printed}");
    // The driver is built in, so a server that does not exist is unreachable, not unsupported.
    let mut leasehold = Command::new(environment.join("bin/leasehold"));
    let there_is_none = ["run", "--try", "--store", "redis://127.0.0.1:1/", "x", "true"];
    let refused = leasehold.args(there_is_none).output().unwrap();
    assert_eq!(refused.status.code(), Some(69), "{refused:?}");
}

/// Returns the quoted words of the list that follows `start`.
fn list(text: &str, start: &str) -> Vec<String> {
    let rest = text.split_once(start).unwrap_or_else(|| panic!("no {start:?}")).1;
    let list = rest.split_once(']').unwrap().0;
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_package_contains_every_driver() {
    let package = list(include_str!("../../../clients/python/pyproject.toml"), "\nfeatures = [");
    let full = list(include_str!("../Cargo.toml"), "\nfull = [");
    // The Python module itself is a client of the lock service. The others are for operators.
    let left_out = ["http-store", "top", "serve", "torture", "lab"];
    let drivers: Vec<_> = full.into_iter().filter(|f| !left_out.contains(&&**f)).collect();
    assert_eq!(package, drivers);
}
