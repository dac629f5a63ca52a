//! A digest of the request that was made under a key, to detect reuse of the key for another
//! request.
//!
//! The digest is stored in the attempt's ID, so the table needs no new column. An ID consists of 32
//! hexadecimal digits, or of `=`, 15 random digits and 16 digits of the request's SHA-256. Versions
//! without fingerprints compare IDs as a whole, which works for both forms.

use leasehold_core::{ClaimId, Error, ErrorKind, Result};
use sha2::{Digest as _, Sha256};

/// The first character of an ID that contains a fingerprint.
const MARK: char = '=';
/// The number of random digits. The other digits are the fingerprint.
const CHANCE: usize = 15;

/// The fingerprint of the request, if the caller set one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Fingerprint(Option<String>);

impl Fingerprint {
    pub(super) fn of(request: &[u8]) -> Self {
        let digest = Sha256::digest(request);
        Self(Some(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Returns the ID for an attempt at this request.
    pub(super) fn attempt_id(&self, chance: ClaimId) -> String {
        let chance = chance.to_hex();
        match &self.0 {
            Some(digits) => format!("{MARK}{}{digits}", &chance[..CHANCE]),
            None => chance,
        }
    }

    /// Returns the ID that a transaction writes. Its random digits are zeros, because no attempt
    /// renews it. Without a fingerprint, the ID is empty.
    pub(super) fn without_attempt(&self) -> String {
        let nobody = || self.attempt_id(ClaimId::from_u128(0));
        self.0.as_ref().map_or_else(String::new, |_| nobody())
    }

    /// Rejects a request that differs from the one for which the row was created. If either request
    /// has no fingerprint, nothing is compared.
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
    fn only_two_known_fingerprints_can_differ() {
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
        // The same digits as in the output of sha256sum.
        assert!(a.without_attempt().ends_with("ca978112ca1bbdca"), "{}", a.without_attempt());
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_stored_id_is_checked_without_a_panic(id in testbed::texts(&["=00000000000000012345678901234567"])) {
            let _ = Fingerprint::of(b"a").check(&id);
        }
    }
}
