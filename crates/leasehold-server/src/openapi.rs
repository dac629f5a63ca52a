//! `GET /openapi.json`: the API in the OpenAPI format, generated from the handlers and the types of
//! [`wire`](leasehold_http::wire).

use std::sync::LazyLock;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use leasehold_http::wire::{HoldKind, PROBLEM_JSON, Problem, schema};
use serde_json::Value;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ContentBuilder, Ref, ResponseBuilder};
use utoipa::{Modify, OpenApi};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "leasehold serve",
        description = "Distributed locks over HTTP. Every call can be repeated."
    ),
    paths(
        crate::locks::healthz,
        crate::locks::readyz,
        crate::locks::store,
        crate::locks::doctor,
        crate::locks::check,
        crate::locks::list,
        crate::locks::show,
        crate::locks::holders,
        crate::locks::why,
        crate::locks::history,
        crate::locks::evict,
        crate::locks::freeze,
        crate::locks::unfreeze,
        crate::claims::join,
        crate::claims::renew,
        crate::claims::renew_many,
        crate::claims::wait,
        crate::claims::leave,
        crate::claims::convert,
        crate::events::events,
        crate::hold::hold,
        crate::metrics::metrics,
    ),
    components(schemas(
        HoldKind,
        Problem,
        schema::ClaimIdHex,
        schema::DurationText,
        schema::FencingToken,
        schema::LeaseMs,
        schema::LockKind,
        schema::LockName,
        schema::Milliseconds,
        schema::Permits,
        schema::ProcessId,
        schema::SeenToken,
        schema::SequencerText,
    )),
    // Either of them is enough.
    security(("token" = []), ("certificate" = [])),
    modifiers(&Common)
)]
struct Api;

/// The parts that all operations share.
struct Common;

impl Modify for Common {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = api.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
        let certificate = SecurityScheme::MutualTls {
            description: Some(
                "A client certificate issued by an authority in --tls-client-ca".to_owned(),
            ),
            deprecated: None,
            extensions: None,
        };
        components.add_security_scheme("certificate", certificate);
        let schema = Ref::from_schema_name("Problem");
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let problem = ResponseBuilder::new().description("An error").content(PROBLEM_JSON, content);
        let problem = problem.build();
        for (path, item) in &mut api.paths.paths {
            let tag = match path.as_str() {
                path if path.starts_with("/v1/claims") => "claims",
                path if path.starts_with("/v1/locks") => "locks",
                _ => "server",
            };
            let all = [&mut item.get, &mut item.post, &mut item.put, &mut item.delete];
            for operation in all.into_iter().flatten() {
                // The doc comments of handlers are written for developers of the server.
                operation.description = None;
                operation.tags = Some(vec![tag.to_owned()]);
                let default = operation.responses.responses.entry("default".to_owned());
                default.or_insert_with(|| problem.clone().into());
            }
        }
    }
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    let mut document = serde_json::to_value(Api::openapi()).unwrap_or_default();
    unlink(&mut document);
    document.to_string()
});

/// Removes links. Descriptions come from the documentation of the types, and their links do not
/// work here.
fn unlink(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(unlink),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == "description" => *text = without_links(text),
                    value => unlink(value),
                }
            }
        }
        _ => {}
    }
}

/// Replaces `[text](target)` and `[text]` by `text`.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        plain.push_str(before);
        let (inner, after) = after.split_once(']').unwrap_or((after, ""));
        plain.push_str(inner);
        let target = after.strip_prefix('(').and_then(|target| target.split_once(')'));
        rest = target.map_or(after, |(_, after)| after);
    }
    plain + rest
}

/// `GET /openapi.json`. It contains no data and needs no token.
pub(crate) async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn document() -> Value {
        serde_json::from_str(&DOCUMENT).unwrap()
    }

    #[test]
    fn descriptions_have_no_links() {
        assert_eq!(without_links("[`A`](b::A) or [c], (d)"), "`A` or c, (d)");
        assert!(!DOCUMENT.contains("](") && !DOCUMENT.contains("[`"), "{}", *DOCUMENT);
    }

    #[test]
    fn every_route_is_described_with_its_methods() {
        let document = document();
        let mut described = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            described.extend(item.as_object().unwrap().keys().map(|m| (path.clone(), m.clone())));
        }
        let mut routes = BTreeSet::new();
        for route in include_str!("router.rs").split(".route(").skip(1) {
            let path = route.split('"').nth(1).unwrap();
            let handlers = route.split_once(',').unwrap().1;
            for method in ["get", "post", "put", "delete"] {
                if handlers.split(".fallback").next().unwrap().contains(&format!("{method}(")) {
                    routes.insert((path.to_owned(), method.to_owned()));
                }
            }
        }
        for page in ["/", "/openapi.json"] {
            assert!(routes.remove(&(page.to_owned(), "get".to_owned())), "{page}");
        }
        assert_eq!(described, routes);
    }

    #[test]
    fn every_referenced_schema_exists() {
        let text = &*DOCUMENT;
        let document = document();
        let mut references = 0;
        for part in text.split(r##""$ref":"#/components/schemas/"##).skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
            references += 1;
        }
        assert!(references > 20, "{text}");
        let schemes = &document["components"]["securitySchemes"];
        assert_eq!(schemes["token"]["scheme"], "bearer");
        assert_eq!(schemes["certificate"]["type"], "mutualTLS");
    }
}
