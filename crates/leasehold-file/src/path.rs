//! A lock's name as a path, and back.
//!
//! Two names never meet in one file, not even on a file system that ignores case or normalises
//! Unicode, and no name ever leaves the directory: `a-z`, `0-9`, `_`, `-` and a `.` that does not
//! lead stand for themselves, every other byte is `%` and two lowercase hexadecimal digits. What
//! is longer than a file name may be is cut into chunks; each but the last is a directory. The
//! suffixes `.lock` and `+` tell leaves from directories, and since `+` is never in an encoded
//! name, no chunk is both.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use leasehold_core::Name;
use leasehold_core::kit::decoded;

/// The most bytes of one component before its suffix: with `.lock`, a temporary's random part and
/// `~` it stays below the 255 that file systems allow.
const CHUNK: usize = 200;
const LEAF: &str = ".lock";
const DIRECTORY: &str = "+";

/// The control file of this name, relative to the directory of all of them.
pub(super) fn encode(name: &Name) -> PathBuf {
    let bytes = name.as_str().as_bytes();
    let mut text = String::with_capacity(bytes.len() + 16);
    for (i, &byte) in bytes.iter().enumerate() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => text.push(char::from(byte)),
            b'.' if i > 0 => text.push('.'),
            _ => {
                let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n)]);
                text.extend(['%', digit(byte >> 4), digit(byte & 15)]);
            }
        }
    }
    let mut path = PathBuf::new();
    let mut rest = text.as_str();
    while rest.len() > CHUNK {
        let (chunk, others) = rest.split_at(CHUNK);
        path.push(format!("{chunk}{DIRECTORY}"));
        rest = others;
    }
    path.push(format!("{rest}{LEAF}"));
    path
}

/// The name whose control file this is, or `None` if it is none of ours.
pub(super) fn decode(path: &Path) -> Option<Name> {
    let mut text = String::new();
    let mut parts = path.iter().map(OsStr::to_str).peekable();
    while let Some(part) = parts.next() {
        let suffix = if parts.peek().is_some() { DIRECTORY } else { LEAF };
        text.push_str(part?.strip_suffix(suffix)?);
    }
    let name = Name::new(decoded(&text, |_| true)?).ok()?;
    // Only what we would have written ourselves: `%61.lock` is not the file of `a`.
    (encode(&name) == path).then_some(name)
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn encoded(text: &str) -> String {
        encode(&name(text)).to_str().unwrap().to_owned()
    }

    #[test]
    fn s90_plain_names_stay_readable_and_odd_ones_become_plain() {
        assert_eq!(encoded("nightly-report_2.daily"), "nightly-report_2.daily.lock");
        assert_eq!(encoded("order:42"), "order%3a42.lock");
        assert_eq!(encoded("../../etc/passwd"), "%2e.%2f..%2fetc%2fpasswd.lock");
        assert_eq!(encoded("Job"), "%4aob.lock");
        assert_eq!(encoded("a+~%"), "a%2b%7e%25.lock");
        assert_eq!(encoded("é"), "%c3%a9.lock");
        assert_eq!(encoded("."), "%2e.lock");
    }

    #[test]
    fn s90_the_longest_name_fits_every_file_system() {
        for text in ["x".repeat(512), "\u{7ff}".repeat(256), ".".repeat(512), "A".repeat(400)] {
            let path = encode(&name(&text));
            assert!(path.iter().all(|part| part.len() <= 220), "{path:?}");
            assert_eq!(decode(&path), Some(name(&text)));
        }
    }

    #[test]
    fn s90_what_we_would_not_write_is_no_lock_of_ours() {
        for foreign in ["a", "%61.lock", "a.lock~", "+/a.lock", "a+/b.lock", ".lock", "%2.lock"] {
            assert_eq!(decode(Path::new(foreign)), None, "{foreign}");
        }
        assert_eq!(decode(Path::new("%2E.lock")), None);
    }

    /// Names as hostile as they come: separators, dots, our own suffixes, case, Unicode.
    fn hostile() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            "[a-zA-Z]{1,3}",
            "[./%+~ ]{1,3}",
            Just(".lock".to_owned()),
            Just("%2e".to_owned()),
            Just("é".to_owned()),
            Just("e\u{301}".to_owned()),
            Just("x".repeat(199)),
        ];
        proptest::collection::vec(piece, 1..5).prop_map(|pieces| {
            let mut text = pieces.concat();
            text.truncate(text.floor_char_boundary(512));
            text
        })
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn s90_every_name_comes_back_and_never_leaves_the_directory(text in hostile()) {
            let path = encode(&name(&text));
            prop_assert_eq!(decode(&path), Some(name(&text)));
            prop_assert!(path.components().all(|c| matches!(c, Component::Normal(_))));
            // Folding case or normalising changes nothing: what is written is lowercase ASCII.
            let written = path.to_str().unwrap();
            prop_assert!(written.bytes().all(|b| b.is_ascii_graphic() && !b.is_ascii_uppercase()));
        }

        #[test]
        fn s90_two_names_never_meet(a in hostile(), b in hostile()) {
            let (one, other) = (encode(&name(&a)), encode(&name(&b)));
            prop_assert_eq!(a == b, one == other);
            // Nor is the file of one a directory of the other.
            prop_assert!(a == b || !other.starts_with(&one));
        }
    }
}
