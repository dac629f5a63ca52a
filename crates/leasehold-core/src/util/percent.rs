//! Percent-encoding of text as one printable word. Letters, digits, `-`, `.`, `_` and `~` are
//! written as they are, every other byte as `%` and two upper-case hexadecimal digits.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, utf8_percent_encode};

const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The hint for text that cannot be decoded.
pub(crate) const ENCODING_HINT: &str =
    "write a literal % as %25, and other special characters as their UTF-8 bytes (é is %C3%A9)";

/// Text whose `Display` form is escaped.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        utf8_percent_encode(self.0, ESCAPED).fmt(f)
    }
}

/// Parses what [`Escaped`] writes. Also accepts unnecessary escapes and lower-case digits.
pub fn unescape(text: &str) -> Option<String> {
    decoded(text, |byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
}

/// Returns the text with each escape replaced by its byte. Returns `None` if an escape is invalid,
/// if `plain` rejects another byte, or if the result is not UTF-8.
pub fn decoded(text: &str, plain: impl Fn(u8) -> bool) -> Option<String> {
    String::from_utf8(bytes(text, plain)?).ok()
}

/// Decodes like [`decoded`], for bytes that need not be UTF-8, such as a path. All bytes except `%`
/// may be unescaped.
pub fn decoded_bytes(text: &str) -> Option<Vec<u8>> {
    bytes(text, |_| true)
}

fn bytes(text: &str, plain: impl Fn(u8) -> bool) -> Option<Vec<u8>> {
    let is_plain = |part: &[u8]| part.iter().all(|byte| plain(*byte));
    let escape = |part: &[u8]| {
        let after = part.split_at_checked(2);
        after.is_some_and(|(two, rest)| two.iter().all(u8::is_ascii_hexdigit) && is_plain(rest))
    };
    let mut parts = text.as_bytes().split(|byte| *byte == b'%');
    let well_formed = parts.next().is_none_or(is_plain) && parts.all(escape);
    well_formed.then(|| percent_decode(text.as_bytes()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded_and_invalid_ones_rejected() {
        for (text, word) in [("", ""), ("a-._~Z9", "a-._~Z9"), ("a b/%é", "a%20b%2F%25%C3%A9")] {
            assert_eq!(Escaped(text).to_string(), word);
            assert_eq!(unescape(word).as_deref(), Some(text));
        }
        assert_eq!(unescape("%c3%A9%41").as_deref(), Some("éA"));
        for bad in ["%", "%4", "%4g", "a b", "%ff", "%+1", "é", "%%41"] {
            assert_eq!(unescape(bad), None, "{bad}");
        }
        assert_eq!(decoded_bytes("a%ff"), Some(b"a\xff".to_vec()));
        assert_eq!(decoded("a é%41", |_| true).as_deref(), Some("a éA"));
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_text_round_trips(text in testbed::texts(&["a%20b", "%e2%82%ac"])) {
            proptest::prop_assert_eq!(unescape(&Escaped(&text).to_string()), Some(text.clone()));
            for read in [unescape(&text), decoded(&text, |_| true)].into_iter().flatten() {
                proptest::prop_assert!(read.len() <= text.len());
            }
        }
    }
}
