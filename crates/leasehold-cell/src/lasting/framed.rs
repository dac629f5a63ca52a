//! Encodes a cell into an object and decodes it. No I/O.
//!
//! ```text
//! leasehold object 1 DIGITS lasting       does not expire; the cell's value follows
//! leasehold object 1 DIGITS 20000 ms      expires after that time; the cell's value follows
//! leasehold object 1 DIGITS over          was removed
//! ```
//!
//! The digits identify the write. The first 16 are random, because an `ETag` is often a checksum of
//! the content, so a version could otherwise be reused. They are followed by the first digits of
//! the write that was replaced, of the write before it, and so on. So a client whose write was
//! refused can compare the object's digits with its own ([`kin`]):
//!
//! - *The same digits.* The write was done. A proxy or the store repeated it, and the repetition
//!   was refused.
//! - *Our digits are among the predecessors.* The write was probably done, and another client has
//!   written since. Eight digits can agree by chance, so a grant never depends on this.
//! - *The write that ours was to replace made the object, or is a predecessor.* Our write was not
//!   done.
//! - *None of these.* More writes than are listed have been done since, and it is unknown whether
//!   ours was one of them.
//!
//! Objects of earlier versions have 32 digits and list two predecessors.

use std::time::Duration;

use leasehold_core::{ClaimId, Error, ErrorKind, Result};

use super::aging::Life;
use crate::text::later;

const START: &str = "leasehold object 1 ";
/// Maximum length of the first line, with its end.
pub(crate) const LONGEST: usize = START.len() + DIGITS + 1 + 20 + 3 + 1;

/// Number of digits that are listed per predecessor.
const TAG: usize = 8;
/// Number of a write's own digits.
const OWN: usize = 16;
/// Number of listed predecessors.
const KEPT: usize = 14;
/// Number of digits of this write and of its listed predecessors.
const DIGITS: usize = OWN + KEPT * TAG;

/// Returns the object that replaces the write `parent`, and the digits of this write.
pub(crate) fn written(value: &[u8], life: Life, parent: &str) -> Result<(Vec<u8>, String)> {
    let mut nonce = ClaimId::random()?.to_hex();
    nonce.truncate(OWN);
    if are_digits(parent) {
        nonce.push_str(&parent[..TAG]);
        nonce.push_str(&parent[OWN..]);
    }
    let nonce = format!("{nonce:0<DIGITS$.DIGITS$}");
    let life = match life {
        Life::Lasting => "lasting".to_owned(),
        Life::Short(life) => format!("{} ms", life.as_millis()),
        Life::Over => "over".to_owned(),
    };
    let mut text = format!("{START}{nonce} {life}\n").into_bytes();
    text.extend_from_slice(value);
    Ok((text, nonce))
}

/// The relation of an object to a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kin {
    /// The write made the object.
    Same,
    /// The object was written after that write, or may have been.
    Successor,
    /// The write made neither the object nor one of its predecessors.
    Other,
}

/// Returns the relation of an object with the digits `there` to the write `ours`.
pub(crate) fn kin(there: &str, ours: &str) -> Kin {
    if !are_digits(there) || !are_digits(ours) {
        return Kin::Other;
    }
    let is_before =
        |tag: &str| there[..TAG] == *tag || predecessors(there).any(|before| before == tag);
    let replaced = predecessors(ours).next();
    match there == ours {
        true => Kin::Same,
        false if is_before(&ours[..TAG]) => Kin::Successor,
        false if replaced.is_some_and(is_before) => Kin::Other,
        false => Kin::Successor,
    }
}

/// Returns the first digits of the predecessors, latest first.
fn predecessors(digits: &str) -> impl Iterator<Item = &str> {
    (OWN..digits.len()).step_by(TAG).map(|at| &digits[at..at + TAG])
}

/// Returns whether the text consists of the digits of a write by this or an earlier version of
/// leasehold.
fn are_digits(text: &str) -> bool {
    let is_length = (2 * OWN..=DIGITS).contains(&text.len()) && text.len().is_multiple_of(TAG);
    is_length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the digits of the write that made this object, or an empty text if another program wrote
/// it.
pub(crate) fn nonce(object: &[u8]) -> &str {
    let line = object.strip_prefix(START.as_bytes()).unwrap_or_default();
    let digits = line.split(|&byte| byte == b' ').next().unwrap_or_default();
    std::str::from_utf8(digits).ok().filter(|digits| are_digits(digits)).unwrap_or_default()
}

/// Decodes an object that [`written`] created.
///
/// # Errors
/// [`ErrorKind::Corrupt`]: another program or a newer version wrote the object.
pub(crate) fn read(object: &[u8]) -> Result<(Life, &[u8])> {
    parsed(object).ok_or_else(|| {
        let line = object.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let line = std::str::from_utf8(line).unwrap_or_default();
        later(line, "leasehold object ").unwrap_or_else(foreign)
    })
}

/// Returns the error for an object that another program wrote.
pub(crate) fn foreign() -> Error {
    let what = "the value of this key belongs to another program; it was left unchanged";
    Error::new(ErrorKind::Corrupt, what).with_hint("set another prefix or folder in the URL")
}

fn parsed(object: &[u8]) -> Option<(Life, &[u8])> {
    let end = object.iter().take(LONGEST).position(|&byte| byte == b'\n')?;
    let (line, value) = (std::str::from_utf8(&object[..end]).ok()?, &object[end + 1..]);
    let (nonce, life) = line.strip_prefix(START)?.split_once(' ')?;
    if !are_digits(nonce) {
        return None;
    }
    let life = match life {
        "lasting" => Life::Lasting,
        "over" => Life::Over,
        _ => Life::Short(Duration::from_millis(life.strip_suffix(" ms")?.parse().ok()?)),
    };
    Some((life, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_read_back_and_every_write_is_unique() {
        let longest = Life::Short(Duration::from_millis(u64::MAX));
        for life in [Life::Lasting, Life::Over, Life::Short(Duration::from_millis(1)), longest] {
            let [(one, nonce), (other, _)] = [(); 2].map(|()| written(b"a\nb", life, "").unwrap());
            assert_eq!(parsed(&one), Some((life, &b"a\nb"[..])));
            assert_eq!(self::nonce(&one), nonce);
            assert_ne!(one, other);
            assert!(one.len() <= LONGEST + 3);
        }
    }

    #[test]
    fn write_is_recognized_in_its_object_and_in_successors() {
        let next = |parent: &str| written(b"", Life::Lasting, parent).unwrap().1;
        let first = next("");
        let second = next(&first);
        let third = next(&second);
        let fourth = next(&third);
        let ours = [Kin::Same, Kin::Successor, Kin::Successor, Kin::Successor];
        assert_eq!([&first, &second, &third, &fourth].map(|there| kin(there, &first)), ours);
        assert_eq!(kin(&first, &second), Kin::Other, "a predecessor was taken for a successor");
        // Another write has replaced the same predecessor. So ours was never done, whatever was
        // written since.
        let mut rival = next(&first);
        for _ in 0..KEPT {
            assert_eq!(kin(&rival, &second), Kin::Other);
            rival = next(&rival);
        }
        // The common predecessor is not listed any more.
        assert_eq!(
            kin(&rival, &second),
            Kin::Successor,
            "an unknown relation must count as a possible successor"
        );
    }

    #[test]
    fn objects_of_earlier_versions_are_read_and_replaced() {
        let earlier = "0123456789abcdef0123456789abcdef";
        let object = format!("{START}{earlier} lasting\nvalue");
        assert_eq!(parsed(object.as_bytes()), Some((Life::Lasting, &b"value"[..])));
        assert_eq!(nonce(object.as_bytes()), earlier);
        let (_, next) = written(b"", Life::Lasting, earlier).unwrap();
        assert_eq!((next.len(), kin(&next, earlier)), (DIGITS, Kin::Successor));
        let before: Vec<_> = predecessors(&next).take(3).collect();
        assert_eq!(before, ["01234567", "01234567", "89abcdef"]);
    }

    #[test]
    fn foreign_objects_are_never_related_to_ours() {
        let (_, first) = written(b"", Life::Lasting, "").unwrap();
        for foreign in ["", "leasehold object 1 \u{e9}", "leasehold fence 1 7\n"] {
            assert_eq!(nonce(foreign.as_bytes()), "");
            assert_eq!(kin(foreign, &first), Kin::Other);
        }
    }

    // S90
    #[test]
    fn foreign_objects_are_not_parsed() {
        let digits = "0".repeat(32);
        for foreign in [
            String::new(),
            "hello\nworld".into(),
            "leasehold object 1 abc lasting\n".into(),
            format!("leasehold object 2 {digits} lasting\n"),
            format!("leasehold object 1 {digits} for ever\n"),
            format!("leasehold object 1 {digits} 99999999999999999999 ms\n"),
            format!("leasehold object 1 {digits} lasting"),
        ] {
            assert_eq!(parsed(foreign.as_bytes()), None, "{foreign}");
        }
    }

    // F44
    #[test]
    fn newer_format_version_is_reported() {
        let message = |object: &[u8]| read(object).unwrap_err().to_string();
        assert!(message(b"leasehold object 2 anything\nvalue").contains("upgrade this leasehold"));
        assert!(message(b"leasehold object x anything\nvalue").contains("prefix or folder"));
        assert!(message(&[0xff; 40]).contains("prefix or folder"));
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_object_is_read_or_refused(text in testbed::texts(&[
            "leasehold object 1 0123456789abcdef0123456789abcdef 20000 ms\nvalue",
        ])) {
            let _ = read(text.as_bytes());
        }
    }
}
