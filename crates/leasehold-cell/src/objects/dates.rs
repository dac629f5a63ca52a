//! The date of each answer, handed on to where the answer is read: object_store tells when an object was
//! written, but not by the same clock what time it is.

use async_trait::async_trait;
use chrono::DateTime;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};

/// When the server says that it answered, in seconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Date(pub(super) i64);

/// Makes connections whose answers have a [`Date`] among their extensions.
#[derive(Debug)]
pub(super) struct Dated(pub(super) reqwest::Client);

impl HttpConnector for Dated {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Service(HttpClient::new(self.0.clone()))))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut response = self.0.execute(request).await?;
        let date = response.headers().get("date").and_then(|date| date.to_str().ok());
        if let Some(date) = date.and_then(|date| DateTime::parse_from_rfc2822(date).ok()) {
            response.extensions_mut().insert(Date(date.timestamp()));
        }
        Ok(response)
    }
}
