//! What shells complete, and the manual.

use crate::common::Place;

fn printed(place: &Place, words: &[&str]) -> String {
    let output = place.output(words);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn shells_complete_what_can_be_said_and_not_what_is_hidden() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&place, &["completions", shell]);
        assert!(script.contains("once-per") && script.contains("doctor"), "{shell}");
        assert!(!script.contains("torture-worker") && !script.contains("watchdog"), "{shell}");
    }
    // In bash itself.
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
fn each_command_has_a_page() {
    let place = Place::new();
    let directory = place.path("");
    printed(&place, &["man", "--into", directory.to_str().unwrap()]);
    for page in ["leasehold", "leasehold-run", "leasehold-elect", "leasehold-torture"] {
        assert!(place.read(&format!("{page}.1")).contains(".SH NAME"), "{page}");
    }
    assert!(!place.path("leasehold-watchdog.1").exists());
    let page = printed(&place, &["man", "run"]);
    assert!(page.contains(".TH leasehold-run 1") && page.contains("Exit codes"), "{page}");
    assert_eq!(place.code(&["man", "nothing"]), 2);
    assert_eq!(place.code(&["man", "watchdog"]), 2);
}
