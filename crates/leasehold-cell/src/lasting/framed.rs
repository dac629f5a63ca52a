//! PURE: how a cell is written into an object.
//!
//! ```text
//! leasehold object 1 DIGITS lasting       and then the cell's value
//! leasehold object 1 DIGITS 20000 ms      it lives for so long
//! leasehold object 1 DIGITS over          it was removed
//! ```
//!
//! The digits name the write. The first half is random: an `ETag` is often a sum of what is in the object, so that
//! without it a version could come again. The second half repeats the first digits of the write that was replaced, and
//! of the one before that. So a client that finds an object after its write was refused can compare ([`kin`]):
//!
//! - *The same digits*: its write was done. A proxy or the store repeated it, and the repetition was refused.
//! - *Its digits are those of a predecessor*: its write was probably done, and another client has written since. Eight
//!   digits can agree by chance, so a grant never follows from that.

use std::time::Duration;

use leasehold_core::{ClaimId, Error, ErrorKind, Result};

use super::aging::Life;
use crate::text::later;

const START: &str = "leasehold object 1 ";
/// What the first line takes at most, with its end.
pub(crate) const LONGEST: usize = START.len() + 32 + 1 + 20 + 3 + 1;

/// How many digits of a predecessor are repeated.
const TAG: usize = 8;
/// How many digits of a write are its own.
const OWN: usize = 16;

/// What is put there in the place of the write `parent`, and the digits of this write.
pub(crate) fn written(value: &[u8], life: Life, parent: &str) -> Result<(Vec<u8>, String)> {
    let mut nonce = ClaimId::random()?.to_hex();
    if parent.len() == nonce.len() {
        nonce.truncate(OWN);
        nonce.push_str(&parent[..TAG]);
        nonce.push_str(&parent[OWN..OWN + TAG]);
    }
    let life = match life {
        Life::Lasting => "lasting".to_owned(),
        Life::Short(life) => format!("{} ms", life.as_millis()),
        Life::Over => "over".to_owned(),
    };
    let mut text = format!("{START}{nonce} {life}\n").into_bytes();
    text.extend_from_slice(value);
    Ok((text, nonce))
}

/// What an object has to do with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kin {
    /// That write made it.
    Same,
    /// Probably it was written in the place of what that write made.
    Successor,
    /// Neither is known.
    Other,
}

/// What an object with these digits has to do with the write `ours`.
pub(crate) fn kin(there: &str, ours: &str) -> Kin {
    if there.len() != 2 * OWN || ours.len() != 2 * OWN {
        return Kin::Other;
    }
    let tags = [&there[OWN..OWN + TAG], &there[OWN + TAG..]];
    match there == ours {
        true => Kin::Same,
        false if tags.contains(&&ours[..TAG]) => Kin::Successor,
        false => Kin::Other,
    }
}

/// The digits of the write that made this object; empty if it is not ours.
pub(crate) fn nonce(object: &[u8]) -> &str {
    let digits = object.strip_prefix(START.as_bytes()).and_then(|rest| rest.get(..2 * OWN));
    let digits = digits.filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
    digits.and_then(|digits| std::str::from_utf8(digits).ok()).unwrap_or_default()
}

/// Reads what [`written`] wrote.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if it is somebody else's, or a later version's.
pub(crate) fn read(object: &[u8]) -> Result<(Life, &[u8])> {
    parsed(object).ok_or_else(|| {
        let line = object.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let line = std::str::from_utf8(line).unwrap_or_default();
        later(line, "leasehold object ").unwrap_or_else(foreign)
    })
}

/// It is not ours.
pub(crate) fn foreign() -> Error {
    let what = "the value of this key belongs to another program; it was left unchanged";
    Error::new(ErrorKind::Corrupt, what).with_hint("set another prefix or folder in the URL")
}

fn parsed(object: &[u8]) -> Option<(Life, &[u8])> {
    let end = object.iter().take(LONGEST).position(|&byte| byte == b'\n')?;
    let (line, value) = (std::str::from_utf8(&object[..end]).ok()?, &object[end + 1..]);
    let (nonce, life) = line.strip_prefix(START)?.split_once(' ')?;
    ClaimId::from_hex(nonce)?;
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
    fn what_is_written_is_read_and_no_two_are_the_same() {
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
    fn a_write_is_recognized_in_what_it_made_and_in_two_successors() {
        let next = |parent: &str| written(b"", Life::Lasting, parent).unwrap().1;
        let first = next("");
        let second = next(&first);
        let third = next(&second);
        let fourth = next(&third);
        let ours = [Kin::Same, Kin::Successor, Kin::Successor, Kin::Other];
        assert_eq!([&first, &second, &third, &fourth].map(|there| kin(there, &first)), ours);
        assert_eq!(kin(&first, &second), Kin::Other, "a predecessor is not a successor");
        for foreign in ["", "leasehold object 1 \u{e9}", "leasehold fence 1 7\n"] {
            assert_eq!(nonce(foreign.as_bytes()), "");
            assert_eq!(kin(foreign, &first), Kin::Other);
        }
    }

    #[test]
    fn s90_what_is_not_ours_is_nobodys() {
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

    #[test]
    fn f44_a_later_version_is_told_of() {
        let told = |object: &[u8]| read(object).unwrap_err().to_string();
        assert!(told(b"leasehold object 2 anything\nvalue").contains("upgrade this leasehold"));
        assert!(told(b"leasehold object x anything\nvalue").contains("prefix or folder"));
        assert!(told(&[0xff; 40]).contains("prefix or folder"));
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
