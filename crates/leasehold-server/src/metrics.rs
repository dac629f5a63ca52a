//! `GET /metrics`, in the text format of Prometheus.
//!
//! Labels are routes, statuses and identities, whose number is bounded. Lock names are not among
//! them.

use std::fmt::Write;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use crate::access::{Caller, Right};
use crate::problem::Failure;
use crate::service::Service;

/// `GET /metrics`.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    summary = "Report metrics",
    responses((status = 200, description = "Metrics in the text format of Prometheus", body = String, content_type = "text/plain")),
)]
pub(crate) async fn metrics(
    State(service): State<Service>,
    caller: Caller,
) -> Result<Response, Failure> {
    caller.check_all(Right::Inspect, "")?;
    let mut text = String::new();
    family(&mut text, "leasehold_server_requests_total", "counter", "Requests answered");
    for ((route, method, status), count) in service.requests().all() {
        let labels = format!(r#"route="{route}",method="{method}",status="{status}""#);
        let _ = writeln!(text, "leasehold_server_requests_total{{{labels}}} {count}");
    }
    let usages: Vec<_> =
        service.access().identities().into_iter().map(|i| (i.name.clone(), i.usage())).collect();
    family(&mut text, "leasehold_server_streams", "gauge", "Open streams and long polls");
    for (name, (streams, _)) in &usages {
        let _ = writeln!(text, r#"leasehold_server_streams{{identity="{name}"}} {streams}"#);
    }
    family(&mut text, "leasehold_server_claims", "gauge", "Holders and waiters of this server");
    for (name, (_, claims)) in &usages {
        let _ = writeln!(text, r#"leasehold_server_claims{{identity="{name}"}} {claims}"#);
    }
    family(&mut text, "leasehold_server_draining", "gauge", "1 while the server shuts down");
    let _ = writeln!(text, "leasehold_server_draining {}", u8::from(service.is_draining()));
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}");
}
