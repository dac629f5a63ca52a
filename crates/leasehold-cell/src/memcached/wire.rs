//! Encodes memcached's meta commands and decodes the server's replies. No I/O.
//!
//! A version consists of the connection on which the value was read, and the value's CAS number.
//! These numbers start again when the server restarts, but no connection survives a restart.

use std::fmt::Write;
use std::time::Duration;

use crate::cells::{Answer, Found, Request, Version};

/// Maximum size of a value that is read. No value that leasehold writes is larger.
pub(super) const LARGEST: usize = 1_000_000;

/// Returns the CAS number of a version, or `None` if the version was read on another connection.
fn number(version: &Version, connection: u64) -> Option<u64> {
    let (theirs, number) = version.0.split_once('.')?;
    (theirs.parse() == Ok(connection)).then(|| number.parse().ok())?
}

/// Appends an encoded request. Returns `false` if it need not be sent, because it would be refused.
pub(super) fn write(request: &Request, connection: u64, into: &mut Vec<u8>) -> bool {
    let mut line = String::new();
    let mut data = None;
    // Writing to a string does not fail.
    let _ = match request {
        Request::Get { key } => write!(line, "mg {key} v c t"),
        Request::Touch { key, lives, .. } => write!(line, "mg {key} T{}", seconds(*lives)),
        Request::Create { key, value, lives } => {
            data = Some(value);
            write!(line, "ms {key} {} ME c{}", value.len(), ends(*lives))
        }
        Request::Replace { key, value, version, lives } => {
            let Some(number) = number(version, connection) else { return false };
            data = Some(value);
            write!(line, "ms {key} {} C{number} c{}", value.len(), ends(*lives))
        }
        Request::Remove { key, version } => {
            let Some(number) = number(version, connection) else { return false };
            write!(line, "md {key} C{number}")
        }
    };
    into.extend_from_slice(line.as_bytes());
    into.extend_from_slice(b"\r\n");
    if let Some(data) = data {
        into.extend_from_slice(data);
        into.extend_from_slice(b"\r\n");
    }
    true
}

/// Rounds up to whole seconds.
fn seconds(lives: Duration) -> u64 {
    (lives.as_secs() + u64::from(lives.subsec_nanos() > 0)).max(1)
}

fn ends(lives: Option<Duration>) -> String {
    lives.map(|lives| format!(" T{}", seconds(lives))).unwrap_or_default()
}

/// The first line of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// A value of `length` bytes follows.
    Value { length: usize, number: u64, remaining: Option<Duration> },
    /// The reply is complete.
    Whole(Answer),
    /// The server refuses the request with this text. The next line need not be the reply to the
    /// next request.
    Refused(String),
    /// The line is not a valid reply.
    Garbage,
}

/// Decodes the first line of the reply to `request`. `line` excludes the line ending.
pub(super) fn head(request: &Request, line: &[u8], connection: u64) -> Head {
    let Ok(text) = std::str::from_utf8(line) else { return Head::Garbage };
    let mut words = text.split_ascii_whitespace();
    let code = words.next().unwrap_or_default();
    match (code, request) {
        ("VA", Request::Get { .. }) => value(words).unwrap_or(Head::Garbage),
        ("EN", Request::Get { .. } | Request::Touch { .. }) => Head::Whole(Answer::Absent),
        ("HD", Request::Touch { .. } | Request::Remove { .. }) => Head::Whole(Answer::Done),
        ("HD", Request::Create { .. } | Request::Replace { .. }) => match flag(words, 'c') {
            Some(number) => Head::Whole(Answer::Written(version(connection, number))),
            None => Head::Garbage,
        },
        ("NS" | "EX" | "NF", Request::Create { .. })
        | ("NS" | "EX" | "NF", Request::Replace { .. } | Request::Remove { .. }) => {
            Head::Whole(Answer::Refused)
        }
        ("ERROR" | "CLIENT_ERROR" | "SERVER_ERROR", _) => {
            Head::Refused(text.chars().filter(|c| !c.is_control()).take(200).collect())
        }
        _ => Head::Garbage,
    }
}

fn value<'a>(mut words: impl Iterator<Item = &'a str> + Clone) -> Option<Head> {
    let length = words.next()?.parse().ok().filter(|length| *length <= LARGEST)?;
    let number = flag(words.clone(), 'c')?;
    // -1 means that the value does not expire.
    let remaining = flag(words, 't').map(Duration::from_secs);
    Some(Head::Value { length, number, remaining })
}

fn flag<'a>(mut words: impl Iterator<Item = &'a str>, which: char) -> Option<u64> {
    words.find_map(|word| word.strip_prefix(which)?.parse().ok())
}

fn version(connection: u64, number: u64) -> Version {
    Version(format!("{connection}.{number}"))
}

/// Returns the answer after the value has arrived.
pub(super) fn found(
    value: Vec<u8>,
    connection: u64,
    number: u64,
    remaining: Option<Duration>,
) -> Answer {
    Answer::Found(Found { value, version: version(connection, number), remaining })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get() -> Request {
        Request::Get { key: "k".into() }
    }

    fn replace(version: &str) -> Request {
        let (key, version) = ("k".into(), Version(version.into()));
        Request::Replace { key, value: b"a\r\nb".to_vec(), version, lives: None }
    }

    fn sent(request: &Request) -> Option<String> {
        let mut bytes = Vec::new();
        write(request, 3, &mut bytes).then(|| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn requests_are_encoded() {
        assert_eq!(sent(&get()).unwrap(), "mg k v c t\r\n");
        assert_eq!(sent(&replace("3.7")).unwrap(), "ms k 4 C7 c\r\na\r\nb\r\n");
        let lives = Duration::from_millis(1_001);
        let create = Request::Create { key: "k".into(), value: Vec::new(), lives: Some(lives) };
        assert_eq!(sent(&create).unwrap(), "ms k 0 ME c T2\r\n\r\n");
        let (key, value, version) = ("k".into(), Vec::new(), Version("3.7".into()));
        let touch = Request::Touch { key, value, version, lives };
        assert_eq!(sent(&touch).unwrap(), "mg k T2\r\n");
    }

    /// After a restart, a server assigns the same CAS numbers again.
    #[test]
    fn version_from_another_connection_is_never_sent() {
        for other in ["2.7", "7", "", "3.", "3.x", "4.7"] {
            assert_eq!(sent(&replace(other)), None, "{other}");
        }
    }

    #[test]
    fn replies_are_decoded() {
        let decode = |line: &str| head(&get(), line.as_bytes(), 3);
        let value = |remaining| Head::Value { length: 5, number: 9, remaining };
        assert_eq!(decode("VA 5 c9 t-1"), value(None));
        assert_eq!(decode("VA 5 c9 t20"), value(Some(Duration::from_secs(20))));
        assert_eq!(decode("EN"), Head::Whole(Answer::Absent));
        assert_eq!(head(&replace("3.1"), b"EX c0", 3), Head::Whole(Answer::Refused));
        assert_eq!(
            head(&replace("3.1"), b"HD c12", 3),
            Head::Whole(Answer::Written(Version("3.12".into())))
        );
        assert_eq!(decode("ERROR"), Head::Refused("ERROR".into()));
        for bad in ["", "HD", "VA", "VA x c1", "VA 5", "VA 1000001 c1 t-1", "-ERR unknown command"]
        {
            assert_eq!(decode(bad), Head::Garbage, "{bad}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_reply_line_is_parsed_or_refused(line in testbed::texts(&[
            "VA 5 c9 t-1", "HD c12", "EX", "SERVER_ERROR out of memory storing object",
        ])) {
            for request in [get(), replace("3.1")] {
                if let Head::Value { length, .. } = head(&request, line.as_bytes(), 3) {
                    proptest::prop_assert!(length <= LARGEST);
                }
            }
        }
    }
}
