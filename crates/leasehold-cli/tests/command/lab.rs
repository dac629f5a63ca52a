//! `leasehold demo`: what it lists, plays, writes and leaves out. The stories themselves are tested where they
//! are.

use crate::common::Place;

#[test]
fn the_stories_are_listed_and_one_that_there_is_not_is_refused() {
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
fn a_story_whose_server_is_not_installed_is_named_with_its_package() {
    let place = Place::new();
    let mut lab = place.leasehold(["demo", "setnx-then-expire"]);
    let left_out = lab.env("PATH", place.path("nothing")).output().unwrap();
    assert_eq!(left_out.status.code(), Some(69), "{left_out:?}");
    let said = String::from_utf8(left_out.stderr).unwrap();
    assert!(said.contains("setnx-then-expire") && said.contains("redis-server"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_story_is_played_on_the_terminal_and_into_files() {
    let place = Place::new();
    let (page, pictures) = (place.path("page.html"), place.path("pictures"));
    let mut lab = place.leasehold(["demo", "setnx-then-expire"]);
    let played = lab.arg("--html").arg(&page).arg("--svg").arg(&pictures).output().unwrap();
    assert!(played.status.success(), "{played:?}");
    let told = String::from_utf8(played.stdout).unwrap();
    for part in ["do not copy", "PTTL order → -1", "Fails. ", "Works. "] {
        assert!(told.contains(part), "no {part:?} in\n{told}");
    }
    assert!(!told.contains('\x1b'), "colours, and no terminal");
    let picture = std::fs::read_to_string(pictures.join("setnx-then-expire.svg")).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("PTTL order → -1"));
    assert!(std::fs::read_to_string(page).unwrap().contains("PTTL order → -1"));
}

/// What only tests need does not come with the servers that the lab starts.
#[test]
fn the_command_is_built_without_the_tests_tools() {
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
