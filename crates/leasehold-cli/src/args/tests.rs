use super::*;

fn parse(line: &str) -> Result<Args, clap::Error> {
    let words = std::iter::once("leasehold").chain(line.split_whitespace());
    parse_from(words.map(OsString::from).collect())
}

fn run(line: &str) -> RunArgs {
    match parse(line).unwrap_or_else(|error| panic!("{line}: {error}")).command {
        Command::Run(run) => run,
        other => panic!("{line}: {other:?}"),
    }
}

fn help(subcommand: &str, long: bool) -> String {
    let mut all = command();
    all.build();
    let subcommand = all.find_subcommand_mut(subcommand).unwrap();
    let help = if long { subcommand.render_long_help() } else { subcommand.render_help() };
    help.to_string()
}

#[test]
fn the_command_line_is_well_formed() {
    command().debug_assert();
}

#[test]
fn conflicting_options_are_rejected() {
    let parse = |options: &str| parse(&format!("run {options} x -- true"));
    for good in ["", "--max 3", "--max 3 --permits 2", "--shared", "-q -v", "-q --json"] {
        assert!(parse(good).is_ok(), "{good:?}");
    }
    for bad in [
        "--permits 2",
        "--max 0",
        "--shared --exclusive",
        "--shared --max 2",
        "--try --wait 1s",
        "--once-per 1h --try",
        "--once-per 1h --wait 1s",
        "--once-per 1h --min-hold 1m",
    ] {
        assert!(parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn name_and_command_are_split_with_and_without_dashes() {
    for (line, names, command) in [
        ("run x ls -l", "x", "ls -l"),
        ("run x -- ls -l", "x", "ls -l"),
        ("run x ls -- -l", "x", "ls -- -l"),
        ("run x -- -odd", "x", "-odd"),
        ("run -- x ls", "x", "ls"),
        ("run -- x -odd", "x", "-odd"),
        ("run --try x grep -n --help", "x", "grep -n --help"),
        ("run x --try -- true", "x", "true"),
        ("run x --try grep -n", "x", "grep -n"),
        ("run x -nq --wait=0 -- true", "x", "true"),
        ("run --name a --name b cp -n x y", "a b", "cp -n x y"),
        ("run --name a --name b -- cp -n", "a b", "cp -n"),
        ("run --name a help", "a", "help"),
    ] {
        let line = line.replace("-nq --wait=0", "-q --wait=0");
        let run = run(&line);
        assert_eq!(run.names().join(" "), names, "{line}");
        let words: Vec<&str> = run.command.iter().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(words.join(" "), command, "{line}");
    }
    assert!(run("run x --try true").take.try_only);
    assert!(!run("run x grep --try").take.try_only);
    let Command::Elect(elect) = parse("elect x --lease 3s ./serve -v").unwrap().command else {
        panic!("expected the command elect")
    };
    assert_eq!((elect.name.as_str(), elect.lease.as_secs(), elect.verbose), ("x", 3, false));
    assert_eq!(elect.command, ["./serve", "-v"]);
    for bad in [
        "run",
        "run x",
        "run x --",
        "run --name a",
        "run x --name a true",
        "run x --no-such true",
        "run -n a -n b -- true",
        "run --any x true",
        "elect x",
    ] {
        assert!(parse(bad).is_err(), "{bad}");
    }
    let error = parse("run x -c true").unwrap_err().to_string();
    assert!(error.contains("sh -c"), "{error}");
    let error = parse("run x").unwrap_err().to_string();
    assert!(error.contains("no command to run while \"x\" is held"), "{error}");
}

#[test]
fn replaced_names_are_still_accepted() {
    for (old, new) in [
        ("run --of 3 x true", "run --max 3 x true"),
        ("run -j 3 x true", "run --max 3 x true"),
        ("run --at-least 1s x true", "run --min-hold 1s x true"),
        ("run --term-grace 1s x true", "run --kill-after 1s x true"),
        ("run --retry-store 1s x true", "run --connect-timeout 1s x true"),
        ("run --close x true", "run --no-inherit x true"),
        ("run -o x true", "run --no-inherit x true"),
        ("run -n x true", "run --try x true"),
        ("run --nonblock x true", "run --try x true"),
        ("run --nb x true", "run --try x true"),
        ("run -w 3s x true", "run --wait 3s x true"),
        ("run --timeout 3s x true", "run --wait 3s x true"),
        ("run --ttl 3s x true", "run --lease 3s x true"),
        ("run -s x true", "run --shared x true"),
        ("run -x x true", "run --exclusive x true"),
        ("run -e x true", "run --exclusive x true"),
        ("wait --wait 1s x", "wait --timeout 1s x"),
        ("wait -w 1s x", "wait --timeout 1s x"),
        ("close --for 1h --of 3 x", "freeze --for 1h --max 3 x"),
        ("open x", "unfreeze x"),
        ("check lh1:mutex:1:s:x", "verify lh1:mutex:1:s:x"),
    ] {
        let [old_args, new_args] = [old, new]
            .map(|line| parse(line).unwrap_or_else(|error| panic!("{line}: {error}")).command);
        assert_eq!(format!("{old_args:?}"), format!("{new_args:?}"), "{old}");
    }
    let Command::Release(release) = parse("release --force x").unwrap().command else {
        panic!("expected the command release")
    };
    assert!(release.force);
    assert!(matches!(parse("torture").unwrap().command, Command::Stress(_)));
    assert!(matches!(parse("lab").unwrap().command, Command::Demo(_)));
}

#[test]
fn replaced_names_are_not_in_the_help() {
    for subcommand in ["run", "freeze", "release", "wait"] {
        let help = help(subcommand, true);
        for old in ["--of", "--at-least", "--term-grace", "--retry-store", "--close", "--force"] {
            assert!(!help.contains(old), "{subcommand}: {old}");
        }
    }
}

#[test]
fn global_options_are_accepted_before_and_after_the_subcommand() {
    for line in [
        "--store file:/a --namespace n/ --json show x",
        "show --store file:/a --namespace n/ --json x",
        "show x --store file:/a --namespace n/ --json",
        "--store file:/b --namespace m/ show x --store file:/a --namespace n/ --json",
    ] {
        let Command::Show(show) = parse(line).unwrap().command else {
            panic!("expected the command show")
        };
        let environment = show.store.environment().map(|(_, value)| value);
        assert_eq!(environment, ["file:/a", "n/"].map(str::to_owned), "{line}");
        assert!(show.json, "{line}");
    }
    for line in ["-v run x true", "run -v x true", "run x -v true"] {
        assert!(run(line).verbose, "{line}");
    }
    for line in ["-v ls", "ls -v", "--json release x --token 1", "man --store file: --json"] {
        assert!(parse(line).is_ok(), "{line}");
    }
}

#[test]
fn mistyped_words_have_a_suggestion() {
    let message = |line: &str| parse(line).unwrap_err().to_string();
    assert!(message("shwo x").contains("'show'"), "{}", message("shwo x"));
    for line in ["run --shraed x true", "run x --shraed true"] {
        assert!(message(line).contains("'--shared'"), "{}", message(line));
    }
    // As with `flock`, which has no subcommands.
    let forgotten = message("backup ./backup.sh");
    assert!(forgotten.contains("tip: to run a command under a lock: leasehold run"), "{forgotten}");
    assert!(!message("shwo x").contains("under a lock"));
    assert!(message("run --leese 3s x true").contains("'--lease'"));
    for (line, meant) in [
        ("run x --tyr -- true", "'--try'"),
        ("run --tyr x true", "'--try'"),
        ("run --mxa 3 x true", "'--max'"),
        ("run --mx 3 x true", "'--max'"),
        ("elect --jsno x true", "'--json'"),
        ("evict --tokne 7 x", "'--token'"),
    ] {
        assert!(message(line).contains(meant), "{line}: {}", message(line));
    }
    assert!(!message("run --zzz x true").contains("similar"), "{}", message("run --zzz x true"));
}

#[test]
fn commands_in_hints_use_the_same_store() {
    let hint = |line: &str| match parse(line).unwrap().command {
        Command::Show(show) => show.store.command("evict", Some("a b")),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        hint("show --store file:/a --namespace acme/ x"),
        "leasehold evict --store file:/a --namespace acme/ 'a b'"
    );
    let hidden = hint("show --store redis://u:secret@h x");
    assert_eq!(hidden, "leasehold evict --store 'redis://***@h' 'a b'");
}

#[test]
fn short_help_of_run_fits_on_one_screen() {
    let help = help("run", false);
    assert!(help.lines().count() <= 40, "{} lines:\n{help}", help.lines().count());
    let options = help.lines().filter(|line| line.trim_start().starts_with('-')).count();
    assert!(options <= 15, "{options} options:\n{help}");
    for heading in ["Lock:", "Waiting:", "Lease:", "Command:", "Store:", "Output:"] {
        assert!(help.lines().any(|line| line == heading), "no {heading} in\n{help}");
    }
}

/// STYLE: imperative or noun phrase, no full stop, at most 72 characters.
#[test]
fn help_lines_are_short() {
    let mut all = command();
    all.build();
    for subcommand in all.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        // The help of these two commands is in the crates that implement them.
        if ["stress", "demo", "help"].contains(&subcommand.get_name()) {
            continue;
        }
        let texts = subcommand.get_arguments().filter(|arg| !arg.is_hide_set());
        let texts =
            texts.filter_map(|arg| Some((arg.get_id().to_string(), arg.get_help()?.to_string())));
        let about = subcommand.get_about().map(|about| ("about".to_owned(), about.to_string()));
        for (of, text) in texts.chain(about) {
            let name = subcommand.get_name();
            assert!(text.chars().count() <= 72, "{name} {of}: {text}");
            assert!(!text.ends_with('.') && !text.contains('\n'), "{name} {of}: {text}");
        }
    }
}

#[test]
fn every_visible_command_is_in_the_overview() {
    let all = command();
    let overview = overview(&all);
    for subcommand in all.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        let name = subcommand.get_name();
        assert!(overview.contains(name), "{name}");
    }
    let hidden = ["watchdog", "torture-worker"];
    assert!(!hidden.iter().any(|name| overview.contains(name)), "{overview}");
}

#[test]
fn empty_store_is_refused_and_hidden_commands_are_not_suggested() {
    let error = parse("run --store= x true").unwrap_err().to_string();
    assert!(error.contains("the URL is empty; is the variable set?"), "{error}");
    let error = parse("ru x true").unwrap_err().to_string();
    assert!(error.contains("run") && !error.contains("torture"), "{error}");
}
