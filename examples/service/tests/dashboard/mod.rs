//! Compares the queries of the dashboard in `contrib/grafana` and the alerts in
//! `docs/guide/operations.md` with the service's metrics. No panel stays empty because a metric or
//! a label has another name.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use leasehold_server::{Access, Limits, Listener, Service, serve};
use tokio::net::TcpListener;

/// Labels that Prometheus adds.
const ADDED: [&str; 2] = ["job", "instance"];

/// Reads a file of the workspace.
fn read(path: &str) -> String {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(workspace.join(path)).unwrap()
}

/// Returns all queries of all panels and variables.
fn queries() -> Vec<String> {
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("contrib/grafana/leasehold.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 9, "{} panels", panels.len());
    let mut all = Vec::new();
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{panel}");
        all.extend(targets.iter().map(|target| target["expr"].as_str().unwrap().to_owned()));
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        all.extend(variable["query"]["query"].as_str().map(str::to_owned));
    }
    all
}

fn alerts() -> Vec<String> {
    let page = read("docs/guide/operations.md");
    page.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).map(str::to_owned).collect()
}

/// Returns the metrics of a query, each with its label conditions.
fn selected(query: &str) -> Vec<(&str, &str)> {
    let mut all = Vec::new();
    for (at, _) in query.match_indices("leasehold_") {
        let rest = &query[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (metric, after) = rest.split_at(end);
        let conditions = after.strip_prefix('{').and_then(|inside| inside.split('}').next());
        all.push((metric, conditions.unwrap_or_default()));
    }
    all
}

/// Returns the labels by which a query aggregates.
fn summed_by(query: &str) -> BTreeSet<&str> {
    let lists = query.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
    lists.flat_map(|list| list.split(',')).map(str::trim).collect()
}

/// Returns the metrics of a lock service after one request.
pub(crate) fn metrics_of_a_lock_service() -> String {
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let locks = leasehold::connect("memory:").await.unwrap();
        let service = Service::new(locks, Access::open(), Limits::default()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(service, vec![Listener::Tcp(listener)], std::future::pending()));
        let pages = ["healthz", "metrics"].map(|page| format!("http://{address}/{page}"));
        let curl = move || Command::new("curl").args(["-sSf"]).args(pages).output().unwrap();
        let output = tokio::task::spawn_blocking(curl).await.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    })
}

pub(crate) fn asks_for_what_is_there(scraped: &str) {
    let alerts = alerts();
    assert!(alerts.len() >= 2, "{alerts:?}");
    for query in queries().into_iter().chain(alerts) {
        let selected = selected(&query);
        assert!(!selected.is_empty(), "{query} asks for nothing of ours");
        for (metric, conditions) in selected {
            let series = || {
                scraped.lines().filter(|line| {
                    line.strip_prefix(metric).is_some_and(|rest| rest.starts_with(['{', ' ']))
                })
            };
            assert!(series().next().is_some(), "{query}: there is no {metric} in\n{scraped}");
            let has = |part: &str| series().any(|line| line.contains(part));
            for label in summed_by(&query).into_iter().filter(|label| !ADDED.contains(label)) {
                assert!(has(&format!("{label}=\"")), "{query}: {metric} has no {label}");
            }
            for condition in conditions.split(", ").filter(|condition| !condition.is_empty()) {
                let (label, value) = condition.split_once('=').expect(condition);
                let label = label.trim_end_matches('!');
                if !ADDED.contains(&label) {
                    assert!(has(&format!("{label}={value}")), "{query}: no {label}={value}");
                }
            }
        }
    }
}
