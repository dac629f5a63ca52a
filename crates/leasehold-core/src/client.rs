//! What the locks of one client share: its background thread, the claims that it keeps alive, and
//! its telemetry.

pub(crate) mod ask;
pub(crate) mod background;
pub(crate) mod core;
mod ids;
#[cfg(feature = "metrics")]
mod labels;
pub(crate) mod lease;
pub(crate) mod leave;
#[cfg(feature = "metrics")]
mod oldest;
pub(crate) mod pending_releases;
pub(crate) mod renewer;
mod schedule;
pub(crate) mod spans;
pub mod telemetry;
pub(crate) mod waiting;
mod weight;
