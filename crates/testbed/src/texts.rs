//! Text from outside: arbitrary text, and valid text with a few errors.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::RngSeed;

/// Returns the configuration of property tests. They run 5,000 cases, or 20,000 in CI. These are
/// always the same cases, so that a failure is caused by the current change. With `--long` they run
/// ten million cases, which differ each time.
pub fn cases() -> ProptestConfig {
    const SEED: RngSeed = RngSeed::Fixed(20_261_122);
    let (cases, rng_seed) =
        crate::by_extent((5_000, SEED), (20_000, SEED), (10_000_000, RngSeed::Random));
    ProptestConfig { cases, rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

/// Characters with a meaning in some parser, and others without one.
const LOUD: &[char] = &[
    '%',
    '/',
    ':',
    '@',
    '?',
    '&',
    '=',
    ',',
    '[',
    ']',
    '{',
    '}',
    '"',
    '\'',
    '\\',
    '#',
    '.',
    '-',
    '+',
    '_',
    ' ',
    '\n',
    '\0',
    '\u{7f}',
    '0',
    '9',
    'a',
    'Z',
    'é',
    '\u{1f512}',
];

fn letter() -> impl Strategy<Value = char> {
    prop_oneof![4 => select(LOUD), 1 => any::<char>()]
}

#[derive(Clone, Debug)]
enum Error {
    Without,
    Instead(char),
    Before(char),
    CutOff,
    Again,
    Number(u64),
}

fn error() -> impl Strategy<Value = Error> {
    let numbers =
        [0, 1, 9, u64::from(u32::MAX), u64::from(u32::MAX) + 1, i64::MAX as u64, u64::MAX];
    prop_oneof![
        Just(Error::Without),
        letter().prop_map(Error::Instead),
        letter().prop_map(Error::Before),
        Just(Error::CutOff),
        Just(Error::Again),
        select(numbers.to_vec()).prop_map(Error::Number),
    ]
}

fn with(mut text: Vec<char>, at: Index, error: &Error) -> Vec<char> {
    if text.is_empty() {
        return vec!['%'];
    }
    let at = at.index(text.len());
    match error {
        Error::Without => {
            text.remove(at);
        }
        Error::Instead(c) => text[at] = *c,
        Error::Before(c) => text.insert(at, *c),
        Error::CutOff => text.truncate(at),
        Error::Again => text.extend_from_within(at..),
        Error::Number(n) => {
            // An existing number is replaced. Otherwise the number is inserted here.
            let digits = text[at..].iter().take_while(|c| c.is_ascii_digit()).count();
            text.splice(at..at + digits, n.to_string().chars());
        }
    }
    text
}

/// Generates texts: one of the `right` ones with up to five errors, or arbitrary text.
pub fn texts(right: &'static [&'static str]) -> impl Strategy<Value = String> + Clone {
    let errors = vec((any::<Index>(), error()), 0..=5);
    let nearly = (select(right), errors).prop_map(|(right, errors)| {
        let begun = right.chars().collect();
        errors.iter().fold(begun, |text, (at, error)| with(text, *at, error)).into_iter().collect()
    });
    let anything = vec(letter(), 0..40).prop_map(String::from_iter);
    prop_oneof![4 => nearly, 1 => anything]
}
