//! `leasehold demo`: what it lists, plays, writes and omits. The stories themselves are tested in
//! their own crate.

use crate::common::Place;

#[test]
fn stories_are_listed_and_unknown_stories_rejected() {
    let place = Place::new();
    let listed = place.output(&["demo"]);
    assert!(listed.status.success(), "{listed:?}");
    let listed = String::from_utf8(listed.stdout).unwrap();
    for story in leasehold_lab::ALL {
        let is_listed = |line: &str| line.starts_with(story.name) && line.ends_with(story.line);
        assert!(listed.lines().any(is_listed), "{} is not in\n{listed}", story.name);
    }
    for words in [&["demo", "no-such-story"][..], &["demo", "--html", "page.html"]] {
        let refused = place.output(words);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        let error = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(error.lines().count(), 2, "{error}");
        assert!(error.contains("\nhint: "), "{error}");
    }
}

#[test]
fn missing_server_is_reported_with_story_and_package() {
    let place = Place::new();
    let mut lab = place.leasehold(["demo", "setnx-then-expire"]);
    let left_out = lab.env("PATH", place.path("nothing")).output().unwrap();
    assert_eq!(left_out.status.code(), Some(69), "{left_out:?}");
    let stderr = String::from_utf8(left_out.stderr).unwrap();
    assert!(stderr.contains("setnx-then-expire") && stderr.contains("redis-server"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn story_is_printed_and_written_to_files() {
    let place = Place::new();
    let (page, pictures) = (place.path("page.html"), place.path("pictures"));
    let mut lab = place.leasehold(["demo", "setnx-then-expire"]);
    let played = lab.arg("--html").arg(&page).arg("--svg").arg(&pictures).output().unwrap();
    assert!(played.status.success(), "{played:?}");
    let stdout = String::from_utf8(played.stdout).unwrap();
    for part in ["do not copy", "PTTL order → -1", "Fails. ", "Works. "] {
        assert!(stdout.contains(part), "{part:?} is missing in\n{stdout}");
    }
    assert!(!stdout.contains('\x1b'), "colors are used without a terminal");
    let picture = std::fs::read_to_string(pictures.join("setnx-then-expire.svg")).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("PTTL order → -1"));
    assert!(std::fs::read_to_string(page).unwrap().contains("PTTL order → -1"));
}

/// The servers that the lab starts must not add dependencies that only tests need.
#[test]
fn command_has_no_test_only_dependencies() {
    let packages = |features: &[&str]| {
        let mut cargo = testbed::cargo();
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(["tree", "--offline", "--locked"]);
        cargo.args(["-e", "normal", "--prefix", "none", "--format", "{p}"]).args(features);
        let output = cargo.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    };
    let (whole, without): (Vec<String>, Vec<String>) =
        (packages(&["--features", "full"]), packages(&[]));
    let has = |all: &[String], name: &str| all.iter().any(|one| one == name);
    assert!(has(&whole, "testbed") && !has(&without, "testbed"));
    assert!(!has(&whole, "proptest"));
}
