//! `GET /`: the web page for people, which is one file without other resources.
//!
//! The page contains no data and needs no token. Its script asks for a token and sends it with each
//! request. The content security policy allows this script and this style by their hashes, requests
//! to this server, and nothing else.

use std::sync::LazyLock;

use axum::http::HeaderValue;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("page.html");

static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = |tag| STANDARD.encode(Sha256::digest(content(tag)));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; \
         frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        hash("script"),
        hash("style")
    );
    // This cannot fail, because only base64 was inserted. The fallback is strict, because a page
    // without a policy may do everything.
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
});

/// `GET /`.
pub(crate) async fn page() -> Response {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (CONTENT_SECURITY_POLICY, POLICY.clone()),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // The page of a newer server has another script.
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, PAGE).into_response()
}

/// Returns the content of the only element with this tag.
fn content(tag: &str) -> &'static str {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let inner = PAGE.split_once(open.as_str()).map(|(_, rest)| rest);
    inner.and_then(|rest| rest.split_once(close.as_str())).map_or("", |(inner, _)| inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_one_script_and_one_style_and_no_other_resources() {
        for tag in ["script", "style"] {
            assert!(!content(tag).trim().is_empty(), "no <{tag}>");
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "{tag}");
        }
        for forbidden in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "style=\"",
            "onclick=",
            "http://",
            "https://",
            "src=",
            "url(",
            "localStorage",
            "document.cookie",
        ] {
            assert!(!PAGE.contains(forbidden), "the page has {forbidden}");
        }
        assert!(POLICY.to_str().unwrap().contains("script-src 'sha256-"));
    }
}
