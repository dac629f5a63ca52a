//! Conversion between a lock's name and a path.
//!
//! Two names never share a file, not even on a file system that ignores case or normalizes Unicode.
//! No name leads out of the directory. `a-z`, `0-9`, `_`, `-` and a `.` that is not the first
//! character are kept. Every other byte becomes `%` and two lowercase hexadecimal digits.
//!
//! A name that is too long for a file name is split into chunks, and each chunk except the last is
//! a directory. Files end with `.lock` and directories with `+`. An encoded name never contains
//! `+`, so no chunk can be both.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use leasehold_core::Name;
use leasehold_core::kit::decoded;

/// Maximum bytes of a path component before its suffix. With `.lock`, a temporary file's random
/// part and `~` it stays below the 255 bytes that file systems allow.
const CHUNK: usize = 200;
/// The end of a control file's name.
const LEAF: &str = ".lock";
/// The end of the name of a directory for the rest of a long name.
const DIRECTORY: &str = "+";

/// Returns the path of this name's control file, relative to the directory of all control files.
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

/// Returns the name of a control file, or `None` if it is not one of leasehold's.
pub(super) fn decode(path: &Path) -> Option<Name> {
    let mut text = String::new();
    let mut parts = path.iter().map(OsStr::to_str).peekable();
    while let Some(part) = parts.next() {
        let suffix = if parts.peek().is_some() { DIRECTORY } else { LEAF };
        text.push_str(part?.strip_suffix(suffix)?);
    }
    let name = Name::new(decoded(&text, |_| true)?).ok()?;
    // Only leasehold's own encoding is accepted. `%61.lock` is not the file of `a`.
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

    // S90
    #[test]
    fn plain_names_are_kept_and_special_characters_encoded() {
        assert_eq!(encoded("nightly-report_2.daily"), "nightly-report_2.daily.lock");
        assert_eq!(encoded("order:42"), "order%3a42.lock");
        assert_eq!(encoded("../../etc/passwd"), "%2e.%2f..%2fetc%2fpasswd.lock");
        assert_eq!(encoded("Job"), "%4aob.lock");
        assert_eq!(encoded("a+~%"), "a%2b%7e%25.lock");
        assert_eq!(encoded("é"), "%c3%a9.lock");
        assert_eq!(encoded("."), "%2e.lock");
    }

    // S90
    #[test]
    fn the_longest_name_fits_every_file_system() {
        for text in ["x".repeat(512), "\u{7ff}".repeat(256), ".".repeat(512), "A".repeat(400)] {
            let path = encode(&name(&text));
            assert!(path.iter().all(|part| part.len() <= 220), "{path:?}");
            assert_eq!(decode(&path), Some(name(&text)));
        }
    }

    // S90
    #[test]
    fn foreign_file_names_are_not_decoded_as_locks() {
        for foreign in ["a", "%61.lock", "a.lock~", "+/a.lock", "a+/b.lock", ".lock", "%2.lock"] {
            assert_eq!(decode(Path::new(foreign)), None, "{foreign}");
        }
        assert_eq!(decode(Path::new("%2E.lock")), None);
    }

    /// Returns a strategy for difficult names: separators, dots, leasehold's own suffixes, case,
    /// Unicode.
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

        // S90
        #[test]
        fn names_round_trip_and_stay_inside_the_directory(text in hostile()) {
            let path = encode(&name(&text));
            prop_assert_eq!(decode(&path), Some(name(&text)));
            prop_assert!(path.components().all(|c| matches!(c, Component::Normal(_))));
            // Case folding and normalization change nothing, because the path is lowercase ASCII.
            let written = path.to_str().unwrap();
            prop_assert!(written.bytes().all(|b| b.is_ascii_graphic() && !b.is_ascii_uppercase()));
        }

        // S90
        #[test]
        fn different_names_have_different_paths(a in hostile(), b in hostile()) {
            let (one, other) = (encode(&name(&a)), encode(&name(&b)));
            prop_assert_eq!(a == b, one == other);
            // The file of one name is not a directory of the other.
            prop_assert!(a == b || !other.starts_with(&one));
        }
    }
}
