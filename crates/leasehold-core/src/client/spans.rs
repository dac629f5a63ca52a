//! Spans of [`tracing`](https://docs.rs/tracing) (feature `tracing`): how long a wait and a hold last, and the
//! store's calls in them. Without the feature everything here compiles to nothing.
//!
//! A wait is a scope of code, the future that asks for the lock, and its span is as any other. A hold is none:
//! a guard moves between tasks and threads. So nobody is ever *in* its span; it is opened where the lock was
//! taken, beside the wait, and closed when the lock is released or lost, and only the store's calls for it are under
//! it. A batch of renewals is for many holds, and its span stands alone.

#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use crate::words::claim::Claim;
use crate::words::name::Name;
use crate::words::token::Token;

#[cfg(feature = "tracing")]
use super::telemetry::TARGET;
#[cfg(feature = "tracing")]
use tracing::{Instrument, Span};

/// Asking for a lock, with or without patience.
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

/// A call of the store, within whatever the caller is in.
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
    /// The lock is taken, and its caller is where its span belongs.
    pub(crate) fn begins(&self, claim: &Claim, token: Token) {
        #[cfg(feature = "tracing")]
        {
            let (name, kind) = (&claim.name, claim.kind);
            let span = tracing::debug_span!(target: TARGET, "hold", %name, %kind, %token);
            crate::base::locked::locked(&self.span).get_or_insert(span);
        }
    }

    /// It is released or lost; the second time, nothing.
    pub(crate) fn ends(&self) {
        #[cfg(feature = "tracing")]
        drop(crate::base::locked::locked(&self.span).take());
    }

    /// A call of the store for it.
    #[cfg(feature = "tracing")]
    pub(crate) fn call<F: Future>(
        &self,
        what: &'static str,
        call: F,
    ) -> impl Future<Output = F::Output> {
        let hold = crate::base::locked::locked(&self.span).clone();
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
