//! Plays each story and checks three things. The recipe fails as described, leasehold keeps its
//! promise in the same steps, and the picture equals the one in the documentation. To update the
//! pictures and the page: `UPDATE_DOCS=1 cargo test -p leasehold-lab --test stories`.

use std::path::{Path, PathBuf};

use leasehold_lab::{ALL, Belief, Cell, Half, Played, html, named, play, svg, terminal};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");

/// Plays a story and compares its picture.
fn played(name: &str) -> Played {
    let story = named(name).unwrap_or_else(|| panic!("no story {name}"));
    let played = play(story).unwrap_or_else(|why| panic!("{name}: {why}"));
    let text = terminal::story(story, &played, terminal::Colours::NONE);
    assert!(played.is_as_told(), "{text}");
    let (file, picture) = (picture_of(name), svg::picture(story, &played));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &picture).unwrap();
    }
    let drawn = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(drawn == picture, "{} is not what was played: see above\n{text}", file.display());
    played
}

fn picture_of(name: &str) -> PathBuf {
    Path::new(DOCS).join(format!("failures/{name}.svg"))
}

/// Returns the maximum number of clients that believed at the same time that they hold.
fn at_once(half: &Half) -> usize {
    half.steps.iter().map(|step| step.holders()).max().unwrap_or(0)
}

/// Returns what a lane with contents shows at the end.
fn at_the_end<'a>(half: &'a Half, lane: &str) -> &'a str {
    let at = half.lanes.iter().position(|one| one.name == lane).unwrap();
    match &half.steps.last().unwrap().cells[at] {
        Cell::Thing(shows) => shows,
        Cell::Client(_) => panic!("{lane} is a client"),
    }
}

// R40
#[test]
fn paused_holder() {
    let played = played("paused-holder");
    assert_eq!(at_the_end(&played.naive, "stock"), "9");
    assert_eq!(at_the_end(&played.ours, "stock"), "7");
    // The lock does not keep them apart, because the paused holder believes for a moment that it
    // holds. The fence does.
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 2));
}

// R41, R49
#[test]
fn del_without_looking() {
    let played = played("del-without-looking");
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 2));
    assert_eq!(at_the_end(&played.naive, "lock"), "–");
}

// R45
#[test]
fn setnx_then_expire() {
    let played = played("setnx-then-expire");
    assert_eq!(at_the_end(&played.naive, "lock"), "A");
    assert_eq!(played.naive.steps.last().unwrap().cells[0], Cell::Client(Belief::Dead));
    assert_eq!(at_the_end(&played.ours, "lock"), "–");
}

// R28, R45
#[test]
fn setnx_time_getset() {
    let played = played("setnx-time-getset");
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 1));
    assert_eq!(at_the_end(&played.naive, "lock"), "1131");
}

// R42
#[test]
fn lost_failover() {
    let played = played("lost-failover");
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 2));
    assert_eq!(at_the_end(&played.naive, "stock"), "9");
    assert_eq!(at_the_end(&played.ours, "stock"), "8");
}

// R43
#[test]
fn node_that_forgets() {
    let played = played("node-that-forgets");
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 1));
}

// R44
#[test]
fn lost_reply() {
    let played = played("lost-reply");
    // No client works, not even the one that has the lock.
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (0, 1));
    assert_eq!(at_the_end(&played.naive, "lock"), "A");
}

// R47
#[test]
fn herd() {
    let played = played("herd");
    assert_eq!(
        (at_the_end(&played.naive, "total"), at_the_end(&played.ours, "total")),
        ("55", "10")
    );
}

// R4, R25
#[test]
fn dead_holders_status_row() {
    let played = played("dead-holders-status-row");
    assert_eq!((at_the_end(&played.naive, "row"), at_the_end(&played.ours, "row")), ("A", "–"));
}

// R52
#[test]
fn for_update_without_index() {
    let played = played("for-update-without-index");
    // Order 8 is locked although no client locked it.
    assert_eq!(at_the_end(&played.naive, "8"), "A");
    assert_eq!((at_the_end(&played.ours, "7"), at_the_end(&played.ours, "8")), ("C", "B"));
}

// R52
#[test]
fn drained_pool() {
    let played = played("drained-pool");
    assert_eq!(
        (at_the_end(&played.naive, "pool"), at_the_end(&played.ours, "pool")),
        ("3 of 3", "0 of 3")
    );
    assert_eq!((at_the_end(&played.naive, "open"), at_the_end(&played.ours, "open")), ("3", "0"));
}

// R46
#[test]
fn guessed_lease() {
    let played = played("guessed-lease");
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 1));
    assert_eq!(at_the_end(&played.naive, "lock"), "B");
}

// R48
#[test]
fn late_answer() {
    let played = played("late-answer");
    assert_eq!((at_once(&played.naive), at_once(&played.ours)), (2, 1));
}

// R50
#[test]
fn unfenced_read() {
    let played = played("unfenced-read");
    // Both halves end with 8. In the naive half three items were sold, so 7 would be correct.
    assert_eq!((at_the_end(&played.naive, "stock"), at_the_end(&played.ours, "stock")), ("8", "8"));
    assert_eq!(at_the_end(&played.naive, "highest"), "t2");
}

// R50
#[test]
fn check_then_write() {
    let played = played("check-then-write");
    assert_eq!((at_the_end(&played.naive, "stock"), at_the_end(&played.ours, "stock")), ("9", "8"));
}

// R51
#[test]
fn two_nodes() {
    let played = played("two-nodes");
    let taken = |half: &Half| half.steps.iter().any(|step| step.says.contains("t1, A) → OK"));
    assert!(taken(&played.naive) && !taken(&played.ours));
}

/// The lines around the generated part of the page.
const BEGIN: &str =
    "<!-- stories: written by UPDATE_DOCS=1 from crates/leasehold-lab/src/stories -->\n";
const END: &str = "<!-- end of stories -->\n";

/// Wraps text at 100 characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().unwrap();
        match line.chars().count() + 1 + word.chars().count() > 100 {
            true => lines.push(word.to_owned()),
            false if line.is_empty() => line.push_str(word),
            false => *line += &format!(" {word}"),
        }
    }
    lines.join("\n")
}

/// Returns the generated part of the page, which has a section for each story.
fn sections() -> String {
    let section = |story: &leasehold_lab::Story| {
        let (name, line) = (story.name, story.line);
        let labels = ["What happens", "Why", "With leasehold"].into_iter().zip(story.telling);
        let paragraph = |(label, text)| format!("\n{}\n", wrapped(&format!("**{label}.** {text}")));
        let paragraphs: String = labels.map(paragraph).collect();
        format!("\n## {name}\n\n![{name}: {line}](../failures/{name}.svg)\n{paragraphs}")
    };
    ALL.iter().map(section).collect::<String>() + "\n"
}

/// The page has the text of all stories, and every picture belongs to a story.
#[test]
fn the_page_has_every_story() {
    let file = format!("{DOCS}/guide/how-locks-fail.md");
    let page = std::fs::read_to_string(&file).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has the beginning of the stories");
    let (found, after) = rest.split_once(END).expect("the page has the end of the stories");
    let sections = sections();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, format!("{before}{BEGIN}{sections}{END}{after}")).unwrap();
    } else {
        assert!(found == sections, "{file} is out of date: run this test with UPDATE_DOCS=1");
    }
    for story in ALL {
        let link = format!("[{0}](#{0})", story.name);
        assert!(before.contains(&link), "{file} has no {link}");
    }
    let pictures = std::fs::read_dir(format!("{DOCS}/failures")).unwrap();
    assert_eq!(pictures.count(), ALL.len(), "docs/failures has pictures of unknown stories");
}

/// In a browser, the whole picture is visible in light and in dark mode, and nothing is fetched.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn page_is_complete_and_self_contained_in_a_browser() {
    let story = named("setnx-then-expire").unwrap();
    let all = [(story, play(story).unwrap())];
    let page = html::page(&all);
    for reference in ["http:", "https:", "src=", "url(", "@import", "<script", "<link"] {
        let of_svg = page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count();
        let allowed = if reference == "http:" { of_svg } else { 0 };
        assert_eq!(page.matches(reference).count(), allowed, "{reference}");
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("page.html");
    std::fs::write(&file, &page).unwrap();
    let light = testbed::Browser::new(1000, 1400);
    let document = light.document(&file, "");
    assert!(document.contains("id=\"setnx-then-expire\"") && document.contains("class=\"two\""));
    let dark = testbed::Browser::new(1000, 1400).dark();
    assert_ne!(light.picture(&file, ""), dark.picture(&file, ""));
}
