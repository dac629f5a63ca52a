//! One word for one state in all outputs of the command. A table in the documentation lists them.

use std::collections::BTreeSet;
use std::process::Stdio;

use serde_json::Value;

use crate::common::{Place, Running, eventually};
#[cfg(feature = "top")]
use crate::top::Top;

/// Returns the words of the table in the documentation.
fn table() -> BTreeSet<String> {
    let pages = ["docs/guide/operations.md", "README.md"].map(|page| {
        let path = format!("{}/../../{page}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap_or_default()
    });
    let table = |page: &String| {
        let (_, after) = page.split_once("| in Rust | in the command | meaning |")?;
        Some(after.to_owned())
    };
    let after = pages.iter().find_map(table).unwrap();
    let rows = after.lines().skip(2).take_while(|line| line.starts_with('|'));
    let words = rows.filter_map(|row| row.split('|').nth(2));
    words.map(|word| word.trim().trim_matches('`').to_owned()).collect()
}

/// Reads a lock with a holder and a waiter, and a frozen lock, through `ls`, `show`, `top`,
/// `events`, `hold` and `run`, as text and as JSON.
#[test]
fn a_state_has_one_word_in_all_outputs() {
    let place = Place::new();
    let hold = |words: &[&str]| {
        let mut command = place.leasehold([&["hold"], words].concat());
        command.stdin(Stdio::piped());
        Running::start(command)
    };
    let mut holder = hold(&["--json", "--label", "first", "x"]);
    let json = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let held = json(&holder.line());
    let mut waiter = hold(&["--label", "second", "x"]);
    let waiting = waiter.line();
    assert_eq!(place.code(&["freeze", "shut", "--for", "1h", "--reason", "moved"]), 0);
    let words = [held["event"].as_str().unwrap(), waiting.split(' ').next().unwrap(), "cooldown"];
    assert_eq!(words, ["held", "waiting", "cooldown"]);

    // Each of these commands must show the states of the three claims.
    let printed = |words: &[&str]| {
        let output = place.output(words);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let states = |lock: &Value| -> Vec<String> {
        let claims = lock["claims"].as_array().unwrap().iter();
        claims.map(|claim| claim["state"].as_str().unwrap().to_owned()).collect()
    };
    let all = json(&printed(&["ls", "--json"]));
    let listed: Vec<Vec<String>> = all.as_array().unwrap().iter().map(states).collect();
    assert_eq!(
        listed.concat().into_iter().collect::<BTreeSet<_>>(),
        words.map(str::to_owned).into()
    );
    for (name, is) in [("x", &words[..2]), ("shut", &words[2..])] {
        assert_eq!(states(&json(&printed(&["show", "--json", name]))), is, "show --json {name}");
        let shown = printed(&["show", name]);
        let shown: Vec<&str> =
            shown.lines().skip(4).map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(shown, is, "show {name}");
    }
    let events = |json: bool| {
        let words = ["events", "--json"];
        let mut events = Running::start(place.leasehold(&words[..if json { 2 } else { 1 }]));
        (0..3).map(|_| events.line()).collect::<Vec<_>>()
    };
    let as_text =
        events(false).into_iter().map(|line| line.split_whitespace().nth(1).unwrap().to_owned());
    let as_json =
        events(true).into_iter().map(|line| json(&line)["event"].as_str().unwrap().to_owned());
    for printed in [as_text.collect::<BTreeSet<_>>(), as_json.collect()] {
        assert_eq!(printed, words.map(str::to_owned).into(), "events");
    }
    #[cfg(feature = "top")]
    {
        let mut top = Top::start(&place, &[]);
        top.sees(&["2 locks: 1 held, 1 waiting;"]);
        top.press("\r");
        top.sees(&["> held", "first"]);
        top.sees(&["  waiting", "second"]);
        top.press("\x1b");
        top.sees(&["> x"]);
        top.press("j\r");
        top.sees(&["> cooldown", "frozen: moved"]);
    }
    // `ls` shows the client that froze the lock and the reason, like `top`.
    let listed = printed(&["ls"]);
    let shut = listed.lines().find(|line| line.starts_with("shut")).unwrap();
    assert!(shut.contains("frozen for 59m") && shut.ends_with(": moved"), "{shut}");

    // The release must be reported by the holder and by `events`.
    let mut onlooker = Running::start(place.leasehold(["events", "x"]));
    let mut change = || {
        let line = onlooker.line();
        let (time, change) = line.split_once("  ").unwrap();
        assert!(humantime::parse_rfc3339(time).is_ok(), "{line}");
        change.to_owned()
    };
    assert!(change().starts_with(words[0]) && change().starts_with(words[1]));
    drop(holder.child.stdin.take());
    assert_eq!(json(&holder.line())["event"], "released");
    assert!(waiter.line().starts_with("held "));
    assert!(change().starts_with("ended ") && change().starts_with("held "));
    drop(waiter.child.stdin.take());
    assert!(waiter.line().starts_with("released "));
    let run = place.output(&["run", "--json", "x", "--", "true"]);
    let names_shown = String::from_utf8(run.stderr).unwrap();
    let names_shown: BTreeSet<String> =
        names_shown.lines().map(|line| json(line)["event"].as_str().unwrap().to_owned()).collect();
    assert!(names_shown.contains("held") && names_shown.contains("released"), "{names_shown:?}");
    eventually("the lock is free", || place.claims("x") == 0);

    let table = table();
    for word in words.iter().chain(&["at_risk", "lost", "released", "ended"]) {
        assert!(table.contains(*word), "{word} is not in the table: {table:?}");
    }
    assert_eq!(table.len(), 7, "{table:?}");
}
