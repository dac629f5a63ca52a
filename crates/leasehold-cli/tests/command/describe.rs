//! Shell completions and the manual.

use crate::common::Place;

fn printed(place: &Place, words: &[&str]) -> String {
    let output = place.output(words);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn completions_exclude_hidden_commands() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&place, &["completions", shell]);
        assert!(script.contains("once-per") && script.contains("doctor"), "{shell}");
        assert!(!script.contains("torture-worker") && !script.contains("watchdog"), "{shell}");
    }
    // This runs the completion in bash itself.
    let script = r#"
        source <("$1" completions bash)
        COMP_WORDS=(leasehold run --once); COMP_CWORD=2
        _leasehold leasehold --once run
        echo "${COMPREPLY[@]}"
    "#;
    let mut bash = std::process::Command::new("bash");
    let done = bash.args(["-c", script, "bash", crate::common::LEASEHOLD]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "--once-per\n", "{done:?}");
}

#[test]
fn each_command_has_a_man_page() {
    let place = Place::new();
    let directory = place.path("");
    printed(&place, &["man", "--into", directory.to_str().unwrap()]);
    for page in ["leasehold", "leasehold-run", "leasehold-elect", "leasehold-freeze"] {
        assert!(place.read(&format!("{page}.1")).contains(".SH NAME"), "{page}");
    }
    assert!(!place.path("leasehold-watchdog.1").exists());
    let page = printed(&place, &["man", "run"]);
    assert!(
        page.contains(".TH leasehold-run 1")
            && page.contains("two of four permits")
            && page.contains("take K of the N permits")
            && page.contains("Exit status"),
        "{page}"
    );
    assert_eq!(place.code(&["man", "nothing"]), 2);
    assert_eq!(place.code(&["man", "watchdog"]), 2);
}

/// A command that is not in the build must report how to get it, under its new name and its old
/// one.
#[test]
fn a_command_that_is_not_built_names_its_feature() {
    let place = Place::new();
    for (names, feature, is_built) in [
        (&["top"][..], "top", cfg!(feature = "top")),
        (&["stress", "torture"], "torture", cfg!(feature = "torture")),
        (&["demo", "lab"], "lab", cfg!(feature = "lab")),
    ] {
        for name in names.iter().filter(|_| !is_built) {
            let output = place.output(&[name, "--whatever", "x", "--help"]);
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{stderr}");
            let install = format!("cargo install --path crates/leasehold-cli --features {feature}");
            let wanted =
                format!("leasehold was built without the command {}\nhint: {install}\n", names[0]);
            assert_eq!(stderr, wanted);
        }
    }
}

#[test]
fn a_store_that_is_not_built_names_its_feature() {
    let place = Place::new();
    for (url, feature) in [
        ("redis://127.0.0.1:1", "redis"),
        ("postgres://u:secret@127.0.0.1:1/d", "postgres"),
        ("etcds://127.0.0.1:1", "etcd"),
        ("s3://bucket/prefix", "s3"),
    ] {
        if leasehold::BUILT_IN.contains(&feature) {
            continue;
        }
        for words in [&["run", "x", "true"][..], &["ls"], &["doctor"]] {
            let output = place.output(&[&["--store", url], words].concat());
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{stderr}");
            let install =
                format!("cargo install --path crates/leasehold-cli --features {feature} ");
            assert!(stderr.contains(&format!("\nhint: {install}")), "{stderr}");
            assert!(!stderr.contains("secret"), "{stderr}");
        }
    }
}

#[test]
fn commands_are_listed_in_groups_by_their_new_names() {
    let place = Place::new();
    let help = printed(&place, &["--help"]);
    for part in ["Take locks:", "Inspect:", "Operate:", "Also: hold,", "--store <URL>"] {
        assert!(help.contains(part), "no {part:?} in\n{help}");
    }
    let listed: Vec<&str> =
        help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    for name in ["run", "freeze", "unfreeze", "evict", "verify", "doctor"] {
        assert!(listed.contains(&name), "no {name} in {listed:?}");
    }
    for old in ["close", "open", "check", "torture", "lab", "watchdog"] {
        assert!(!listed.contains(&old), "{old} in {listed:?}");
    }
    // The output of -h fits on one screen.
    let short = printed(&place, &["run", "-h"]);
    assert!(short.lines().count() <= 40, "{short}");
}
