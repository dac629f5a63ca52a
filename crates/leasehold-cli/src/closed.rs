//! What a closed lock says of itself: that somebody closed it, and why. It is the label of the claim that is kept
//! in its queue.

use leasehold::store::{ClaimInfo, Standing};

use crate::exit::{Failure, USAGE};

/// What the label begins with.
const CLOSED: &str = "closed";
/// How much of a reason fits into a label beside that.
const LONGEST_REASON: usize = 240;

/// The label of who closes a lock for this reason.
pub(crate) fn label(reason: Option<&str>) -> Result<String, Failure> {
    match reason {
        None | Some("") => Ok(CLOSED.to_owned()),
        Some(reason) if reason.len() > LONGEST_REASON => {
            let what = format!("the reason is longer than {LONGEST_REASON} bytes: shorten it");
            Err(Failure::new(USAGE, what))
        }
        Some(reason) => Ok(format!("{CLOSED}: {reason}")),
    }
}

/// Why somebody closed the lock, if that is what this claim says; empty: without a reason.
pub(crate) fn reason(claim: &ClaimInfo) -> Option<&str> {
    let rest = claim.holder.label.strip_prefix(CLOSED)?;
    let reason = if rest.is_empty() { Some("") } else { rest.strip_prefix(": ") };
    reason.filter(|_| claim.standing == Standing::Departed)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::Holder;

    use super::*;

    #[test]
    fn a_reason_is_read_as_it_was_given_and_from_nobody_who_holds() {
        let claim = |standing, label: &str| {
            let holder = Holder { host: "h".into(), pid: 1, label: label.into() };
            ClaimInfo::new(standing, holder, None, 1, Duration::ZERO, None)
        };
        for why in ["", "x", ": y", "closed"] {
            let label = label(Some(why)).unwrap();
            assert_eq!(reason(&claim(Standing::Departed, &label)), Some(why));
            assert_eq!(reason(&claim(Standing::Holding, &label)), None);
        }
        assert_eq!(reason(&claim(Standing::Departed, "closedown")), None);
        assert_eq!(reason(&claim(Standing::Departed, "nightly")), None);
        assert_eq!(label(Some(&"x".repeat(241))).unwrap_err().code, USAGE);
    }
}
