//! Streaming responses: JSON lines or Server-Sent Events.
//!
//! A stream has a bounded buffer. If it is full, the client reads too slowly, and the stream ends.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use leasehold_http::wire::{EVENT_STREAM, JSON_LINES};
use serde::Serialize;
use tokio::sync::mpsc;

/// The number of events that are buffered for a client that does not read.
const BUFFER: usize = 32;

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Lines,
    ServerSent,
}

impl Format {
    /// Returns the format that the client accepts.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
        match accept.is_some_and(|accept| accept.contains(EVENT_STREAM)) {
            true => Self::ServerSent,
            false => Self::Lines,
        }
    }
}

/// The sender of a stream.
#[derive(Debug)]
pub(crate) struct Events {
    sender: mpsc::Sender<Bytes>,
    format: Format,
}

/// Creates a stream, and the response that sends it.
pub(crate) fn stream(format: Format) -> (Events, Response) {
    let (sender, receiver) = mpsc::channel(BUFFER);
    let content_type = match format {
        Format::Lines => JSON_LINES,
        Format::ServerSent => EVENT_STREAM,
    };
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-store"),
        // nginx would buffer events before it forwards them.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let body = Body::from_stream(Receiver(receiver));
    (Events { sender, format }, (headers, body).into_response())
}

impl Events {
    /// Sends an event. Returns `false` if the client is gone or reads too slowly. The stream must
    /// then end.
    pub(crate) fn send(&self, event: &impl Serialize) -> bool {
        #[derive(Serialize)]
        struct Timed<'a, T> {
            time: f64,
            #[serde(flatten)]
            event: &'a T,
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let Ok(json) = serde_json::to_value(Timed { time, event }) else { return false };
        let text = match self.format {
            Format::Lines => format!("{json}\n"),
            Format::ServerSent => {
                let name = json["event"].as_str().unwrap_or("message").to_owned();
                format!("event: {name}\ndata: {json}\n\n")
            }
        };
        self.sender.try_send(text.into()).is_ok()
    }

    /// Waits until the client is gone.
    pub(crate) async fn closed(&self) {
        self.sender.closed().await;
    }
}

struct Receiver(mpsc::Receiver<Bytes>);

impl Stream for Receiver {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use leasehold_http::wire::ServiceEvent;

    use super::*;

    #[test]
    fn a_client_that_does_not_read_is_disconnected() {
        let (events, response) = stream(Format::Lines);
        for _ in 0..BUFFER {
            assert!(events.send(&ServiceEvent::Ping));
        }
        assert!(!events.send(&ServiceEvent::Ping), "the buffer grows");
        drop(response);
        assert!(!events.send(&ServiceEvent::Ping));
        let closed = pin!(events.closed());
        assert!(closed.poll(&mut Context::from_waker(std::task::Waker::noop())).is_ready());
    }
}
