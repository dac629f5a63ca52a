//! Decodes the bytes that a terminal sends into keys.
//!
//! A terminal sends typed characters as UTF-8. It sends the other keys as sequences that begin with
//! ESC, which is also the byte of the Esc key. So only the next bytes show whether ESC was the Esc
//! key. If a [`Decoder`] has seen only the start of a sequence, the caller
//! [settles](Decoder::settle) a moment later what it was. An unknown sequence is discarded as a
//! whole, so that no part of it is taken for a key.

/// A key that was pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Backspace,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
    /// Ctrl-L.
    Redraw,
    Char(char),
}

/// Maximum length of a key's sequence.
const LONGEST: usize = 32;
/// The first byte of the sequences.
const ESC: u8 = 0x1b;

/// The bytes that were read and do not form a complete key yet.
#[derive(Debug, Default)]
pub(crate) struct Decoder(Vec<u8>);

/// What the bytes begin with. `Whole` has the number of bytes and the key, or `None` for a key that
/// has no function here.
enum First {
    Whole(usize, Option<Key>),
    Part,
}

impl Decoder {
    /// Adds these bytes and returns the keys that are now complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.0.extend(bytes);
        let mut keys = Vec::new();
        while let First::Whole(length, key) = first(&self.0) {
            self.0.drain(..length);
            keys.extend(key);
        }
        keys
    }

    /// Returns whether the remaining bytes may be the Esc key.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.0.first() == Some(&ESC)
    }

    /// Discards an incomplete sequence after a moment without input. Returns the Esc key if it
    /// began with ESC.
    pub(crate) fn settle(&mut self) -> Option<Key> {
        let was_escape = self.is_in_doubt();
        self.0.clear();
        was_escape.then_some(Key::Escape)
    }
}

fn first(bytes: &[u8]) -> First {
    match *bytes {
        [] => First::Part,
        [ESC, ref rest @ ..] => sequence(rest),
        [byte @ (0..0x20 | 0x7f), ..] => First::Whole(1, control(byte)),
        _ => character(bytes),
    }
}

fn control(byte: u8) -> Option<Key> {
    match byte {
        0x03 => Some(Key::Interrupt),
        0x1a => Some(Key::Suspend),
        0x0c => Some(Key::Redraw),
        b'\r' | b'\n' => Some(Key::Enter),
        0x08 | 0x7f => Some(Key::Backspace),
        _ => None,
    }
}

/// Decodes the bytes after ESC.
fn sequence(rest: &[u8]) -> First {
    match *rest {
        [] | [b'[' | b'O'] | [b'[', b'['] => First::Part,
        // The function keys of the Linux console.
        [b'[', b'[', _, ..] => First::Whole(4, None),
        [b'O', last, ..] => First::Whole(3, named(&[], last)),
        [b'[', ref rest @ ..] => match rest.iter().position(|b| !(0x20..0x40).contains(b)) {
            Some(end) if (0x40..0x7f).contains(&rest[end]) => {
                First::Whole(end + 3, named(&rest[..end], rest[end]))
            }
            // This is not a valid sequence: another key interrupts it.
            Some(end) => First::Whole(end + 2, None),
            None if rest.len() > LONGEST => First::Whole(rest.len() + 2, None),
            None => First::Part,
        },
        _ => First::Whole(1, Some(Key::Escape)),
    }
}

fn named(parameters: &[u8], last: u8) -> Option<Key> {
    match (parameters, last) {
        (_, b'A') => Some(Key::Up),
        (_, b'B') => Some(Key::Down),
        (_, b'H') | (b"1" | b"7", b'~') => Some(Key::Home),
        (_, b'F') | (b"4" | b"8", b'~') => Some(Key::End),
        (b"5", b'~') => Some(Key::PageUp),
        (b"6", b'~') => Some(Key::PageDown),
        ([], b'M') => Some(Key::Enter),
        _ => None,
    }
}

fn character(bytes: &[u8]) -> First {
    let whole = &bytes[..bytes.len().min(4)];
    let (text, bad) = match std::str::from_utf8(whole) {
        Ok(text) => (text, None),
        Err(error) => {
            let good = std::str::from_utf8(&whole[..error.valid_up_to()]);
            (good.unwrap_or_default(), error.error_len().or((whole.len() == 4).then_some(1)))
        }
    };
    match (text.chars().next(), bad) {
        // Control characters beyond ASCII cannot be typed.
        (Some(c), _) => First::Whole(c.len_utf8(), (!c.is_control()).then_some(Key::Char(c))),
        (None, Some(bad)) => First::Whole(bad, None),
        (None, None) => First::Part,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(bytes: &[u8]) -> Vec<Key> {
        Decoder::default().feed(bytes)
    }

    #[test]
    fn keys_are_distinguished_from_characters() {
        use Key::{
            Backspace, Char, Down, End, Enter, Home, Interrupt, PageDown, PageUp, Suspend, Up,
        };
        assert_eq!(keys("jé漢".as_bytes()), [Char('j'), Char('é'), Char('漢')]);
        assert_eq!(keys(b"\x1b[A\x1bOB\x1b[1;5A"), [Up, Down, Up]);
        assert_eq!(keys(b"\x1b[5~\x1b[6~"), [PageUp, PageDown]);
        assert_eq!(
            keys(b"\x1b[H\x1b[1~\x1bOH\x1b[F\x1b[4~\x1bOF"),
            [Home, Home, Home, End, End, End]
        );
        assert_eq!(keys(b"\r\x7f\x03\x1a"), [Enter, Backspace, Interrupt, Suspend]);
    }

    #[test]
    fn unknown_key_sequence_is_skipped_completely() {
        for bytes in [&b"\x1b[15~"[..], b"\x1b[<0;10;10M", b"\x1b[[A", b"\x1bOP", b"\x01", b"\xff"]
        {
            assert_eq!(keys(&[bytes, b"q"].concat()), [Key::Char('q')], "{bytes:?}");
        }
        assert_eq!(keys(b"\x1b[1\x1b[Bq"), [Key::Down, Key::Char('q')]);
        let endless = [&b"\x1b["[..], &[b'0'; 99]].concat();
        let mut decoder = Decoder::default();
        decoder.feed(&endless);
        assert_eq!(decoder.feed(b"q"), [Key::Char('q')]);
    }

    /// The keys must not depend on how the input is split into chunks.
    #[test]
    fn key_sequence_is_decoded_across_reads() {
        let bytes = "\x1b[A漢\x1b[5~q\x1bOB".as_bytes();
        let mut decoder = Decoder::default();
        let pieces: Vec<Key> = bytes.iter().flat_map(|&byte| decoder.feed(&[byte])).collect();
        assert_eq!(pieces, keys(bytes));
        assert_eq!(pieces.len(), 5);
        assert!(!decoder.is_in_doubt());
    }

    #[test]
    fn escape_is_a_key_if_no_sequence_follows() {
        let mut decoder = Decoder::default();
        assert_eq!(decoder.feed(b"\x1b"), []);
        assert!(decoder.is_in_doubt());
        assert_eq!(decoder.settle(), Some(Key::Escape));
        assert_eq!(decoder.settle(), None);
        assert_eq!(decoder.feed(b"\x1b"), []);
        assert_eq!(decoder.feed(b"[A"), [Key::Up]);
        assert_eq!(keys(b"\x1bq"), [Key::Escape, Key::Char('q')]);
        assert_eq!(keys(b"\x1b\x1b"), [Key::Escape]);
    }
}
