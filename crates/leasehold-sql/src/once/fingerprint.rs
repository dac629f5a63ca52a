//! What was asked for under a key, so that the same key with another request is noticed.
//!
//! It is kept where the table has room for it, in the attempt's id, and so the table is as it was: an id is 32
//! hexadecimal digits, or `=`, 15 digits of chance and 16 of the request's SHA-256. Versions that
//! know nothing of this compare ids as a whole, which both are good for.

use leasehold_core::{ClaimId, Error, ErrorKind, Result};
use sha2::{Digest as _, Sha256};

/// What an id begins with that has one.
const MARK: char = '=';
/// How many digits are chance; the others are the fingerprint.
const CHANCE: usize = 15;

/// Of what was asked for, if the caller said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Fingerprint(Option<String>);

impl Fingerprint {
    pub(super) fn of(request: &[u8]) -> Self {
        let digest = Sha256::digest(request);
        Self(Some(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The id of an attempt of this request.
    pub(super) fn attempt_id(&self, chance: ClaimId) -> String {
        let chance = chance.to_hex();
        match &self.0 {
            Some(digits) => format!("{MARK}{}{digits}", &chance[..CHANCE]),
            None => chance,
        }
    }

    /// What a transaction writes there: nobody renews, so there is no id.
    pub(super) fn without_attempt(&self) -> String {
        let nobody = || self.attempt_id(ClaimId::from_u128(0));
        self.0.as_ref().map_or_else(String::new, |_| nobody())
    }

    /// Refuses a request that is another than the one that the row was made for. Where either did not say
    /// what it asked for, nothing is known.
    pub(super) fn check(&self, id_there: &str) -> Result<()> {
        let there = id_there.strip_prefix(MARK).and_then(|rest| rest.get(CHANCE..));
        match (&self.0, there) {
            (Some(ours), Some(there)) if ours != there => {
                let what = "this key was already used for another request";
                Err(Error::new(ErrorKind::Mismatch, what)
                    .with_hint("use a new key for each request"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_that_are_known_can_differ() {
        let (none, a, b) = (Fingerprint::default(), Fingerprint::of(b"a"), Fingerprint::of(b"b"));
        let chance = ClaimId::random().unwrap();
        for ours in [&none, &a, &b] {
            for there in [&none, &a, &b] {
                let differ = *ours != none && *there != none && ours != there;
                for id in [there.attempt_id(chance), there.without_attempt()] {
                    assert!(id.len() <= 32, "{id}");
                    assert_eq!(ours.check(&id).is_err(), differ, "{ours:?} {id}");
                }
            }
        }
        assert_eq!(none.attempt_id(chance), chance.to_hex());
        assert_ne!(a.attempt_id(chance), a.attempt_id(ClaimId::random().unwrap()));
        // As sha256sum says it.
        assert!(a.without_attempt().ends_with("ca978112ca1bbdca"), "{}", a.without_attempt());
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn whatever_stands_there_is_no_reason_to_panic(id in testbed::texts(&["=00000000000000012345678901234567"])) {
            let _ = Fingerprint::of(b"a").check(&id);
        }
    }
}
