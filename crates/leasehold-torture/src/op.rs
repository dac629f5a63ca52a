//! One operation, folded from its events, for the checker and the page.

use std::collections::HashMap;

use super::history::{Ask, Event, History, OpId, Time, What};

/// One operation, folded from its events.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) lock: usize,
    pub(super) weight: u32,
    pub(super) ask: Ask,
    pub(super) invoked: Time,
    /// When it first knew that it waits.
    pub(super) waiting: Option<Time>,
    pub(super) acquired: Option<(Time, u64)>,
    /// The last time at which the guard is known to have reported "held".
    pub(super) held: Option<Time>,
    /// Until when the guard promised to hold, as far as it was checked.
    pub(super) until: Time,
    /// When it was lost, whether by the guard's own clock, and why.
    pub(super) lost: Option<(Time, bool, String)>,
    pub(super) releasing: Option<Time>,
    pub(super) released: Option<Time>,
    pub(super) abandoned: Option<Time>,
    /// When it failed, with the kind of error and its message.
    pub(super) failed: Option<(Time, String, String)>,
    /// When the resources answered.
    pub(super) wrote: Option<Time>,
    /// Whether the unfenced resource accepted its write.
    pub(super) plain: Option<bool>,
    /// Whether the fenced resource accepted its write.
    pub(super) fenced: Option<bool>,
}

impl Op {
    /// Returns all operations, in the order in which they were invoked.
    pub(super) fn fold(events: &[Event]) -> Vec<Self> {
        let mut at: HashMap<OpId, usize> = HashMap::new();
        let mut ops: Vec<Self> = Vec::new();
        for event in events {
            if let What::Invoked { lock, weight, ask } = event.what {
                at.insert(event.op, ops.len());
                ops.push(Self::invoked(event, lock, weight, ask));
            } else if let Some(&i) = at.get(&event.op) {
                ops[i].learn(event);
            }
        }
        ops
    }

    fn invoked(event: &Event, lock: usize, weight: u32, ask: Ask) -> Self {
        Self {
            id: event.op,
            lock,
            weight,
            ask,
            invoked: event.at,
            waiting: None,
            acquired: None,
            held: None,
            until: 0,
            lost: None,
            releasing: None,
            released: None,
            abandoned: None,
            failed: None,
            wrote: None,
            plain: None,
            fenced: None,
        }
    }

    fn learn(&mut self, event: &Event) {
        match &event.what {
            What::Invoked { .. } => {}
            What::Waiting { .. } => self.waiting = self.waiting.or(Some(event.at)),
            What::Acquired { token } => self.acquired = Some((event.at, *token)),
            What::Held { until } => {
                self.held = Some(event.at);
                self.until = self.until.max(*until);
            }
            What::Lost { expired, reason } => {
                self.lost.get_or_insert((event.at, *expired, reason.clone()));
            }
            What::Wrote { plain, fenced } => {
                self.wrote = Some(event.at);
                (self.plain, self.fenced) = (Some(*plain), *fenced);
            }
            What::Releasing => self.releasing = Some(event.at),
            What::Released => self.released = Some(event.at),
            What::Failed { kind, error } => {
                self.failed = Some((event.at, kind.clone(), error.clone()));
            }
            What::Abandoned => self.abandoned = Some(event.at),
        }
    }

    /// Returns whether its end is known.
    pub(super) fn is_over(&self) -> bool {
        self.releasing.is_some() || self.abandoned.is_some() || self.failed.is_some()
    }

    /// Returns the period during which the operation certainly held the lock, from just after the
    /// grant to the earliest possible end. Returns `None` if its guard never reported that it held
    /// the lock.
    pub(super) fn held_beyond_doubt(&self, history: &History) -> Option<(Time, Time)> {
        let (from, _) = self.acquired?;
        let held = self.held?;
        let lost = self.lost.as_ref().map(|(at, expired, _)| end_of_loss(*at, *expired, held));
        let died = history.deaths.get(&self.id.worker).copied();
        let ends = [Some(self.until), lost, self.releasing, died, Some(history.ended)];
        let to = ends.into_iter().flatten().min()?;
        (from < to).then_some((from, to))
    }
}

/// Returns when the hold ended at the earliest. A loss by the guard's own clock happened at the
/// promised time. Any other loss happened at an unknown time after the guard last reported "held".
///
/// This is a function of its own that is not inlined, because rustc 1.95 with optimizations reads
/// `expired` before it has checked that there was a loss. It uses the value to compute an address,
/// and the program crashes.
#[inline(never)]
fn end_of_loss(at: Time, expired: bool, held: Time) -> Time {
    if expired { at } else { held }
}
