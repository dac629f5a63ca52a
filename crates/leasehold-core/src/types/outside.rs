//! Names and tokens from outside the program, and the errors for invalid ones.

use std::str::FromStr;

use super::error::{Error, ErrorKind, Result};
use super::name::{MAX_NAME_BYTES, Name};
#[cfg(feature = "serde")]
use super::sequencer::Sequencer;
use super::token::{FencingToken, Token};

impl Name {
    /// Checks a lock name.
    ///
    /// ```
    /// use leasehold::{ErrorKind, Name};
    /// assert_eq!(Name::new("order:42")?.as_str(), "order:42");
    /// assert_eq!(Name::new("two\nlines").unwrap_err().kind(), ErrorKind::InvalidName);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// - [`InvalidName`](ErrorKind::InvalidName): the name is empty, longer than 512 bytes, or
    ///   contains a control character (which includes NUL, tab, carriage return and line feed).
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        Self::checked(name).map_err(|why| {
            let mut shown: String = name.chars().take(40).collect();
            if shown.len() < name.len() {
                shown.push('…');
            }
            Error::new(ErrorKind::InvalidName, format!("invalid lock name {shown:?}: {why}"))
                .with_hint(format!("use 1 to {MAX_NAME_BYTES} bytes, and no control characters"))
        })
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<u64> for Token {
    type Error = Error;

    fn try_from(value: u64) -> Result<Self> {
        Self::new(value).ok_or_else(|| {
            Error::new(
                ErrorKind::Config,
                format!("invalid fencing token {value}: expected 1 to 2^63-1"),
            )
        })
    }
}

impl FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse::<u64>().ok().and_then(Self::new).ok_or_else(|| {
            let text: String = text.chars().take(40).collect();
            Error::new(
                ErrorKind::Config,
                format!("invalid fencing token {text:?}: expected 1 to 2^63-1"),
            )
        })
    }
}

impl FromStr for FencingToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse().map(Self::of)
    }
}

/// Implements `Deserialize` by the checks of `TryFrom`. The error becomes a part of another
/// message, so it has no hint and no kind in brackets.
#[cfg(feature = "serde")]
macro_rules! deserialize {
    ($type:ty, $from:ty) => {
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let value = <$from>::deserialize(d)?;
                Self::try_from(value).map_err(|error| serde::de::Error::custom(error.reason()))
            }
        }
    };
}

#[cfg(feature = "serde")]
deserialize!(Name, String);
#[cfg(feature = "serde")]
deserialize!(Token, u64);
#[cfg(feature = "serde")]
deserialize!(Sequencer, String);

#[cfg(test)]
mod tests {
    use super::*;

    // S90
    #[test]
    fn names_are_checked_and_never_forge_a_log_line() {
        for good in ["a", "a/../b", "order:42", "\"quoted\" 'twice'", "ключ", &"x".repeat(512)]
        {
            assert_eq!(Name::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a\0b", "a\r\nb", "tab\t", "\u{7f}", &"x".repeat(513), &"é".repeat(257)] {
            let error = Name::new(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidName);
            assert!(!format!("{error:#}").contains(char::is_control), "{error}");
        }
        // A line separator is not a control character, so the name is valid. It is shown on one
        // line.
        let odd = Name::new("a\u{2028}b").unwrap();
        assert_eq!(odd.to_string(), "\"a\\u{2028}b\"");
        assert!(Name::new("x".repeat(10_240)).unwrap_err().to_string().len() < 200);
    }

    #[test]
    fn tokens_fit_a_bigint() {
        assert_eq!(Token::new(0), None);
        assert_eq!(Token::new(u64::MAX), None);
        assert_eq!(Token::new(Token::MAX).unwrap().get(), i64::MAX as u64);
        assert!("-1".parse::<Token>().is_err());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn deserialization_error_names_the_cause_without_kind_and_hint() {
        fn error<T: serde::de::DeserializeOwned>(json: &str) -> String {
            let error = serde_json::from_str::<T>(json).err().unwrap().to_string();
            error.split(" at line").next().unwrap().to_owned()
        }
        assert_eq!(error::<Token>("0"), "invalid fencing token 0: expected 1 to 2^63-1");
        assert_eq!(error::<Name>(r#""""#), r#"invalid lock name "": it is empty"#);
        let version = "invalid sequencer: it does not begin with lh1:";
        assert_eq!(error::<Sequencer>(r#""lh2:""#), version);
        let sequencer = r#""lh1:mutex:7:store:a""#;
        let read: Sequencer = serde_json::from_str(sequencer).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), sequencer);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn parsed_tokens_round_trip(text in testbed::texts(&[
            "9223372036854775807", "1",
        ])) {
            if let Ok(token) = text.parse::<Token>() {
                proptest::prop_assert_eq!(token.to_string().parse::<Token>().ok(), Some(token));
            }
        }

        #[test]
        fn any_name_is_accepted_unchanged_or_rejected(text in testbed::texts(&["order:42", "ключ"])) {
            match Name::new(&text) {
                Ok(name) => {
                    proptest::prop_assert_eq!(name.as_str(), &text);
                    proptest::prop_assert!(!text.is_empty() && text.len() <= MAX_NAME_BYTES);
                    proptest::prop_assert!(!text.contains(char::is_control));
                }
                Err(error) => {
                    let shown = format!("{error:#}");
                    proptest::prop_assert!(!shown.contains(char::is_control));
                }
            }
        }
    }
}
