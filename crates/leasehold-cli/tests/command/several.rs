//! Several locks for one command: all, any, and the number of a permit. Also a lock that an
//! enclosing run holds.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::process::Output;

use nix::sys::signal::Signal;

use crate::common::{LEASEHOLD, Place, Running, eventually};

/// Runs `leasehold` with these arguments on this store, to its end.
fn output(place: &Place, store: &str, words: &[&str]) -> Output {
    place.leasehold(words).env("LEASEHOLD_STORE", store).output().unwrap()
}

fn start(place: &Place, store: &str, words: &[&str]) -> Running {
    let mut command = place.leasehold(words);
    command.env("LEASEHOLD_STORE", store);
    Running::start(command)
}

fn code_and_output(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

on_stores!(
    several_locks_are_acquired_all_or_none,
    any_acquires_the_first_free_lock,
    permits_have_distinct_slot_numbers,
    frozen_lock_is_unavailable_and_reports_the_reason,
    claim_that_timed_out_is_withdrawn,
);

/// Otherwise a process that has exited would get the lock, until its claim expires.
fn claim_that_timed_out_is_withdrawn(store: &str) {
    let place = Place::new();
    let mut holder = start(&place, store, &["run", "late", "sh", "-c", "echo ready; sleep 1000"]);
    holder.wait_for("ready");
    for words in [
        &["run", "--wait", "300ms", "late", "true"][..],
        &["run", "--wait", "300ms", "--name", "late", "--name", "free", "--", "true"],
        &["run", "--wait", "300ms", "--any", "--name", "late", "--", "true"],
        &["freeze", "--wait", "300ms", "--for", "1h", "late"],
    ] {
        let (code, _, errors) = code_and_output(&output(&place, store, words));
        assert_eq!(code, Some(75), "{errors}");
        let (_, shown, _) = code_and_output(&output(&place, store, &["show", "--json", "late"]));
        assert!(shown.contains("held") && !shown.contains("waiting"), "{words:?}: {shown}");
    }
    // The same holds for a wait that is interrupted.
    for words in [&["run", "late", "true"][..], &["freeze", "--for", "1h", "late"]] {
        let mut waiter = start(&place, store, words);
        eventually("the waiter is in the queue", || {
            let (_, shown, _) =
                code_and_output(&output(&place, store, &["show", "--json", "late"]));
            shown.contains("waiting")
        });
        waiter.signal(Signal::SIGINT);
        assert_eq!(waiter.child.wait().unwrap().signal(), Some(Signal::SIGINT as i32));
        let (_, shown, _) = code_and_output(&output(&place, store, &["show", "--json", "late"]));
        assert!(!shown.contains("waiting"), "{words:?}: {shown}");
    }
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.code(), 143);
}

/// Checks the environment of a command that runs under several locks, and that all of them are
/// held.
fn several_locks_are_acquired_all_or_none(store: &str) {
    let place = Place::new();
    let script = "printf '%s|%s|' \"$LEASEHOLD_NAME\" \"$LEASEHOLD_TOKEN\"; \
                  echo \"$LEASEHOLD_NAMES\" | tr '\\n' ' '; echo \"$LEASEHOLD_TOKENS\" | wc -l; \
                  for s in $LEASEHOLD_SEQUENCERS; do \"$0\" verify \"$s\" || exit; done; \
                  \"$0\" run --try all:a -- true; echo $?; \"$0\" run --try all:b -- true; echo $?";
    let words = ["run", "--name", "all:b", "--name", "all:a", "--", "sh", "-c", script, LEASEHOLD];
    let (code, stdout, errors) = code_and_output(&output(&place, store, &words));
    assert_eq!(code, Some(0), "{errors}");
    let (first, rest) = stdout.split_once('\n').unwrap();
    let [name, token, others] = first.split('|').collect::<Vec<_>>()[..] else {
        panic!("{stdout}")
    };
    assert_eq!((name, others), ("all:b", "all:b all:a 2"), "{stdout}");
    assert!(token.parse::<u64>().is_ok(), "{stdout}");
    assert!(rest.ends_with("75\n75\n"), "{stdout}");

    // If one lock is held by another client, none of the others stays acquired.
    let run = ["run", "all:b", "--", "sh", "-c", "echo ready; sleep 1000"];
    let mut holder = start(&place, store, &run);
    holder.wait_for("ready");
    let words = ["run", "--wait", "1s", "--name", "all:a", "--name", "all:b", "--", "true"];
    let (code, _, errors) = code_and_output(&output(&place, store, &words));
    assert_eq!(code, Some(75));
    assert!(errors.contains("timed out after 1s: \"all:b\" is held by"), "{errors}");
    let (code, _, errors) =
        code_and_output(&output(&place, store, &["run", "--try", "all:a", "--", "true"]));
    assert_eq!(code, Some(0), "{errors}");

    // If one lock is lost, all of them are lost.
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

fn any_acquires_the_first_free_lock(store: &str) {
    let place = Place::new();
    let any = ["run", "--any", "--name", "any:1", "--name", "any:2", "--", "sh", "-c"];
    let with = |script| [&any[..], &[script]].concat();
    let hold = "echo $LEASEHOLD_NAME; exec sleep 1000";
    let mut first = start(&place, store, &with(hold));
    first.wait_for("any:1");
    let mut second = start(&place, store, &with(hold));
    second.wait_for("any:2");
    let tried = [&["run", "--try"][..], &any[1..], &["true"]].concat();
    let (code, _, errors) = code_and_output(&output(&place, store, &tried));
    assert_eq!(code, Some(75));
    assert!(errors.contains("none of the 2 locks is free: "), "{errors}");

    // The client gets the lock that becomes free first, and leaves the other queue.
    let mut third = start(&place, store, &with(hold));
    let claims = |name: &str| {
        let (_, shown, _) = code_and_output(&output(&place, store, &["show", "--json", name]));
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap_or_default();
        shown["claims"].as_array().map_or(0, Vec::len)
    };
    eventually("the third client is in both queues", || {
        claims("any:1") == 2 && claims("any:2") == 2
    });
    second.signal(Signal::SIGTERM);
    assert_eq!(second.code(), 143);
    third.wait_for("any:2");
    eventually("the third client has left the other queue", || {
        claims("any:1") == 1 && claims("any:2") == 1
    });
    for mut one in [first, third] {
        one.signal(Signal::SIGTERM);
        assert_eq!(one.code(), 143);
    }
}

fn permits_have_distinct_slot_numbers(store: &str) {
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

    // The next holder gets the number of the one that ended, however it ended.
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        holders[1].signal(signal);
        let _ = holders[1].child.wait();
        let mut next = start(&place, store, &hold);
        assert_eq!(number(&mut next), numbers[1], "the slot number after {signal}");
        holders[1] = next;
    }
    // Several permits have several numbers.
    for mut holder in holders {
        holder.signal(Signal::SIGTERM);
        assert_eq!(holder.code(), 143, "{}", holder.errors());
    }
    let two = ["run", "--max", "3", "--permits", "2", "slots", "--", "sh", "-c"];
    let two = [&two[..], &["echo $LEASEHOLD_SLOT"]].concat();
    let (code, stdout, errors) = code_and_output(&output(&place, store, &two));
    assert_eq!(code, Some(0), "{errors}");
    let each: BTreeSet<u32> = stdout.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert!(each.len() == 2 && each.iter().all(|n| (1..=3).contains(n)), "{stdout}");
}

fn frozen_lock_is_unavailable_and_reports_the_reason(store: &str) {
    let place = Place::new();
    let code = |words: &[&str]| code_and_output(&output(&place, store, words)).0;
    for kind in [&[][..], &["--exclusive"], &["--max", "3"]] {
        let name = format!("closed{}", kind.concat());
        let words = ["freeze", &name, "--for", "1h", "--reason", "moved, ask Ana"];
        let (closed, _, errors) =
            code_and_output(&output(&place, store, &[&words[..], kind].concat()));
        assert_eq!(closed, Some(0), "{errors}");
        assert!(errors.contains(" is frozen for 1h 0m\n"), "{errors}");
        let run = [&["run", "--try"][..], kind, &[&name, "--", "true"]].concat();
        let (tried, _, errors) = code_and_output(&output(&place, store, &run));
        assert_eq!(tried, Some(75), "{errors}");
        assert!(errors.contains(" is frozen for "), "{errors}");
        assert!(
            errors.contains(&format!("end the freeze: leasehold unfreeze {name}\n")),
            "{errors}"
        );
        assert!(errors.contains(" more by ") && errors.contains(": moved, ask Ana\n"), "{errors}");
        // It is frozen only once, and a waiter gets it when it is unfrozen.
        let again = [&["freeze", "--try", "--for", "2h", &name][..], kind].concat();
        assert_eq!(code(&again), Some(75));
        let wait = [&["run"][..], kind, &[&name, "--", "echo", "ready"]].concat();
        let mut waiter = start(&place, store, &wait);
        eventually("the waiter is in the queue", || {
            let (_, shown, _) = code_and_output(&output(&place, store, &["show", "--json", &name]));
            shown.contains("waiting")
        });
        // Evicting the holder does not end the freeze.
        let (evicted, _, errors) = code_and_output(&output(&place, store, &["evict", &name]));
        assert_eq!(evicted, Some(1), "{errors}");
        assert!(errors.contains("has no holder: it is frozen for "), "{errors}");
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

/// With an enclosing hold the command runs under that hold. Without one, the lock is acquired.
#[test]
fn reenter_reuses_the_lock_of_the_enclosing_run() {
    let place = Place::new();
    let inner = "echo $LEASEHOLD_TOKEN; ps -o pgid= -p $$; exit 7";
    let script = format!(
        "echo $LEASEHOLD_TOKEN; ps -o pgid= -p $$; \
         '{LEASEHOLD}' run --reenter x -- sh -c '{inner}'; echo $?; \
         '{LEASEHOLD}' run x -- true; echo $?"
    );
    let output = place.output(&["run", "x", "--", "sh", "-c", &script]);
    let (code, stdout, errors) = code_and_output(&output);
    assert_eq!(code, Some(0), "{errors}");
    let lines: Vec<&str> = stdout.lines().map(str::trim).collect();
    let [token, group, below, group_below, code, refused] = lines[..] else { panic!("{stdout}") };
    assert_eq!(
        (token, group),
        (below, group_below),
        "expected the same hold and the same process group"
    );
    assert_eq!((code, refused), ("7", "2"));
    assert!(errors.contains("hint: use --reenter"), "{errors}");
    assert_eq!(place.code(&["run", "--reenter", "x", "--", "sh", "-c", "exit 3"]), 3);
    assert_eq!(place.claims("x"), 0);
    // The reason is printed although this process was about to become the command.
    let inner = [LEASEHOLD, "run", "--reenter", "x", "--", "no-such-command"];
    let output = place.output(&[&["run", "x", "--"][..], &inner].concat());
    let (code, _, errors) = code_and_output(&output);
    assert_eq!(code, Some(127), "{errors}");
    assert!(errors.contains("\"no-such-command\": command not found"), "{errors}");
}

#[test]
fn invalid_lock_combinations_are_rejected() {
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
    // The same name given twice counts once.
    assert_eq!(place.code(&["run", "--name", "a", "--name", "a", "--", "true"]), 0);
}
