//! Checks that the documentation quotes the code correctly. To update the documentation:
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
use leasehold::{BUILT_IN, Client, ErrorKind};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");

const HEAD: &str = "\
# Guarantees

These tables show what each store guarantees if you follow the setup on [its page](../README.md#stores).
For your configuration, `locks.guarantees()` returns the same facts, and `leasehold doctor --store URL`
prints them. `leasehold::builder().require(…)` refuses to connect to a store that guarantees less.

## Answers

| answer | meaning | what to do |
|---|---|---|
| one holder | mutual exclusion holds through this fault | nothing |
| check tokens | for a while two clients can believe that they hold the lock; later holders have higher tokens | let the resource [reject lower tokens](../guide/fencing.md) |
| UNSAFE | two clients can hold the lock, and tokens can decrease | avoid the fault or choose another store; use `require` |
| cannot happen | the store does not have this fault | nothing |

For every store:

- **A paused holder** sees `Lost` as soon as it checks its guard, but [its late requests still
  arrive](../guide/safety.md#the-pause).
- **`leasehold evict`** frees the lock before the old holder knows. If the notification is lost, the
  holder's next renewal fails with `Lost`.
- **The holder's clock** measures its lease, and leasehold subtracts 1 % + 2 ms for drift. Clocks that
  drift more break the guarantee.

";

/// The tables, each with a title and its questions.
const TABLES: [(&str, &[&str]); 4] = [
    (
        "Faults",
        &[
            "holder paused longer than its lease",
            "store's clock set",
            "store crash and restart",
            "fail-over",
            "network partition",
            "a client paused during a call blocks",
        ],
    ),
    ("Durability", &["grants survive", "token order survives"]),
    (
        "Leases and notifications",
        &[
            "a dead holder is detected by",
            "a dead holder's lock is free after",
            "lease clock",
            "waiters are notified by",
            "an evicted holder is notified by",
            "watchers are notified by",
        ],
    ),
    (
        "Features",
        &[
            "lock kinds",
            "FIFO order",
            "lock_delay",
            "min_hold (once per period)",
            "downgrade (writer to reader)",
            "try_upgrade (reader to writer)",
        ],
    ),
];

async fn columns() -> Vec<(&'static str, Guarantees)> {
    let directory = tempfile::tempdir().unwrap();
    let sqlite = format!("sqlite:{}", directory.path().join("db").display());
    let file = format!("file:{}", directory.path().join("locks").display());
    let (postgres, mysql) = (testbed::Postgres::start(), testbed::MariaDb::start());
    let redis = testbed::Redis::start();
    let sentinel = testbed::Sentinel::unbroken_with(1, testbed::Setup::new());
    let cluster = testbed::Cluster::unbroken_with(3, 1, testbed::Setup::new());
    let redlock = testbed::Redlock::with(5, testbed::Setup::new());
    // The oldest version shows the guarantees of every version, because later versions ignore
    // leaders that were left behind.
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
            // It has the guarantees of the server's own store.
            "http" => continue,
            other => {
                panic!("docs/reference/guarantees.md has no column for {other}: (add its URL here)")
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

/// Connects to servers that may be electing a leader.
async fn connect(url: &str) -> Client {
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

type Answers = Vec<(&'static str, String)>;

fn answer<'a>(answers: &'a Answers, question: &str) -> &'a str {
    let found = answers.iter().find(|(asked, _)| *asked == question);
    &found.unwrap_or_else(|| panic!("no store answers {question:?}")).1
}

fn schemes(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}:`")).collect::<Vec<_>>().join(" ")
}

fn page(columns: &[(&str, Guarantees)]) -> String {
    let mut text = HEAD.to_owned();
    let all: Vec<(&str, Answers)> = columns.iter().map(|(s, g)| (*s, g.in_words())).collect();
    let questions: Vec<&str> =
        TABLES.iter().flat_map(|(_, questions)| questions.iter().copied()).collect();
    for (asked, _) in &all[0].1 {
        assert!(
            questions.contains(asked),
            "no table of docs/reference/guarantees.md has {asked:?}"
        );
    }
    for (title, questions) in TABLES {
        let _ = writeln!(text, "## {title}\n\n| store | {} |", questions.join(" | "));
        let _ = writeln!(text, "|---|{}", "---|".repeat(questions.len()));
        // Stores with the same answers share a row.
        let mut rows: Vec<(String, Vec<&str>)> = Vec::new();
        for (scheme, answers) in &all {
            let cells: Vec<&str> =
                questions.iter().map(|question| answer(answers, question)).collect();
            let cells = cells.join(" | ");
            match rows.iter_mut().find(|(text, _)| *text == cells) {
                Some((_, with)) => with.push(scheme),
                None => rows.push((cells, vec![scheme])),
            }
        }
        for (cells, with) in rows {
            let _ = writeln!(text, "| {} | {cells} |", schemes(&with));
        }
        text.push('\n');
    }
    text
}

/// This test connects to every store, also to those whose emulators `./test.sh` alone does not
/// install.
#[tokio::test]
#[ignore = "runs with ./test.sh --all"]
async fn the_page_about_guarantees_is_up_to_date() {
    up_to_date("reference/guarantees.md", &page(&columns().await));
}

/// Compares a file with its expected contents, or writes them.
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

/// Directory with the results of the benchmark's last run.
const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../leasehold-bench/benches/results");

/// Stores that no recorded run has measured yet.
const UNMEASURED: &[&str] = &["gs", "az", "http"];

/// The page begins with the results of the last run of the benchmark, and its picture shows them
/// too.
#[test]
fn the_page_about_benchmarks_shows_the_last_run() {
    let kept = std::fs::read_to_string(format!("{RESULTS}/figures.tsv")).unwrap();
    let figures = figures::Figures::parse(&kept).unwrap();
    assert_eq!(figures.to_string(), kept, "the bench writes it");
    let table = glance::table(&figures);
    for &scheme in BUILT_IN {
        let is_there = table.contains(&format!("| `{scheme}:` |"));
        assert_eq!(is_there, !UNMEASURED.contains(&scheme), "the line for {scheme}:");
    }
    let written = std::fs::read_to_string(format!("{DOCS}/internals/benchmarks.md")).unwrap();
    let page = between(
        &written,
        "<!-- at a glance",
        "<!-- end of the glance -->",
        &format!("\n{table}\n"),
    );
    up_to_date("internals/benchmarks.md", &page);
    up_to_date(
        "../crates/leasehold-bench/benches/results/hand-over.svg",
        &glance::picture(&figures),
    );
}

/// The page has the campaign's numbers, and an explanation of each run that broke a promise.
#[test]
fn the_page_about_reliability_shows_every_run() {
    let runs = std::fs::read_to_string(format!("{DOCS}/internals/reliability/runs.jsonl")).unwrap();
    let runs = leasehold_campaign::read(&runs).unwrap();
    let written = std::fs::read_to_string(format!("{DOCS}/internals/reliability.md")).unwrap();
    let numbers = leasehold_campaign::table::tables(&runs);
    let page = between(
        &written,
        "<!-- the numbers",
        "<!-- end of the numbers -->",
        &format!("\n{numbers}\n"),
    );
    up_to_date("internals/reliability.md", &page);
    for run in runs.iter().filter(|run| run.outcome == leasehold_campaign::Outcome::Violated) {
        let heading = format!("\n### Run {}\n", run.run);
        assert!(
            written.contains(&heading),
            "docs/internals/reliability.md does not explain{heading}{:?}",
            run.notes
        );
    }
}

// R35
/// The SQL files for other languages: those of the fence, and those of transactions. The pages link
/// to them, and to the scripts for Redis.
#[test]
fn the_statements_for_other_languages_are_up_to_date() {
    let read = |name: &str| std::fs::read_to_string(format!("{DOCS}/reference/{name}")).unwrap();
    let pages = [read("fence-statements.md"), read("transaction-statements.md")];
    for (name, dialect) in
        [("postgres", Dialect::Postgres), ("sqlite", Dialect::Sqlite), ("mysql", Dialect::Mysql)]
    {
        let transactions = [
            ("lock_in: a lock", leasehold::lock_in::text(dialect)),
            ("once: an idempotency key", leasehold::once::text(dialect)),
            ("versioned: compare-and-set", leasehold::versioned::text(dialect)),
        ];
        let transactions = transactions.map(|(title, text)| format!("-- {title}\n--\n{text}"));
        for (page, kind, text) in [
            (&pages[0], "fence", leasehold::fence::sql::text(dialect)),
            (&pages[1], "transactions", transactions.join("\n")),
        ] {
            let file = format!("statements/{name}-{kind}.sql");
            up_to_date(&format!("reference/{file}"), &text);
            assert!(
                page.contains(&format!("]({file})")),
                "no page of docs/reference links to {file}"
            );
        }
    }
    for script in ["set", "hash", "guarded"] {
        let link = format!("](../../crates/leasehold-redis/src/fence/{script}.lua)");
        assert!(pages[0].contains(&link), "docs/reference/fence-statements.md has no link {link}");
    }
}

// R13
/// The page links to every script that leasehold runs inside a server.
#[test]
fn page_links_to_all_server_side_code() {
    const CRATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let written = std::fs::read_to_string(format!("{DOCS}/internals/server-code.md")).unwrap();
    for folder in ["leasehold-redis/src/redis/scripts", "leasehold-redlock/src/scripts"] {
        for file in std::fs::read_dir(format!("{CRATES}/{folder}")).unwrap() {
            let name = file.unwrap().file_name();
            let link = format!("](../../crates/{folder}/{})", name.to_str().unwrap());
            assert!(written.contains(&link), "docs/internals/server-code.md has no link {link}");
        }
    }
}

/// The meaning of each kind of error, and what to do.
const KINDS: [(ErrorKind, &str, u8); 17] = [
    (ErrorKind::Contended, "Another client holds the lock, and the call did not wait.", 75),
    (ErrorKind::Timeout, "The wait timed out: the lock was held all the time.", 75),
    (
        ErrorKind::Lost,
        "The lock was held and is lost. Work done since may overlap with another holder. `run` and \
         `release` exit with 74.",
        75,
    ),
    (
        ErrorKind::AtRisk,
        "The lock is held, but for less time than `min_validity` or `ensure` requires.",
        69,
    ),
    (
        ErrorKind::Unreachable,
        "The store does not reply. The operation may or may not have happened.",
        69,
    ),
    (
        ErrorKind::Unconfirmed,
        "Fewer replicas confirmed the grant than required, so it was released again.",
        69,
    ),
    (ErrorKind::Unsupported, "The store cannot do this.", 2),
    (
        ErrorKind::Mismatch,
        "The name is in use with another lock kind or capacity, or an idempotency key with another request.",
        2,
    ),
    (ErrorKind::InvalidName, "The name is empty, too long or contains control characters.", 2),
    (ErrorKind::Config, "An option, a URL or the machine's configuration is invalid.", 2),
    (
        ErrorKind::Denied,
        "Wrong credentials or a missing permission. The message lists what is missing.",
        69,
    ),
    (ErrorKind::Full, "The store is full.", 69),
    (ErrorKind::Corrupt, "The stored data is damaged or is not a lock.", 69),
    (ErrorKind::Closed, "This client was closed.", 69),
    (
        ErrorKind::Conflict,
        "The database aborted the transaction (deadlock, serialization failure). Run it again.",
        69,
    ),
    (
        ErrorKind::StaleVersion,
        "The row was changed since it was read. Read it again and retry.",
        69,
    ),
    (
        ErrorKind::StaleToken,
        "The resource has seen a higher token: another holder has the lock. Stop and roll back.",
        69,
    ),
];

/// The page on errors contains every kind, and how the library treats it.
#[test]
fn the_page_about_errors_is_up_to_date() {
    let mut page = "\
# Errors

`error.kind()` returns the kind of an error, and `is_retryable()` whether the same call can succeed
later. HTTP is the status that `fence::http::status(&error)` suggests for your service, and exit the
exit status of the command.

| kind | meaning | retryable | HTTP | exit |
|---|---|---|--:|--:|
"
    .to_owned();
    for (kind, meaning, exit) in KINDS {
        let error = leasehold::Error::new(kind, "");
        let retryable = if error.is_retryable() { "yes" } else { "no" };
        let status = leasehold::fence::http::status(&error).as_u16();
        let _ =
            writeln!(page, "| `{}` | {meaning} | {retryable} | {status} | {exit} |", kind.as_str());
    }
    page.push_str(ERRORS_BELOW);
    up_to_date("reference/errors.md", &page);
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../leasehold-core/src/types/error.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let (_, kinds) = source.split_once("pub enum ErrorKind {").unwrap();
    let (kinds, _) = kinds.split_once("\n}").unwrap();
    let count =
        kinds.lines().filter(|line| !line.trim().starts_with("//") && line.ends_with(',')).count();
    assert_eq!(count, KINDS.len(), "docs/reference/errors.md must have every ErrorKind");
}

const ERRORS_BELOW: &str = "
## Details

| method | returns |
|---|---|
| `is_transient()` | whether calls retry: the store is unreachable or full. Queued calls also retry `denied`, `config`, `corrupt` |
| `holders()` | the current holders, if known: host, process, label, token, since when |
| `held_by_this_client()` | whether this client is the holder; if the same task is waiting, that is a deadlock |
| `lost_reason()` | `expired`, `gone`, `max_hold` or `closed` |
| `stale_token()`, `stale_version()` | both numbers of the comparison |

- Retry in a loop, with a growing delay, while `is_retryable()` is true.
- Do not retry a commit that got no reply, unless it has an [idempotency
  key](../guide/transactions.md#idempotency-keys). Return 500 to your caller instead of 503.
- Send `Retry-After` with 423 and 503.

The command also has [other statuses](../guide/shell-scripts.md#exit-status): 71 if the system is out of
processes, files or memory, and 74 if the lock was lost before `release`.
";

/// The page on metrics equals the documentation of the module `telemetry`.
#[test]
fn the_page_about_metrics_is_up_to_date() {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../leasehold-core/src/client/telemetry.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let documented = source.lines().map_while(|line| line.strip_prefix("//!"));
    // The first line is left out, because the page's title repeats it.
    let documented = documented.skip(2);
    let text: Vec<&str> = documented.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let text = without_paths(&text.join("\n")).replace("\n# ", "\n\n## ").replace("\n\n\n", "\n\n");
    let page = format!(
        "# Metrics and events\n\nThis page is generated from the documentation of the module \
         `leasehold::telemetry`.\nWhat to alert on: [Operations](../guide/operations.md).\n\n{text}\n"
    );
    up_to_date("reference/metrics.md", &page);
}

/// Replaces links to items of the library by their text.
fn without_paths(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("[`") {
        plain.push_str(&rest[..at]);
        let (name, after) = rest[at + 1..].split_once(']').unwrap();
        let target = after.strip_prefix('(').and_then(|after| after.split_once(')'));
        match target {
            Some((target, after)) if target.contains("://") => {
                let _ = write!(plain, "[{name}]({target})");
                rest = after;
            }
            Some((_, after)) => {
                plain.push_str(name);
                rest = after;
            }
            None => {
                plain.push_str(name);
                rest = after;
            }
        }
    }
    plain + rest
}

/// Replaces the part of the page between the two marks.
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
    // `sql` is a common part of several stores. The names from object_store are aliases of three
    // stores' features.
    let others = ["default", "sql", "aws", "gcp", "azure"];
    let features: Vec<_> = features.filter(|f| !others.contains(f)).collect();
    for &scheme in BUILT_IN {
        // A row may describe several stores.
        let start = format!("`{scheme}:");
        let row = readme
            .lines()
            .filter(|line| line.starts_with("| `"))
            .find(|line| line.split('|').nth(1).is_some_and(|stores| stores.contains(&start)));
        let row = row.unwrap_or_else(|| panic!("README.md has no row for {scheme}:"));
        let feature = match scheme {
            "memory" => "none".to_owned(),
            "http" => "`http-store`".to_owned(),
            scheme => format!("`{scheme}`"),
        };
        let named = row.split('|').nth(2).unwrap_or_default();
        assert!(named.split(',').any(|n| n.trim() == feature), "the feature of {scheme}: in {row}");
    }
    for feature in &features {
        assert!(readme.contains(&format!("`{feature}`")), "README.md: the feature {feature}");
    }
    assert!(features.len() > BUILT_IN.len(), "read too few: {features:?}");
}

/// The table of requirements has every row, and every test that it names exists.
#[test]
fn every_requirement_names_existing_tests() {
    const CODES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/CODES.md");
    let sources = sources::all();
    let page = std::fs::read_to_string(CODES).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| R")?.split_once(" |"));
    let mut numbers = Vec::new();
    for (row, rest) in rows {
        let Ok(number) = row.parse::<u32>() else { continue };
        numbers.push(number);
        let (_, tests) = rest.trim_end_matches(" |").rsplit_once('|').unwrap();
        for test in tests.split('`').skip(1).step_by(2) {
            assert!(
                sources::runs(&sources, test),
                "{CODES}: R{row} names {test}, which does not exist"
            );
        }
    }
    let all = (1..=14).chain(20..=36).chain(40..=52);
    assert_eq!(numbers, all.collect::<Vec<u32>>());
}

/// Returns every `pub async fn` of the packages that programs and stores use, with its
/// documentation. The cases of the conformance suite and the test helpers are left out.
fn public_async_functions() -> Vec<(String, String)> {
    let crates = format!("{}/..", env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<_> = std::fs::read_dir(crates)
        .unwrap()
        .map(|entry| entry.unwrap().path().join("src"))
        .filter(|src| {
            let path = src.to_string_lossy();
            !path.contains("conformance") && !path.contains("test-support")
        })
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
fn every_public_async_function_documents_cancel_safety() {
    let all = public_async_functions();
    assert!(all.len() > 40, "{} were found", all.len());
    for (function, above) in all {
        assert!(above.contains("/// # Cancel safety\n"), "{function}");
    }
}

// F75
/// Every public method is shown by an example that is run. The exceptions are listed, and the list
/// only gets shorter.
#[test]
fn every_public_method_has_an_example() {
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
