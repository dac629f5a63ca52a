//! What the documentation quotes is what the code says. To write it anew:
//! `UPDATE_DOCS=1 cargo test -p leasehold-checks --test docs`.
#[path = "../../leasehold-bench/benches/ratios/figures.rs"]
mod figures;
#[path = "../../leasehold-bench/benches/ratios/glance.rs"]
mod glance;
#[path = "../../leasehold-bench/benches/ratios/numbers.rs"]
mod numbers;
mod shown;
mod sources;

use std::collections::BTreeSet;
use std::fmt::Write;

use leasehold::database::Dialect;
use leasehold::store::Guarantees;
use leasehold::{BUILT_IN, Leasehold};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");

const HEAD: &str = "\
# What you may rely on

This page is made of what the stores say of themselves (`locks.guarantees()`); a test fails when it is
not up to date. Each store is shown as its documentation says to set it up. What *yours* promises, in
the configuration that is found, is printed by `leasehold doctor --store URL`, with what breaks it and
the fix; `leasehold::builder().require(…)` refuses to connect to a store that promises less.

";

const BELOW: &str = "
## The words in the table

| answer | what it means | what to do |
|---|---|---|
| one holder | mutual exclusion holds through this | nothing |
| tokens needed | two may believe for a while that they hold; later holders have greater tokens | let the resource refuse smaller tokens than it has seen, in the same step as the write (`fence::sql`, `fence::redis`, `fence::object`, `fence::http`, or your own; with etcd `guard.etcd_compare()`, with ZooKeeper `guard.zookeeper_node()`); before a step that cannot be undone, `guard.ensure(min)` |
| UNSAFE | two may hold, and tokens may fall | do not use this store where this can happen; `require` its absence |
| cannot happen | the store has no such fault | nothing |

Everywhere, whatever the store:

- **A holder that is paused** for longer than its lease (a debugger, a VM that is moved, swapping, a
  long garbage collection) finds out at first sight, but what it sent before, or had decided to send,
  arrives. Only the resource can refuse that. Stores without leases never take a hold away, so there it
  cannot happen, and a holder that hangs holds on.
- **`release --force` / `evict`** hands the lock over before the old holder has heard of it; that one is told by a
  hint, which may be lost with the evictor or its answer: then its next renewal says so.
- **Permits of a semaphore and readers** hold side by side: their tokens are names, not fences.
- **The holder's own clock** counts its lease, on the boot clock, shortened by 1 % + 2 ms for the drift
  between two clocks. A machine whose clocks run apart by more breaks this; no NTP does that.

";

async fn columns() -> Vec<(&'static str, Guarantees)> {
    let directory = tempfile::tempdir().unwrap();
    let sqlite = format!("sqlite:{}", directory.path().join("db").display());
    let file = format!("file:{}", directory.path().join("locks").display());
    let (postgres, mysql) = (testbed::Postgres::start(), testbed::MariaDb::start());
    let redis = testbed::Redis::start();
    let sentinel = testbed::Sentinel::unbroken_with(1, testbed::Setup::new());
    let cluster = testbed::Cluster::unbroken_with(3, 1, testbed::Setup::new());
    let redlock = testbed::Redlock::with(5, testbed::Setup::new());
    // What can be relied on whatever the version: later ones ignore leaders that were left behind.
    let etcd = testbed::Etcd::with(testbed::Setup::oldest(), 3);
    let zookeeper = testbed::ZooKeepers::start();
    let memcached = testbed::Memcached::start();
    let nats = testbed::NatsCluster::start();
    let mut columns = Vec::new();
    for &scheme in BUILT_IN {
        let url = match scheme {
            "memory" => "memory:".to_owned(),
            "file" => file.clone(),
            "sqlite" => sqlite.clone(),
            "postgres" => postgres.database(),
            "mysql" => mysql.database(),
            "redis" => redis.url(),
            "redlock" => redlock.url(),
            "etcd" => etcd.url(),
            "zookeeper" => zookeeper.url(),
            "memcached" => memcached.url(),
            "nats" => nats.url(),
            "s3" => testbed::seaweed().url("docs"),
            "gs" => testbed::google().url("docs"),
            "az" => testbed::azurite().url("docs"),
            other => {
                panic!("the store {other}: has no column in docs/guarantees.md: add its URL here")
            }
        };
        let mut deployments = vec![(scheme, url)];
        if scheme == "redis" {
            deployments.push(("redis+sentinel", sentinel.url()));
            deployments.push(("redis+cluster", cluster.url()));
        }
        for (scheme, url) in deployments {
            let locks = connect(&url).await;
            columns.push((scheme, locks.guarantees().clone()));
        }
    }
    columns
}

/// A client of servers that may be electing a leader.
async fn connect(url: &str) -> Leasehold {
    let start = std::time::Instant::now();
    loop {
        match leasehold::connect(url).await {
            Ok(locks) => return locks,
            Err(e) if e.is_retryable() && start.elapsed().as_secs() < 60 => {}
            Err(e) => panic!("{e}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

fn page(columns: &[(&str, Guarantees)]) -> String {
    let mut text = HEAD.to_owned();
    let words: Vec<_> = columns.iter().map(|(_, g)| g.in_words()).collect();
    let mut row = |cells: &mut dyn Iterator<Item = String>| {
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    };
    let names = columns.iter().map(|(scheme, _)| format!("`{scheme}:`"));
    row(&mut std::iter::once(String::new()).chain(names));
    row(&mut columns.iter().map(|_| "---".to_owned()).chain(["---".to_owned()]));
    for (i, (question, _)) in words[0].iter().enumerate() {
        let answers = words.iter().map(|w| {
            assert_eq!(w[i].0, *question, "the same questions for every store");
            w[i].1.clone()
        });
        row(&mut std::iter::once((*question).to_owned()).chain(answers));
    }
    text.push_str(BELOW);
    text.push_str("## What else to know, store by store\n");
    for (scheme, guarantees) in columns {
        let _ = writeln!(text, "\n**`{scheme}:`**\n");
        for note in guarantees.notes.iter() {
            let _ = writeln!(text, "- {note}");
        }
    }
    text
}

#[tokio::test]
async fn the_page_about_guarantees_is_up_to_date() {
    up_to_date("guarantees.md", &page(&columns().await));
}

/// Compares a file with what it should say, or writes that.
fn up_to_date(name: &str, wanted: &str) {
    let path = format!("{DOCS}/{name}");
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, wanted).unwrap();
        return;
    }
    assert!(
        written == wanted,
        "docs/{name} is not up to date: run UPDATE_DOCS=1 cargo test -p leasehold-checks --test docs"
    );
}

/// What no kept run has measured yet.
const UNMEASURED: &[&str] = &["gs", "az"];

/// The page begins with what the last run of the benchmark showed, and so does its picture.
#[test]
fn the_page_about_benchmarks_shows_the_last_run() {
    let kept = std::fs::read_to_string(format!("{DOCS}/benchmarks/figures.tsv")).unwrap();
    let figures = figures::Figures::parse(&kept).unwrap();
    assert_eq!(figures.to_string(), kept, "the bench writes it");
    let table = glance::table(&figures);
    for &scheme in BUILT_IN {
        let is_there = table.contains(&format!("| `{scheme}:` |"));
        assert_eq!(is_there, !UNMEASURED.contains(&scheme), "the line for {scheme}:");
    }
    let written = std::fs::read_to_string(format!("{DOCS}/benchmarks.md")).unwrap();
    let page = between(
        &written,
        "<!-- at a glance",
        "<!-- end of the glance -->",
        &format!("\n{table}\n"),
    );
    up_to_date("benchmarks.md", &page);
    up_to_date("benchmarks/hand-over.svg", &glance::picture(&figures));
}

/// The page has the campaign's numbers, and a story for each run that broke a promise.
#[test]
fn the_page_about_reliability_shows_every_run() {
    let runs = std::fs::read_to_string(format!("{DOCS}/reliability/runs.jsonl")).unwrap();
    let runs = leasehold_campaign::read(&runs).unwrap();
    let written = std::fs::read_to_string(format!("{DOCS}/reliability.md")).unwrap();
    let numbers = leasehold_campaign::table::tables(&runs);
    let page = between(
        &written,
        "<!-- the numbers",
        "<!-- end of the numbers -->",
        &format!("\n{numbers}\n"),
    );
    up_to_date("reliability.md", &page);
    for run in runs.iter().filter(|run| run.outcome == leasehold_campaign::Outcome::Violated) {
        let heading = format!("\n### Run {}\n", run.run);
        assert!(
            written.contains(&heading),
            "docs/reliability.md has no story{heading}{:?}",
            run.notes
        );
    }
}

/// The page has the fence's SQL for each database between two marks, and its scripts for Redis.
#[test]
fn r35_the_fence_for_other_languages_is_up_to_date() {
    let mut sql = String::new();
    for (name, dialect) in [
        ("PostgreSQL", Dialect::Postgres),
        ("SQLite", Dialect::Sqlite),
        ("MySQL and MariaDB", Dialect::Mysql),
    ] {
        let text = leasehold::fence::sql::text(dialect);
        let _ = write!(sql, "### {name}\n\n```sql\n{text}```\n\n");
    }
    use leasehold::fence::redis::{guarded_script, hash_script, set_script};
    let scripts = [
        ("A string", set_script()),
        ("Fields of a hash", hash_script()),
        ("Any script of yours", guarded_script("  -- BODY")),
    ];
    let mut lua = String::new();
    for (name, text) in scripts {
        let _ = write!(lua, "### {name}\n\n```lua\n{text}```\n\n");
    }
    let written = std::fs::read_to_string(format!("{DOCS}/fencing.md")).unwrap();
    let page = between(&written, "<!-- fence::sql::text", "<!-- end -->", &sql);
    let page = between(&page, "<!-- fence::redis", "<!-- end of the scripts -->", &lua);
    up_to_date("fencing.md", &page);
}

/// And the page on transactions has the other statements.
#[test]
fn the_statements_for_other_languages_are_up_to_date() {
    let mut made = String::new();
    for (name, dialect) in [
        ("PostgreSQL", Dialect::Postgres),
        ("SQLite", Dialect::Sqlite),
        ("MySQL and MariaDB", Dialect::Mysql),
    ] {
        let _ = write!(made, "### {name}\n\n");
        for text in [
            leasehold::lock_in::text(dialect),
            leasehold::once::text(dialect),
            leasehold::versioned::text(dialect),
        ] {
            let _ = write!(made, "```sql\n{text}```\n\n");
        }
    }
    let written = std::fs::read_to_string(format!("{DOCS}/sql-transactions.md")).unwrap();
    let page = between(&written, "<!-- the statements", "<!-- end -->", &made);
    up_to_date("sql-transactions.md", &page);
}

/// What of ours runs inside a server, whole, for who must allow it.
#[test]
fn r13_the_code_that_servers_run_is_shown() {
    const CRATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let mut page = "\
# What runs inside the servers

Everything that leasehold has a server run, as it is sent: the scripts of Redis and Redlock (with EVALSHA, and EVAL where a server does not
know one yet), and the procedures of PostgreSQL, MySQL and MariaDB, which who connects makes where it may
([what else a user needs](stores/sql.md)). Where it may not, the same is done by messages of statements, and `leasehold doctor` says so.
The scripts of the [fence](fencing.md) and the [statements of transactions](sql-transactions.md) have pages of their own.
This page is made of those files; a test keeps it so.
"
    .to_owned();
    for (title, folder, language) in [
        ("Redis", "leasehold-redis/src/redis/scripts", "lua"),
        ("Redlock", "leasehold-redis/src/redlock/scripts", "lua"),
        ("SQL", "leasehold-sql/src/store/procedures", "sql"),
    ] {
        let _ = write!(page, "\n## {title}\n");
        let files = std::fs::read_dir(format!("{CRATES}/{folder}")).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        for file in files {
            let name = file.file_name().unwrap().to_string_lossy();
            let text = std::fs::read_to_string(&file).unwrap();
            let _ = write!(page, "\n### {name}\n\n```{language}\n{}\n```\n", text.trim_end());
        }
    }
    up_to_date("server-code.md", &page);
}

/// The page with this between the two marks.
fn between(page: &str, first: &str, last: &str, made: &str) -> String {
    let (head, rest) = page.split_once(first).unwrap();
    let (_, tail) = rest.split_once(last).unwrap();
    format!("{head}{first}, kept up to date by a test -->\n{made}{last}{tail}")
}

/// The README has a row for every store, with its feature, and names all other features.
#[test]
fn the_readme_names_every_store_and_every_feature() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let readme = std::fs::read_to_string(format!("{root}/README.md")).unwrap();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../leasehold/Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    let (_, features) = manifest.split_once("[features]").unwrap();
    let (features, _) = features.split_once("\n[").unwrap();
    let features = features.lines().filter_map(|line| line.split_once(" = [")).map(|line| line.0);
    // What the stores share is no choice of anybody's.
    let features: Vec<_> = features.filter(|f| !["default", "sql"].contains(f)).collect();
    for &scheme in BUILT_IN {
        // A row may be of several.
        let start = format!("`{scheme}:");
        let row = readme
            .lines()
            .filter(|line| line.starts_with("| `"))
            .find(|line| line.split('|').nth(1).is_some_and(|stores| stores.contains(&start)));
        let row = row.unwrap_or_else(|| panic!("README.md has no row for {scheme}:"));
        let feature = if scheme == "memory" { "none".to_owned() } else { format!("`{scheme}`") };
        let named = row.split('|').nth(2).unwrap_or_default();
        assert!(named.split(',').any(|n| n.trim() == feature), "the feature of {scheme}: in {row}");
    }
    for feature in &features {
        assert!(readme.contains(&format!("`{feature}`")), "README.md: the feature {feature}");
    }
    assert!(features.len() > BUILT_IN.len(), "read too few: {features:?}");
}

/// The design's table of rows: every row is there, and every test that it names is.
#[test]
fn every_row_is_shown_by_tests_that_exist() {
    let sources = sources::all();
    let page = std::fs::read_to_string(format!("{DOCS}/design.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| R")?.split_once(" |"));
    let mut numbers = Vec::new();
    for (row, rest) in rows {
        let Ok(number) = row.parse::<u32>() else { continue };
        numbers.push(number);
        let (_, tests) = rest.trim_end_matches(" |").rsplit_once('|').unwrap();
        for test in tests.split('`').skip(1).step_by(2) {
            assert!(
                sources::runs(&sources, test),
                "docs/design.md: R{row} names {test}, which is no test"
            );
        }
    }
    let all = (1..=14).chain(20..=36).chain(40..=52);
    assert_eq!(numbers, all.collect::<Vec<u32>>());
}

/// Every `pub async fn` of the packages that programs and stores use, with what is written above it.
/// (The cases of the conformance suite are functions of tests.)
fn public_async_functions() -> Vec<(String, String)> {
    let crates = format!("{}/..", env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<_> = std::fs::read_dir(crates)
        .unwrap()
        .map(|entry| entry.unwrap().path().join("src"))
        .filter(|src| !src.to_string_lossy().contains("conformance"))
        .collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let mut above = String::new();
                for line in text.lines().map(str::trim_start) {
                    if line.starts_with("pub async fn ") {
                        let at = format!("{}: {line}", path.display());
                        found.push((at, std::mem::take(&mut above)));
                    } else if line.starts_with("///") || line.starts_with("#[") {
                        above.push_str(line);
                        above.push('\n');
                    } else {
                        above.clear();
                    }
                }
            }
        }
    }
    found
}

#[test]
fn every_async_function_says_what_becomes_of_it_when_it_is_dropped() {
    let all = public_async_functions();
    assert!(all.len() > 40, "{} were found", all.len());
    for (function, above) in all {
        assert!(above.contains("/// # Cancel safety\n"), "{function}");
    }
}

/// Of what programs call, all is shown by an example that is run, but for what the list names, which only gets shorter.
#[test]
fn f75_every_method_is_shown_by_an_example() {
    let (missing, count) = (shown::missing(), shown::count());
    assert!(count > 250, "{count} were found");
    let listed: BTreeSet<String> =
        include_str!("shown/missing.txt").lines().map(Into::into).collect();
    let new: Vec<_> = missing.difference(&listed).collect();
    assert!(new.is_empty(), "no example that is run shows {new:#?}");
    let done: Vec<_> = listed.difference(&missing).collect();
    assert!(
        done.is_empty(),
        "these have examples now: take them off tests/shown/missing.txt: {done:#?}"
    );
}

/// Every store that a program can be built with runs the conformance suite in its own package.
#[test]
fn every_built_in_store_runs_the_conformance_suite() {
    let sources = sources::all();
    for store in BUILT_IN {
        let suite = format!("conformance_suite!({store},");
        assert!(sources.contains(&suite), "no test runs `{suite} …)`");
    }
}
