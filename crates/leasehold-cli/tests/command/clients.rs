//! The clients for other languages: their own tests, with this command.
#![cfg(any(feature = "redis", feature = "postgres", feature = "etcd", feature = "serve"))]

use std::path::Path;
use std::process::Command;

use crate::common::LEASEHOLD;

/// The variables of the clients' tests. One names a store with leases. The other makes the clients
/// use a server's locks.
const STORE: &str = "LEASEHOLD_STORE";
#[cfg(feature = "serve")]
const OVER: &str = "LEASEHOLD_OVER";

/// Runs the client's tests with this variable.
fn passes(client: &str, command: &str, words: &[&str], (variable, value): (&str, &str)) {
    let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients");
    let mut tests = Command::new(command);
    tests.args(words).current_dir(clients.join(client));
    // This keeps Python from writing files into the source tree.
    tests.env("PYTHONDONTWRITEBYTECODE", "1");
    // Go compiles without the network and without a C compiler, and keeps its files here.
    tests.env("GOCACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/go-client"));
    tests.envs([("GOFLAGS", "-mod=mod"), ("GOPROXY", "off"), ("CGO_ENABLED", "0")]);
    tests.env_remove(STORE).env("LEASEHOLD_COMMAND", LEASEHOLD).env(variable, value);
    let done = tests.output().unwrap_or_else(|e| panic!("{command}: {e}"));
    let (output, errors) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{client}, {variable}={value}:\n{output}\n{errors}");
    assert!(!format!("{output}{errors}").contains("no store with leases"), "{output}\n{errors}");
}

/// The table in the documentation must list the tests of all clients.
#[test]
fn clients_have_a_test_for_each_documented_behavior() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let page = read("clients/README.md");
    let rows = |head: &str| -> Vec<&str> {
        let (_, table) = page.split_once(&format!("| {head} | Details |\n")).unwrap();
        table.lines().skip(1).take_while(|line| line.starts_with('|')).collect()
    };
    let behavior = |row: &&str| row.split('|').nth(1).map(|name| name.trim().to_lowercase());
    let documented = |head: &str| {
        let mut rows: Vec<String> = rows(head).iter().filter_map(behavior).collect();
        rows.sort();
        rows
    };
    let names = |text: &str, before: &str, after: &str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix(before)?.split_once(after));
        let mut names: Vec<_> = lines.map(|(name, _)| name.replace('_', " ")).collect();
        names.sort();
        names
    };
    let python = read("clients/python/tests.py");
    let class = python.split("\nclass ").find(|class| class.starts_with("Behavior")).unwrap();
    assert_eq!(names(class, "    def test_", "("), documented("Behavior"));
    assert_eq!(names(&read("clients/node/test.js"), "test('", "'"), documented("Behavior"));
    let python = read("clients/python/tests_http.py");
    assert_eq!(names(&python, "    def test_", "("), documented("Over HTTP"));
    assert_eq!(names(&read("clients/node/test-http.js"), "test('", "'"), documented("Over HTTP"));
    // The clients for Java and Go have no command. The names of their tests are in camel case.
    let without_command = rows("Behavior").into_iter().filter(|row| !row.contains("not over HTTP"));
    let all: Vec<&str> = without_command.chain(rows("Over HTTP")).collect();
    let mut methods: Vec<String> =
        all.iter().filter_map(behavior).map(|name| in_camel_case(&name)).collect();
    methods.sort();
    assert_eq!(names(&read("clients/java/Tests.java"), "    void ", "("), methods);
    let mut functions = names(&read("clients/go/leasehold_test.go"), "func Test", "(t ");
    for name in &mut functions {
        name[..1].make_ascii_lowercase();
    }
    assert_eq!(functions, methods);
}

fn in_camel_case(name: &str) -> String {
    let mut words = name.split(' ');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| name + &word[..1].to_uppercase() + &word[1..])
}

#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
fn python(store: &str) {
    passes("python", "python3", &["tests.py"], (STORE, store));
}

#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
fn node(store: &str) {
    passes("node", "node", &["--test", "test.js"], (STORE, store));
}

#[cfg(feature = "serve")]
#[test]
fn python_client_passes_over_http() {
    passes("python", "python3", &["tests.py"], (OVER, "http"));
}

#[cfg(feature = "serve")]
#[test]
fn python_client_passes_over_http_with_faults() {
    passes("python", "python3", &["tests_http.py"], (OVER, "http"));
}

#[cfg(feature = "serve")]
#[test]
fn node_client_passes_over_http() {
    passes("node", "node", &["--test", "test.js"], (OVER, "http"));
}

#[cfg(feature = "serve")]
#[test]
fn node_client_passes_over_http_with_faults() {
    passes("node", "node", &["--test", "test-http.js"], (OVER, "http"));
}

/// The JDK is installed only there.
#[cfg(feature = "serve")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn java_over_http() {
    let classes = concat!(env!("CARGO_TARGET_TMPDIR"), "/java-client");
    let mut javac = Command::new("javac");
    javac.args(["-d", classes, "Leasehold.java", "Tests.java"]);
    javac.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../clients/java"));
    let compiled = javac.output().unwrap_or_else(|e| panic!("javac: {e}: run ./test.sh"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    passes("java", "java", &["-cp", classes, "Tests"], (OVER, "http"));
}

/// Go is installed only there.
#[cfg(feature = "serve")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn go_over_http() {
    let words = ["test", "-count=1", "-parallel=4", "-timeout=20m", "."];
    passes("go", "go", &words, (OVER, "http"));
}

#[cfg(feature = "redis")]
#[test]
fn python_client_passes_on_files_and_redis() {
    python(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn python_client_passes_on_files_and_postgres() {
    python(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn python_client_passes_on_files_and_etcd() {
    python(&testbed::etcd().url());
}

#[cfg(feature = "redis")]
#[test]
fn node_client_passes_on_files_and_redis() {
    node(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn node_client_passes_on_files_and_postgres() {
    node(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn node_client_passes_on_files_and_etcd() {
    node(&testbed::etcd().url());
}
