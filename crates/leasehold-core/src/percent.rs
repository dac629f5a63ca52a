//! Any text as one printable word, and back: letters, digits, `-`, `.`, `_`, `~` stand for
//! themselves, every other byte is `%` and two upper-case hexadecimal digits.

use std::fmt;

/// Shown escaped.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            match is_plain(byte) {
                true => write!(f, "{}", char::from(byte))?,
                false => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

/// Reads what [`Escaped`] wrote (and more: escapes that were not needed, or in lower case).
pub fn unescape(text: &str) -> Option<String> {
    decoded(text, is_plain)
}

/// The text with each escape replaced by its byte, if only what is `plain` stands for itself.
pub fn decoded(text: &str, plain: impl Fn(u8) -> bool) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, others @ ..] = rest {
        rest = match (first, others) {
            (b'%', [high, low, others @ ..]) => {
                let digit = |b: u8| char::from(b).to_digit(16);
                bytes.push(u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()?);
                others
            }
            (byte, others) if plain(*byte) => {
                bytes.push(*byte);
                others
            }
            _ => return None,
        };
    }
    String::from_utf8(bytes).ok()
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}
