//! Spans of [`tracing`](https://docs.rs/tracing) (feature `tracing`) for waits, holds and calls of
//! the store. Without the feature, everything here compiles to nothing.
//!
//! A wait is a scope of code (the future that acquires the lock), and its span is an ordinary one.
//! A hold is not a scope, because a guard moves between tasks and threads. So no code ever runs
//! *inside* its span. The span is opened where the lock was acquired, as a sibling of the wait. It
//! is closed when the lock is released or lost. It contains only the store's calls for this hold. A
//! batch of renewals is for many holds, and has a separate span.

#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use crate::types::claim::Claim;
use crate::types::name::Name;
use crate::types::token::Token;

#[cfg(feature = "tracing")]
use super::telemetry::TARGET;
#[cfg(feature = "tracing")]
use tracing::{Instrument, Span};

/// Wraps an acquisition in a span, whether or not it waits.
#[cfg(feature = "tracing")]
pub(crate) fn wait<F: Future>(
    operation: &'static str,
    name: &Result<Name, String>,
    asking: F,
) -> impl Future<Output = F::Output> {
    let span = match name {
        Ok(name) => tracing::debug_span!(target: TARGET, "wait", operation, %name),
        Err(name) => tracing::debug_span!(target: TARGET, "wait", operation, ?name),
    };
    asking.instrument(span)
}

#[cfg(not(feature = "tracing"))]
pub(crate) fn wait<F: Future>(
    operation: &'static str,
    name: &Result<Name, String>,
    asking: F,
) -> F {
    asking
}

/// Wraps a call of the store in a span, inside the caller's current span.
#[cfg(feature = "tracing")]
pub(crate) fn call<F: Future>(what: &'static str, call: F) -> impl Future<Output = F::Output> {
    call.instrument(tracing::trace_span!(target: TARGET, "call", what))
}

#[cfg(not(feature = "tracing"))]
pub(crate) fn call<F: Future>(what: &'static str, call: F) -> F {
    call
}

/// The span of a hold.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    #[cfg(feature = "tracing")]
    span: std::sync::Mutex<Option<Span>>,
}

impl Holding {
    /// Opens the span. Call it where the lock was acquired, in the caller's span.
    pub(crate) fn begins(&self, claim: &Claim, token: Token) {
        #[cfg(feature = "tracing")]
        {
            let (name, kind) = (&claim.name, claim.kind);
            let span = tracing::debug_span!(target: TARGET, "hold", %name, %kind, %token);
            crate::util::locked::locked(&self.span).get_or_insert(span);
        }
    }

    /// Closes the span when the lock is released or lost. Closing it twice has no effect.
    pub(crate) fn ends(&self) {
        #[cfg(feature = "tracing")]
        drop(crate::util::locked::locked(&self.span).take());
    }

    /// Wraps a store call for this hold in a span.
    #[cfg(feature = "tracing")]
    pub(crate) fn call<F: Future>(
        &self,
        what: &'static str,
        call: F,
    ) -> impl Future<Output = F::Output> {
        let hold = crate::util::locked::locked(&self.span).clone();
        let span = match hold {
            Some(hold) => tracing::trace_span!(target: TARGET, parent: &hold, "call", what),
            None => tracing::trace_span!(target: TARGET, "call", what),
        };
        call.instrument(span)
    }

    #[cfg(not(feature = "tracing"))]
    pub(crate) fn call<F: Future>(&self, what: &'static str, call: F) -> F {
        call
    }
}
