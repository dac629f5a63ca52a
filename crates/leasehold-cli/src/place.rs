//! A claim in a lock's queue, in the JSON form that all commands share.

use leasehold::Token;
use leasehold::store::ClaimInfo;
use serde::Serialize;

/// The JSON form of a claim. The fields are documented, and only new ones may be added.
#[derive(Debug, Serialize)]
pub(crate) struct Place<'a> {
    state: &'static str,
    host: &'a str,
    pid: u32,
    label: &'a str,
    token: Option<Token>,
    weight: u32,
    since_seconds: f64,
    remaining_seconds: Option<f64>,
}

impl<'a> Place<'a> {
    pub(crate) fn of(claim: &'a ClaimInfo) -> Self {
        Self {
            state: claim.state.as_str(),
            host: &claim.holder.host,
            pid: claim.holder.pid,
            label: &claim.holder.label,
            token: claim.token,
            weight: claim.weight,
            since_seconds: claim.since.as_secs_f64(),
            remaining_seconds: claim.remaining.map(|left| left.as_secs_f64()),
        }
    }
}
