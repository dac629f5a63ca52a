//! Several locks for one command: all, any, the number of a permit; and a lock that is held above.

use std::collections::BTreeSet;
use std::process::Output;

use nix::sys::signal::Signal;

use crate::common::{LEASEHOLD, Place, Running, eventually};

/// `leasehold` with these words on this store, to its end.
fn output(place: &Place, store: &str, words: &[&str]) -> Output {
    place.leasehold(words).env("LEASEHOLD_STORE", store).output().unwrap()
}

fn start(place: &Place, store: &str, words: &[&str]) -> Running {
    let mut command = place.leasehold(words);
    command.env("LEASEHOLD_STORE", store);
    Running::start(command)
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

on_stores!(
    all_are_had_or_none,
    of_several_the_first_that_is_free_is_taken,
    no_permit_has_the_number_of_another,
    a_closed_lock_is_nobodys_and_says_why,
);

/// What a command under all of them finds, and who has the locks meanwhile.
fn all_are_had_or_none(store: &str) {
    let place = Place::new();
    let script = "printf '%s|%s|' \"$LEASEHOLD_NAME\" \"$LEASEHOLD_TOKEN\"; \
                  echo \"$LEASEHOLD_NAMES\" | tr '\\n' ' '; echo \"$LEASEHOLD_TOKENS\" | wc -l; \
                  for s in $LEASEHOLD_SEQUENCERS; do \"$0\" verify \"$s\" || exit; done; \
                  \"$0\" run --try all:a -- true; echo $?; \"$0\" run --try all:b -- true; echo $?";
    let words = ["run", "--name", "all:b", "--name", "all:a", "--", "sh", "-c", script, LEASEHOLD];
    let (code, told, errors) = said(&output(&place, store, &words));
    assert_eq!(code, Some(0), "{errors}");
    let (first, rest) = told.split_once('\n').unwrap();
    let [name, token, others] = first.split('|').collect::<Vec<_>>()[..] else { panic!("{told}") };
    assert_eq!((name, others), ("all:b", "all:b all:a 2"), "{told}");
    assert!(token.parse::<u64>().is_ok(), "{told}");
    assert!(rest.ends_with("75\n75\n"), "{told}");

    // One that is held: nothing stays of the others.
    let run = ["run", "all:b", "--", "sh", "-c", "echo ready; sleep 1000"];
    let mut holder = start(&place, store, &run);
    holder.wait_for("ready");
    let words = ["run", "--wait", "1s", "--name", "all:a", "--name", "all:b", "--", "true"];
    let (code, _, errors) = said(&output(&place, store, &words));
    assert_eq!(code, Some(75));
    assert!(errors.contains("timed out after 1s: \"all:b\" is held by"), "{errors}");
    let (code, _, errors) = said(&output(&place, store, &["run", "--try", "all:a", "--", "true"]));
    assert_eq!(code, Some(0), "{errors}");

    // And one that is lost is lost with all.
    let script = ["sh", "-c", "echo ready; sleep 1000"];
    let words =
        [&["run", "--name", "all:a", "--name", "all:c", "--lease", "3s", "--"][..], &script]
            .concat();
    let mut both = start(&place, store, &words);
    both.wait_for("ready");
    assert!(output(&place, store, &["evict", "all:c"]).status.success());
    assert_eq!(both.code(), 74);
    let errors = both.errors();
    assert!(errors.contains("lock \"all:c\" was evicted"), "{errors}");
    assert!(output(&place, store, &["run", "--try", "all:a", "--", "true"]).status.success());
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.code(), 143);
}

fn of_several_the_first_that_is_free_is_taken(store: &str) {
    let place = Place::new();
    let any = ["run", "--any", "--name", "any:1", "--name", "any:2", "--", "sh", "-c"];
    let with = |script| [&any[..], &[script]].concat();
    let hold = "echo $LEASEHOLD_NAME; exec sleep 1000";
    let mut first = start(&place, store, &with(hold));
    first.wait_for("any:1");
    let mut second = start(&place, store, &with(hold));
    second.wait_for("any:2");
    let tried = [&["run", "--try"][..], &any[1..], &["true"]].concat();
    let (code, _, errors) = said(&output(&place, store, &tried));
    assert_eq!(code, Some(75));
    assert!(errors.contains("none of the 2 locks is free: "), "{errors}");

    // Whichever comes free; the place in the other queue is given up.
    let mut third = start(&place, store, &with(hold));
    let claims = |name: &str| {
        let (_, shown, _) = said(&output(&place, store, &["show", "--json", name]));
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap_or_default();
        shown["claims"].as_array().map_or(0, Vec::len)
    };
    eventually("it stands in both queues", || claims("any:1") == 2 && claims("any:2") == 2);
    second.signal(Signal::SIGTERM);
    assert_eq!(second.code(), 143);
    third.wait_for("any:2");
    eventually("it stands in one", || claims("any:1") == 1 && claims("any:2") == 1);
    for mut one in [first, third] {
        one.signal(Signal::SIGTERM);
        assert_eq!(one.code(), 143);
    }
}

fn no_permit_has_the_number_of_another(store: &str) {
    let place = Place::new();
    let words = ["run", "--max", "3", "--lease", "2s", "slots", "--", "sh", "-c"];
    let hold = [&words[..], &["echo slot $LEASEHOLD_SLOT; exec sleep 1000"]].concat();
    let mut holders: Vec<Running> = (0..3).map(|_| start(&place, store, &hold)).collect();
    let number = |holder: &mut Running| {
        let line = holder.line();
        line.trim().strip_prefix("slot ").unwrap().to_owned()
    };
    let numbers: Vec<String> = holders.iter_mut().map(number).collect();
    let each: BTreeSet<&str> = numbers.iter().map(String::as_str).collect();
    assert_eq!(each, BTreeSet::from(["1", "2", "3"]));

    // The number of one that is gone, however it went.
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        holders[1].signal(signal);
        let _ = holders[1].child.wait();
        let mut next = start(&place, store, &hold);
        assert_eq!(number(&mut next), numbers[1], "after {signal}");
        holders[1] = next;
    }
    // Several permits have several numbers.
    for mut holder in holders {
        holder.signal(Signal::SIGTERM);
        assert_eq!(holder.code(), 143, "{}", holder.errors());
    }
    let two = ["run", "--max", "3", "--permits", "2", "slots", "--", "sh", "-c"];
    let two = [&two[..], &["echo $LEASEHOLD_SLOT"]].concat();
    let (code, told, errors) = said(&output(&place, store, &two));
    assert_eq!(code, Some(0), "{errors}");
    let each: BTreeSet<u32> = told.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert!(each.len() == 2 && each.iter().all(|n| (1..=3).contains(n)), "{told}");
}

fn a_closed_lock_is_nobodys_and_says_why(store: &str) {
    let place = Place::new();
    let code = |words: &[&str]| said(&output(&place, store, words)).0;
    for kind in [&[][..], &["--exclusive"], &["--max", "3"]] {
        let name = format!("closed{}", kind.concat());
        let words = ["freeze", &name, "--for", "1h", "--reason", "moved, ask Ana"];
        let (closed, _, errors) = said(&output(&place, store, &[&words[..], kind].concat()));
        assert_eq!(closed, Some(0), "{errors}");
        let run = [&["run", "--try"][..], kind, &[&name, "--", "true"]].concat();
        let (tried, _, errors) = said(&output(&place, store, &run));
        assert_eq!(tried, Some(75), "{errors}");
        assert!(errors.contains(" is frozen for "), "{errors}");
        assert!(errors.contains(&format!("hint: leasehold unfreeze {name}\n")), "{errors}");
        assert!(errors.contains(" more by ") && errors.contains(": moved, ask Ana\n"), "{errors}");
        // It is frozen only once, and a waiter gets it when it is unfrozen.
        let again = [&["freeze", "--try", "--for", "2h", &name][..], kind].concat();
        assert_eq!(code(&again), Some(75));
        let wait = [&["run"][..], kind, &[&name, "--", "echo", "ready"]].concat();
        let mut waiter = start(&place, store, &wait);
        eventually("it waits", || {
            let (_, shown, _) = said(&output(&place, store, &["show", "--json", &name]));
            shown.contains("waiting")
        });
        assert_eq!(code(&["unfreeze", &name]), Some(0));
        waiter.wait_for("ready");
        assert_eq!(waiter.code(), 0);
        assert_eq!(code(&["unfreeze", &name]), Some(1), "{name} is not frozen");
    }
    // The cooldown of a job is not a frozen lock.
    assert_eq!(code(&["run", "--min-hold", "1h", "kept", "--", "true"]), Some(0));
    assert_eq!(code(&["unfreeze", "kept"]), Some(1));
    assert_eq!(code(&["run", "--try", "kept", "--", "true"]), Some(75));
}

/// Under the hold above, as if it were its own; and where there is none, by taking the lock.
#[test]
fn a_lock_that_is_held_above_is_entered_again_where_that_is_asked_for() {
    let place = Place::new();
    let inner = "echo $LEASEHOLD_TOKEN; ps -o pgid= -p $$; exit 7";
    let script = format!(
        "echo $LEASEHOLD_TOKEN; ps -o pgid= -p $$; \
         '{LEASEHOLD}' run --reenter x -- sh -c '{inner}'; echo $?; \
         '{LEASEHOLD}' run x -- true; echo $?"
    );
    let output = place.output(&["run", "x", "--", "sh", "-c", &script]);
    let (code, told, errors) = said(&output);
    assert_eq!(code, Some(0), "{errors}");
    let lines: Vec<&str> = told.lines().map(str::trim).collect();
    let [token, group, below, group_below, code, refused] = lines[..] else { panic!("{told}") };
    assert_eq!((token, group), (below, group_below), "the same hold, the same group");
    assert_eq!((code, refused), ("7", "2"));
    assert!(errors.contains("hint: use --reenter"), "{errors}");
    assert_eq!(place.code(&["run", "--reenter", "x", "--", "sh", "-c", "exit 3"]), 3);
    assert_eq!(place.claims("x"), 0);
}

#[test]
fn what_several_locks_cannot_be_is_refused() {
    let place = Place::new();
    for words in [
        &["run", "--", "true"][..],
        &["run", "a", "--name", "b", "--", "true"],
        &["run", "-n", "a", "-n", "b", "--", "true"],
        &["run", "--any", "a", "--", "true"],
        &["run", "--reenter", "--name", "a", "--", "true"],
        &["run", "--reenter", "--max-hold", "1s", "a", "--", "true"],
        &["run", "--name", "a", "--name", "", "--", "true"],
        &["freeze", "a"],
        &["freeze", "a", "--for", "1h", "--reason", &"x".repeat(300)],
        &["freeze", "a", "--for", "800days"],
    ] {
        assert_eq!(place.code(words), 2, "{words:?}");
    }
    assert_eq!(place.claims("a"), 0);
    // Twice the same is once.
    assert_eq!(place.code(&["run", "--name", "a", "--name", "a", "--", "true"]), 0);
}
