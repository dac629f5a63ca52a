//! Keys, as a terminal tells of them: bytes in, keys out.
//!
//! A terminal sends what is typed as UTF-8, and the keys that are no characters as sequences that begin as the Esc
//! key does. So whether ESC is that key is seen only by what follows: a [`Decoder`] that has seen no more is
//! [asked again](Decoder::is_in_doubt) a moment later. A sequence that means nothing here is swallowed as a
//! whole, so that nothing in it is taken for a key.

/// What was pressed.
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

/// No sequence of a key is longer.
const LONGEST: usize = 32;
const ESC: u8 = 0x1b;

/// What was read and is no whole key yet.
#[derive(Debug, Default)]
pub(crate) struct Decoder(Vec<u8>);

/// What the bytes begin with, and how many of them that is; a key that is none to us is `None`.
enum First {
    Whole(usize, Option<Key>),
    Part,
}

impl Decoder {
    /// The keys that are whole with these bytes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.0.extend(bytes);
        let mut keys = Vec::new();
        while let First::Whole(length, key) = first(&self.0) {
            self.0.drain(..length);
            keys.extend(key);
        }
        keys
    }

    /// Whether what is left may be the Esc key.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.0.first() == Some(&ESC)
    }

    /// Nothing came for a moment: it was.
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

/// What comes after ESC.
fn sequence(rest: &[u8]) -> First {
    match *rest {
        [] | [b'[' | b'O'] | [b'[', b'['] => First::Part,
        // The function keys of Linux' console.
        [b'[', b'[', _, ..] => First::Whole(4, None),
        [b'O', last, ..] => First::Whole(3, named(&[], last)),
        [b'[', ref rest @ ..] => match rest.iter().position(|b| !(0x20..0x40).contains(b)) {
            Some(end) if (0x40..0x7f).contains(&rest[end]) => {
                First::Whole(end + 3, named(&rest[..end], rest[end]))
            }
            // No sequence: another key.
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
        // Control characters beyond ASCII are none that a person types.
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
    fn keys_are_told_from_characters() {
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
    fn what_is_no_key_of_ours_leaves_nothing_behind() {
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

    /// However what is typed is cut into pieces.
    #[test]
    fn keys_come_in_pieces() {
        let bytes = "\x1b[A漢\x1b[5~q\x1bOB".as_bytes();
        let mut decoder = Decoder::default();
        let pieces: Vec<Key> = bytes.iter().flat_map(|&byte| decoder.feed(&[byte])).collect();
        assert_eq!(pieces, keys(bytes));
        assert_eq!(pieces.len(), 5);
        assert!(!decoder.is_in_doubt());
    }

    #[test]
    fn escape_is_a_key_once_nothing_follows() {
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
