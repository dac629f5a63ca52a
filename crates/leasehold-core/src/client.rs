//! What the locks of one client share: its thread, the claims that it keeps alive, what it tells.

pub(crate) mod ask;
pub(crate) mod background;
pub(crate) mod core;
mod ids;
pub(crate) mod keeper;
#[cfg(feature = "metrics")]
mod labels;
pub(crate) mod lease;
pub(crate) mod leave;
pub(crate) mod leaving;
#[cfg(feature = "metrics")]
mod oldest;
mod schedule;
pub(crate) mod spans;
pub mod telemetry;
pub(crate) mod waiting;
mod weight;
