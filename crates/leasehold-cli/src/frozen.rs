//! The label of the claim that freezes a lock. It contains the reason.

use leasehold::store::kit::frozen_label;
use leasehold::store::{ClaimInfo, LockInfo};

use crate::exit::{Failure, USAGE};

/// Maximum length of a reason, so that it fits into a label.
const LONGEST_REASON: usize = 240;

/// Returns the label of a claim that freezes a lock for this reason.
pub(crate) fn label(reason: Option<&str>) -> Result<String, Failure> {
    let reason = reason.unwrap_or_default();
    if reason.len() > LONGEST_REASON {
        let length = reason.len();
        let what = format!("the --reason is too long: {length} bytes (maximum: {LONGEST_REASON})");
        return Err(Failure::new(USAGE, what));
    }
    Ok(frozen_label(reason))
}

/// Returns why the lock is frozen, if this claim freezes it. The reason may be empty.
pub(crate) fn reason(claim: &ClaimInfo) -> Option<&str> {
    claim.frozen()
}

/// Returns whether the lock has no holder because it is frozen.
pub(crate) fn is_frozen(lock: &LockInfo) -> bool {
    lock.holders().next().is_none() && lock.claims.iter().any(|claim| reason(claim).is_some())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::Holder;
    use leasehold::store::ClaimState;

    use super::*;

    #[test]
    fn freeze_reason_is_read_back_except_from_a_holder() {
        let claim = |claim_state, label: &str| {
            let holder = Holder { host: "h".into(), pid: 1, label: label.into() };
            ClaimInfo::new(claim_state, holder, None, 1, Duration::ZERO, None)
        };
        for why in ["", "x", ": y", "frozen"] {
            let label = label(Some(why)).unwrap();
            assert_eq!(reason(&claim(ClaimState::Cooldown, &label)), Some(why));
            assert_eq!(reason(&claim(ClaimState::Holding, &label)), None);
        }
        assert_eq!(reason(&claim(ClaimState::Cooldown, "frozenfish")), None);
        assert_eq!(reason(&claim(ClaimState::Cooldown, "nightly")), None);
        assert_eq!(label(Some(&"x".repeat(241))).unwrap_err().code, USAGE);
    }
}
