//! Stores whose URL or password is in a file, so that no command line shows it.

use std::process::Output;

use crate::common::Place;

/// Runs the command with `LEASEHOLD_STORE_FILE`.
fn in_file(place: &Place, file: &std::path::Path, words: &[&str], store: Option<&str>) -> Output {
    let mut command = place.leasehold(words);
    command.env_remove("LEASEHOLD_STORE").env("LEASEHOLD_STORE_FILE", file);
    command.envs(store.map(|store| ("LEASEHOLD_STORE", store)));
    command.output().unwrap()
}

#[test]
fn store_url_can_be_read_from_a_file() {
    let place = Place::new();
    let file = place.path("url");
    std::fs::write(&file, place.store() + "\n").unwrap();
    let words = ["run", "job", "--", "sh", "-c", "echo $LEASEHOLD_STORE"];
    let printed = |output: Output| {
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(printed(in_file(&place, &file, &words, None)), place.store());
    // The variable and the option both override the file, which may then be missing.
    let missing = place.path("missing");
    let other = format!("file:{}", place.path("other").display());
    assert_eq!(printed(in_file(&place, &missing, &words, Some(&other))), other);
    let given = [&["--store", &other][..], &words].concat();
    assert_eq!(printed(in_file(&place, &missing, &given, None)), other);
    // Help and similar commands need no store.
    printed(in_file(&place, &missing, &["--help"], None));
}

#[test]
fn invalid_url_file_is_named_in_the_error() {
    let place = Place::new();
    for (text, expected) in [
        (None, "No such file"),
        (Some(""), "the file is empty"),
        (Some("a:\nb:"), "the file contains a line break"),
    ] {
        let file = place.path("url");
        let _ = std::fs::remove_file(&file);
        if let Some(text) = text {
            std::fs::write(&file, text).unwrap();
        }
        for words in [&["run", "--try", "job", "--", "true"][..], &["ls"], &["doctor"]] {
            let output = in_file(&place, &file, words, None);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
            let named = stderr.contains(&format!("LEASEHOLD_STORE_FILE={file:?}: {expected}"));
            assert!(named, "{words:?}: {stderr}");
        }
    }
}

#[cfg(feature = "redis")]
#[test]
fn password_from_a_file_appears_in_no_command_line() {
    use std::os::unix::fs::PermissionsExt;

    let place = Place::new();
    let setup = testbed::Setup::new().fast().arg("--requirepass").arg("s3cret");
    let server = testbed::Redis::with(setup);
    let file = place.path("password");
    std::fs::write(&file, "s3cret\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let url = format!("redis://127.0.0.1:{}/?password_file={}", server.port(), file.display());
    let words =
        ["run", "--store", &url, "job", "--", "sh", "-c", "tr '\\0' ' ' </proc/$PPID/cmdline"];
    let output = place.output(&words);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("password_file"), "{output:?}");
    assert!(!stdout.contains("s3cret"), "{stdout}");
    let found = |file: &std::path::Path| {
        let output = place.output(&["doctor", "--store", &url]);
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!stdout.contains("s3cret"), "{stdout}");
        stdout.contains(&format!("every user of this machine may read password_file={file:?}"))
    };
    assert!(!found(&file));
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(found(&file));
}

// S91
#[cfg(feature = "redis")]
#[test]
fn claim_id_appears_in_no_command_line_and_no_environment() {
    let place = Place::new();
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    let url = server.url();
    let words = ["run", "--store", &url, "job", "--", "sh", "-c", "echo ready; read end"];
    let mut command = place.leasehold(words);
    command.stdin(std::process::Stdio::piped());
    let mut run = crate::common::Running::start(command);
    run.wait_for("ready");
    let value = server.command(&["GET", "job"]);
    let id = value.get(..32).unwrap();
    assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{value}");
    let mut read = 0;
    for process in std::fs::read_dir("/proc").unwrap() {
        for file in ["cmdline", "environ"] {
            // Some processes end meanwhile.
            let Ok(text) = std::fs::read(process.as_ref().unwrap().path().join(file)) else {
                continue;
            };
            read += 1;
            assert!(!String::from_utf8_lossy(&text).contains(id), "{process:?} {file}");
        }
    }
    assert!(read > 2, "{read} files were read");
    drop(run.child.stdin.take());
    assert_eq!(run.code(), 1, "the command ends with its input");
}
