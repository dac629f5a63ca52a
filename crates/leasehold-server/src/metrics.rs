//! `GET /metrics`, in the text format of Prometheus.
//!
//! Labels are routes, statuses, identities and the prefixes in the token file, whose number is
//! bounded. Lock names are only among them if the request asks for them.

use std::fmt::{Display, Write};

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use leasehold_core::store::LockInfo;
use leasehold_http::wire::MetricsQuery;

use crate::access::{Caller, Right};
use crate::locks::visible;
use crate::problem::Failure;
use crate::request::Query;
use crate::service::Service;
use crate::usage::OfPrefix;

/// The maximum number of locks that are reported by name.
const MAX_LOCKS: usize = 10_000;

/// `GET /metrics`.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    summary = "Report metrics",
    params(MetricsQuery),
    responses((status = 200, description = "Metrics in the text format of Prometheus", body = String, content_type = "text/plain")),
)]
pub(crate) async fn metrics(
    State(service): State<Service>,
    caller: Caller,
    Query(query): Query<MetricsQuery>,
) -> Result<Response, Failure> {
    caller.check_all(Right::Inspect, "")?;
    let mut text = String::new();
    requests(&mut text, &service);
    usage(&mut text, &service);
    family(&mut text, "leasehold_server_draining", "gauge", "1 while the server shuts down");
    sample(&mut text, "leasehold_server_draining", &[], u8::from(service.is_draining()));
    if let Some(prefix) = &query.locks {
        // Without an answer of the store, the other metrics are still reported.
        if let Ok(locks) = visible(&service, &caller, prefix).await {
            by_name(&mut text, &locks);
        }
    }
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

fn requests(text: &mut String, service: &Service) {
    const NAME: &str = "leasehold_server_requests_total";
    family(text, NAME, "counter", "Requests answered");
    for (of, count) in service.requests().all() {
        let status = of.status.to_string();
        let labels = [
            ("identity", of.identity.as_str()),
            ("route", &of.route),
            ("method", of.method),
            ("status", &status),
        ];
        sample(text, NAME, &labels, count);
    }
}

fn usage(text: &mut String, service: &Service) {
    let identities = service.access().identities();
    const STREAMS: &str = "leasehold_server_streams";
    family(text, STREAMS, "gauge", "Open streams and long polls");
    for identity in &identities {
        sample(text, STREAMS, &[("identity", &identity.name)], identity.usage.streams());
    }
    let mut by_prefix = Vec::new();
    for identity in &identities {
        let mut all = identity.usage.by_prefix();
        for prefix in &identity.prefixes {
            all.entry(prefix.clone()).or_default();
        }
        by_prefix.extend(all.into_iter().map(|(prefix, of)| (&identity.name, prefix, of)));
    }
    const CLAIMS: &str = "leasehold_server_claims";
    family(text, CLAIMS, "gauge", "Holders and waiters of this server");
    for (identity, prefix, of) in &by_prefix {
        for (state, count) in [("held", of.holders), ("waiting", of.waiters)] {
            let labels = [("identity", identity.as_str()), ("prefix", prefix), ("state", state)];
            sample(text, CLAIMS, &labels, count);
        }
    }
    type Total = (&'static str, &'static str, fn(&OfPrefix) -> u64);
    let totals: [Total; 2] = [
        ("leasehold_server_grants_total", "Locks granted through this server", |of| of.grants),
        ("leasehold_server_losses_total", "Holds that a later call found to be lost", |of| {
            of.losses
        }),
    ];
    for (name, help, count) in totals {
        family(text, name, "counter", help);
        for (identity, prefix, of) in &by_prefix {
            let labels = [("identity", identity.as_str()), ("prefix", prefix)];
            sample(text, name, &labels, count(of));
        }
    }
}

fn by_name(text: &mut String, locks: &[LockInfo]) {
    const NAME: &str = "leasehold_server_lock_claims";
    family(text, NAME, "gauge", "Holders and waiters of a lock, through any server or client");
    let (reported, omitted) = locks.split_at(locks.len().min(MAX_LOCKS));
    for lock in reported.iter().filter(|lock| lock.unreadable.is_none()) {
        let counts = [("held", lock.holders().count()), ("waiting", lock.waiters().count())];
        for (state, count) in counts {
            let labels = [("lock", lock.name.as_str()), ("state", state)];
            sample(text, NAME, &labels, count);
        }
    }
    const OMITTED: &str = "leasehold_server_locks_omitted";
    family(text, OMITTED, "gauge", "Locks above the limit of those that are reported");
    sample(text, OMITTED, &[], omitted.len());
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}");
}

fn sample(text: &mut String, name: &str, labels: &[(&str, &str)], value: impl Display) {
    let escaped =
        |value: &str| value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    let labels: Vec<String> =
        labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
    let _ = match labels.is_empty() {
        true => writeln!(text, "{name} {value}"),
        false => writeln!(text, "{name}{{{}}} {value}", labels.join(",")),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        let mut text = String::new();
        sample(&mut text, "m", &[("a", "x\"y\\z\n"), ("b", "")], 1);
        assert_eq!(text, "m{a=\"x\\\"y\\\\z\\n\",b=\"\"} 1\n");
    }
}
