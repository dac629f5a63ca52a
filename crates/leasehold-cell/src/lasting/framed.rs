//! PURE: how a cell is written into an object.
//!
//! ```text
//! leasehold object 1 DIGITS lasting       and then the cell's value
//! leasehold object 1 DIGITS 20000 ms      it lives for so long
//! leasehold object 1 DIGITS over          it was removed
//! ```
//!
//! The digits are random: an `ETag` is often a sum of what is in the object, so that without them a version
//! could come again.

use std::time::Duration;

use leasehold_core::{ClaimId, Error, ErrorKind, Result};

use super::aging::Life;
use crate::text::later;

const START: &str = "leasehold object 1 ";
/// What the first line takes at most, with its end.
pub(crate) const LONGEST: usize = START.len() + 32 + 1 + 20 + 3 + 1;

/// What is put there.
pub(crate) fn written(value: &[u8], life: Life) -> Result<Vec<u8>> {
    let nonce = ClaimId::random()?.to_hex();
    let life = match life {
        Life::Lasting => "lasting".to_owned(),
        Life::Short(life) => format!("{} ms", life.as_millis()),
        Life::Over => "over".to_owned(),
    };
    let mut text = format!("{START}{nonce} {life}\n").into_bytes();
    text.extend_from_slice(value);
    Ok(text)
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
            let [one, other] = [written(b"a\nb", life).unwrap(), written(b"a\nb", life).unwrap()];
            assert_eq!(parsed(&one), Some((life, &b"a\nb"[..])));
            assert_ne!(one, other);
            assert!(one.len() <= LONGEST + 3);
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
