//! How a frozen lock is marked: the label of the claim that is left in its queue says that it was frozen, and why.

use leasehold::store::{ClaimInfo, LockInfo, Standing};

use crate::exit::{Failure, USAGE};

/// How the label begins.
const FROZEN: &str = "frozen";
/// How much of a reason fits into a label after that.
const LONGEST_REASON: usize = 240;

/// The label of a claim that freezes a lock for this reason.
pub(crate) fn label(reason: Option<&str>) -> Result<String, Failure> {
    match reason {
        None | Some("") => Ok(FROZEN.to_owned()),
        Some(reason) if reason.len() > LONGEST_REASON => {
            let what = format!(
                "the --reason is too long: {} bytes, at most {LONGEST_REASON} are allowed",
                reason.len()
            );
            Err(Failure::new(USAGE, what))
        }
        Some(reason) => Ok(format!("{FROZEN}: {reason}")),
    }
}

/// Why the lock is frozen, if this claim freezes it. The reason may be empty.
pub(crate) fn reason(claim: &ClaimInfo) -> Option<&str> {
    let rest = claim.holder.label.strip_prefix(FROZEN)?;
    let reason = if rest.is_empty() { Some("") } else { rest.strip_prefix(": ") };
    reason.filter(|_| claim.standing == Standing::Departed)
}

/// Whether the lock has no holder because it is frozen.
pub(crate) fn is_frozen(lock: &LockInfo) -> bool {
    lock.holders().next().is_none() && lock.claims.iter().any(|claim| reason(claim).is_some())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::Holder;

    use super::*;

    #[test]
    fn a_reason_is_read_as_it_was_given_but_not_from_a_holder() {
        let claim = |standing, label: &str| {
            let holder = Holder { host: "h".into(), pid: 1, label: label.into() };
            ClaimInfo::new(standing, holder, None, 1, Duration::ZERO, None)
        };
        for why in ["", "x", ": y", "frozen"] {
            let label = label(Some(why)).unwrap();
            assert_eq!(reason(&claim(Standing::Departed, &label)), Some(why));
            assert_eq!(reason(&claim(Standing::Holding, &label)), None);
        }
        assert_eq!(reason(&claim(Standing::Departed, "frozenfish")), None);
        assert_eq!(reason(&claim(Standing::Departed, "nightly")), None);
        assert_eq!(label(Some(&"x".repeat(241))).unwrap_err().code, USAGE);
    }
}
