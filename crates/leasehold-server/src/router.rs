//! The routes of the service.

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post, put};

use crate::service::Service;
use crate::{claims, events, hold, locks, metrics, openapi, page, request};

impl Service {
    /// Returns the routes, for a web service of your own.
    ///
    /// In that service, every request needs a token, unless the access is
    /// [open](crate::Access::open). Nest the routes below a path of their own, because they include
    /// the page at `/`.
    pub fn router(&self) -> Router {
        let calls = Router::new()
            .route("/metrics", get(metrics::metrics))
            .route("/v1/store", get(locks::store))
            .route("/v1/doctor", get(locks::doctor))
            .route("/v1/check", get(locks::check))
            .route("/v1/events", get(events::events))
            .route("/v1/claims", post(claims::join))
            .route("/v1/claims/renew", post(claims::renew_many))
            .route("/v1/claims/{id}", put(claims::renew).get(claims::wait).delete(claims::leave))
            .route("/v1/claims/{id}/weight", post(claims::convert))
            .route("/v1/locks", get(locks::list))
            .route("/v1/locks/{name}", get(locks::show))
            .route("/v1/locks/{name}/holders", get(locks::holders))
            .route("/v1/locks/{name}/why", get(locks::why))
            .route("/v1/locks/{name}/history", get(locks::history))
            .route("/v1/locks/{name}/evict", post(locks::evict))
            .route("/v1/locks/{name}/freeze", post(locks::freeze))
            .route("/v1/locks/{name}/unfreeze", post(locks::unfreeze))
            .route("/v1/locks/{name}/hold", post(hold::hold))
            .fallback(request::not_found)
            .method_not_allowed_fallback(request::not_allowed)
            .layer(from_fn_with_state(self.clone(), request::identify));
        Router::new()
            .route("/", get(page::page))
            .route("/openapi.json", get(openapi::openapi))
            .route("/healthz", get(locks::healthz))
            .route("/readyz", get(locks::readyz))
            .merge(calls)
            .layer(from_fn_with_state(self.clone(), request::log))
            .with_state(self.clone())
    }
}
