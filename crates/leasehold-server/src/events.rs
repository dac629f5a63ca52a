//! `GET /v1/events`: hints that queues may have changed, and that claims should be polled.
//!
//! **No change is missed.** The stream subscribes at the store before it sends `ready`, and a
//! client polls after `ready`. Every event is only a hint to poll.

use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use leasehold_core::store::{Follow, Queues, Wakeup};
use leasehold_http::wire::{EVENT_STREAM, EventsQuery, JSON_LINES, PING_EVERY, ServiceEvent};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::access::{Caller, Right};
use crate::problem::{Failure, draining, invalid};
use crate::request::Query;
use crate::service::{Service, drained};
use crate::stream::{Events, Format, stream};

/// The interval of `changed` events if the store does not report changes.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// The minimum interval between two reports of changes.
const PAUSE: Duration = Duration::from_millis(5);

/// `GET /v1/events`.
#[utoipa::path(
    get,
    path = "/v1/events",
    operation_id = "events",
    summary = "Report changes of queues, and evictions",
    params(EventsQuery),
    responses((status = 200, description = "A stream with one JSON object per line, or Server-Sent Events", content((ServiceEvent = JSON_LINES), (ServiceEvent = EVENT_STREAM)))),
)]
pub(crate) async fn events(
    State(service): State<Service>,
    caller: Caller,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let queues = match (query.name, query.prefix) {
        (Some(name), None) => {
            caller.check(Right::Inspect, &name)?;
            Some(Queues::Of(name))
        }
        (None, Some(prefix)) => {
            caller.check_all(Right::Inspect, &prefix)?;
            Some(Queues::All(prefix))
        }
        (None, None) => None,
        (Some(_), Some(_)) => {
            return Err(invalid("name and prefix cannot be used together", "leave one out"));
        }
    };
    if service.is_draining() {
        return Err(draining());
    }
    let streaming = caller.open_stream()?;
    let asks = service.asks();
    let changes = match queues {
        Some(queues) => Some(match service.read(service.store().follow(&queues)).await? {
            Some(follow) if service.store().guarantees().followed == Wakeup::Push => {
                LockChanges::Pushed(follow)
            }
            _ => LockChanges::Polled(every(POLL_EVERY)),
        }),
        None => None,
    };
    let (events, response) = stream(Format::of(&headers));
    tokio::spawn(async move {
        let _streaming = streaming;
        report(&service, &caller, &events, changes, asks).await;
    });
    Ok(response)
}

/// The source of changes.
enum LockChanges {
    Pushed(Follow),
    Polled(Interval),
}

impl LockChanges {
    async fn next(&mut self) {
        match self {
            Self::Pushed(follow) => follow.changed().await,
            Self::Polled(interval) => {
                interval.tick().await;
            }
        }
    }
}

fn every(time: Duration) -> Interval {
    let mut interval = interval(time);
    interval.reset();
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

async fn report(
    service: &Service,
    caller: &Caller,
    events: &Events,
    mut changes: Option<LockChanges>,
    mut asks: tokio::sync::broadcast::Receiver<String>,
) {
    let mut draining = service.draining();
    let mut pings = every(PING_EVERY / 2);
    if !events.send(&ServiceEvent::Ready) {
        return;
    }
    loop {
        let changed = async {
            match &mut changes {
                Some(changes) => changes.next().await,
                None => std::future::pending().await,
            }
        };
        let sent = tokio::select! {
            () = events.closed() => return,
            () = changed => {
                let sent = events.send(&ServiceEvent::Changed);
                // Many changes in a row are reported once, so that they do not fill the stream's
                // buffer.
                tokio::time::sleep(PAUSE).await;
                sent
            }
            ask = asks.recv() => match ask {
                Ok(handle) => events.send(&ServiceEvent::Ask { handle }),
                // Some evictions were missed. The clients find out at their next renewal.
                Err(RecvError::Lagged(_)) => true,
                Err(RecvError::Closed) => return,
            },
            _ = pings.tick() => {
                service.access().still_accepts(caller) && events.send(&ServiceEvent::Ping)
            }
            () = drained(&mut draining) => {
                events.send(&ServiceEvent::Draining);
                return;
            }
        };
        if !sent {
            return;
        }
    }
}
