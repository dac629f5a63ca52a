//! What was tried: on which store, how to repeat it, and what the store had promised.
//!
//! Together with the [history](super::history) this is everything that the checker needs. So an old
//! run, or one of another program, is checked like a current one.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::checker::Terms;
use super::history::{Fault, History, Trouble};

/// Where the fenced resource was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Fence {
    /// In the program that wrote the history.
    #[default]
    Process,
    /// In the store itself.
    Store,
}

/// What was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trial {
    /// The store's URL, without its credentials.
    pub(super) store: String,
    /// The command line that repeats it. Empty if unknown.
    #[serde(default)]
    pub(super) command: Vec<String>,
    pub(super) seed: Option<u64>,
    pub(super) seconds: Option<u64>,
    pub(super) clients: Option<u32>,
    pub(super) lease_ms: Option<u64>,
    #[serde(default)]
    pub(super) fence: Fence,
    /// Whether holds expire.
    #[serde(default)]
    pub(super) leases: bool,
    /// The requested faults, whether or not they were injected.
    #[serde(default)]
    pub(super) faults: BTreeSet<Fault>,
    /// What the store had promised.
    #[serde(skip)]
    pub(super) terms: Terms,
}

impl Trial {
    /// Returns how often each fault was injected.
    pub(super) fn injected(&self, history: &History) -> BTreeMap<Fault, usize> {
        let mut times: BTreeMap<Fault, usize> = self.faults.iter().map(|f| (*f, 0)).collect();
        let ended = history.troubles.iter().filter_map(|trouble: &Trouble| trouble.fault);
        let killed = history.deaths.values().map(|_| Fault::Kill);
        for fault in ended.chain(killed) {
            *times.entry(fault).or_default() += 1;
        }
        times
    }

    /// Returns the command as a line for a shell, or an empty string.
    pub(super) fn command_line(&self) -> String {
        let words: Vec<String> = self.command.iter().map(|word| quoted(word)).collect();
        words.join(" ")
    }
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_pass_through_a_shell_unchanged() {
        for word in ["plain:/a,b", "", "two words", "it's", "$HOME", "a\"b", "*", "#x", "ü"] {
            let script = format!("printf %s {}", quoted(word));
            let out = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word);
        }
    }
}
