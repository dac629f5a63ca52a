//! `pip install ./clients/python` from a clone builds the command and installs it with the module.

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
    succeeds(&mut pip);
    let program = "import leasehold\nwith leasehold.lock('x') as held:\n    print(held.token)";
    let mut python = Command::new(environment.join("bin/python"));
    python.args(["-c", program]).env_remove("LEASEHOLD_COMMAND").current_dir(place.path());
    python.env("LEASEHOLD_STORE", format!("file:{}", place.path().join("store").display()));
    let printed = String::from_utf8(succeeds(&mut python).stdout).unwrap();
    assert!(printed.trim().parse::<u64>().is_ok(), "{printed}");
    // Drivers of servers are built in: a server that is not there is unreachable, and not unsupported.
    let mut leasehold = Command::new(environment.join("bin/leasehold"));
    let there_is_none = ["run", "--try", "--store", "redis://127.0.0.1:1/", "x", "true"];
    let refused = leasehold.args(there_is_none).output().unwrap();
    assert_eq!(refused.status.code(), Some(69), "{refused:?}");
}
