//! Streams of server-sent events: evictions, and changes of queues.
//!
//! Every event is a hint that the receiver should poll. The stream may break, and events may be
//! lost or arrive twice. After each [`Ready`](ServiceEvent::Ready), the receivers poll what they
//! follow, because earlier changes were not reported. A stream that sends nothing for [`SILENCE`]
//! is replaced, because the server sends a ping at least every [`PING_EVERY`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use leasehold_core::{Error, ErrorKind, Result};
use tokio::time::{sleep, timeout};

use super::fault::unreachable;
use super::replicas::{Replicas, Request};
use crate::wire::{PING_EVERY, ServiceEvent};

/// How long a stream may send nothing before it is replaced.
const SILENCE: Duration = PING_EVERY.saturating_mul(3);
/// The pause before a stream is opened again: the first and the longest one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// The longest event, in bytes.
const LONGEST: usize = 64 * 1024;

/// Returns the request for a stream of the events that `query` selects.
pub(super) fn request(query: &str) -> Request {
    let path = if query.is_empty() { String::new() } else { format!("?{query}") };
    Request {
        method: Method::GET,
        path: format!("/v1/events{path}"),
        body: Bytes::new(),
        repeatable: true,
    }
}

/// Receives events until the task is aborted. Opens the stream again whenever it breaks.
///
/// `first` is a stream that is already open.
pub(super) async fn receive(
    replicas: Arc<Replicas>,
    request: Request,
    mut first: Option<Events>,
    on_event: impl Fn(ServiceEvent) + Send,
) {
    let mut pause = PAUSE.0;
    loop {
        let opened = match first.take() {
            Some(events) => Ok(events),
            None => Events::open(&replicas, &request).await,
        };
        if let Ok(mut events) = opened {
            while let Ok(event) = events.next(&replicas).await {
                pause = PAUSE.0;
                if event == ServiceEvent::Draining {
                    // New streams are accepted by the next replica.
                    replicas.leave(events.generation);
                    break;
                }
                on_event(event);
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// An open event stream.
pub(super) struct Events {
    generation: u64,
    body: Incoming,
    parser: Parser,
}

impl Events {
    /// Opens a stream. A replica that cannot be reached is not used by later requests.
    pub(super) async fn open(replicas: &Replicas, request: &Request) -> Result<Self> {
        match replicas.stream(request).await {
            Ok((generation, body)) => Ok(Self { generation, body, parser: Parser::default() }),
            Err((generation, error)) => {
                if error.is_transient() {
                    replicas.leave(generation);
                }
                Err(error)
            }
        }
    }

    /// Returns the next event.
    pub(super) async fn next(&mut self, replicas: &Replicas) -> Result<ServiceEvent> {
        loop {
            if let Some(event) = self.parser.next()? {
                return Ok(event);
            }
            let frame = tokio::select! {
                biased;
                frame = timeout(SILENCE, self.body.frame()) => frame,
                () = replicas.left(self.generation) => return Err(ended()),
            };
            let frame = frame.map_err(|_| Error::no_reply(SILENCE))?;
            let frame = frame.ok_or_else(ended)?;
            let frame = frame.map_err(|why| unreachable("the event stream broke", &why))?;
            replicas.has_answered(self.generation);
            if let Ok(data) = frame.into_data() {
                self.parser.take_in(&data)?;
            }
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Unreachable, "the event stream ended")
}

/// Parser of a stream of server-sent events.
#[derive(Debug, Default)]
struct Parser {
    bytes: Vec<u8>,
    /// The data of the event that has begun.
    data: String,
}

impl Parser {
    fn take_in(&mut self, bytes: &[u8]) -> Result<()> {
        if self.bytes.len() + self.data.len() > LONGEST {
            let what = "the server sent an event that is too long";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the next event, if all of it has arrived. Skips events that this version does not
    /// know.
    fn next(&mut self) -> Result<Option<ServiceEvent>> {
        while let Some(end) = self.bytes.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\n', '\r']);
            if let Some(data) = line.strip_prefix("data:") {
                self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
            } else if line.is_empty() && !self.data.is_empty() {
                let data = std::mem::take(&mut self.data);
                match serde_json::from_str(&data) {
                    Ok(ServiceEvent::Other) | Err(_) => {}
                    Ok(event) => return Ok(Some(event)),
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_the_stream_is_split() {
        let text = "event: ready\ndata: {\"event\":\"ready\"}\n\n: comment\n\ndata:{\"event\":\r\n\
                    data:\"ask\",\"handle\":\"h\"}\r\n\r\ndata: {\"event\":\"new\"}\n\n\
                    data: nonsense\n\ndata: {\"event\":\"changed\"}\n\n";
        let expected =
            [ServiceEvent::Ready, ServiceEvent::Ask { handle: "h".into() }, ServiceEvent::Changed];
        for size in [1, 2, 7, text.len()] {
            let (mut parser, mut events) = (Parser::default(), Vec::new());
            for piece in text.as_bytes().chunks(size) {
                parser.take_in(piece).unwrap();
                events.extend(std::iter::from_fn(|| parser.next().unwrap()));
            }
            assert_eq!(events, expected, "{size} bytes at a time");
        }
    }

    #[test]
    fn endless_event_is_an_error() {
        let mut parser = Parser::default();
        let piece = [b'x'; 1024];
        let refused = (0..1024).find_map(|_| parser.take_in(&piece).err());
        assert_eq!(refused.unwrap().kind(), ErrorKind::Corrupt);
    }
}
