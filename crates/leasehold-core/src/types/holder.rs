//! The process that holds a lock or waits for it, as shown to people.

use std::fmt;

use crate::util::world::process_id;

/// The process that made a claim, described so that people can find the program that holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Holder {
    /// The host name of the machine.
    pub host: String,
    /// The process ID on that machine.
    pub pid: u32,
    /// The label that the program has set, or an empty string.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "String::is_empty"))]
    pub label: String,
}

impl Holder {
    /// Returns this process, with a label. The label is truncated to 256 bytes, and control
    /// characters are removed.
    ///
    /// ```
    /// let me = leasehold::Holder::this_process("the nightly job");
    /// println!("{me}"); // web1 pid 4711 (the nightly job)
    /// assert_eq!(me.pid, std::process::id());
    /// ```
    pub fn this_process(label: &str) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut clean: String = label.chars().filter(|c| !c.is_control()).collect();
        clean.truncate(clean.floor_char_boundary(256));
        Self { host, pid: process_id(), label: clean }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pid {}", self.host.escape_debug(), self.pid)?;
        if !self.label.is_empty() {
            write!(f, " ({})", self.label.escape_debug())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_removed_from_labels() {
        let holder = Holder::this_process("nightly\nroot pid 1");
        assert_eq!(holder.label, "nightlyroot pid 1");
        assert!(Holder::this_process(&"é".repeat(200)).label.len() <= 256);
    }
}
