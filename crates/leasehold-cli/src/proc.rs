//! What the kernel says of a process: /proc/PID/stat, read field by field.

use std::fs;

/// The fields of /proc/PID/stat from the third on, numbered as in proc(5).
#[derive(Debug)]
pub(crate) struct Stat(Vec<u64>);

impl Stat {
    /// Of process `pid`; `None` if there is no such process.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(line: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, and may hold anything.
        let (_, rest) = line.rsplit_once(')')?;
        // Letters and negative numbers are of no interest here.
        Some(Self(rest.split_whitespace().map(|f| f.parse().unwrap_or(0)).collect()))
    }

    fn field(&self, number: usize) -> u64 {
        self.0.get(number - 3).copied().unwrap_or(0)
    }

    fn id(&self, number: usize) -> i32 {
        i32::try_from(self.field(number)).unwrap_or(0)
    }

    pub(crate) fn parent(&self) -> i32 {
        self.id(4)
    }

    pub(crate) fn group(&self) -> i32 {
        self.id(5)
    }

    pub(crate) fn session(&self) -> i32 {
        self.id(6)
    }

    /// When it was started, in clock ticks since boot: with the pid, the identity of a process.
    pub(crate) fn started(&self) -> u64 {
        self.field(22)
    }
}

/// The process, its parent, and so on.
pub(crate) fn lineage(pid: i32) -> impl Iterator<Item = i32> {
    let parent = |pid: &i32| Stat::of(*pid).map(|stat| stat.parent()).filter(|&pid| pid > 0);
    std::iter::successors(Some(pid), parent)
}

/// Every process there is.
pub(crate) fn all() -> impl Iterator<Item = Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|e| Stat::of(e.file_name().to_str()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_name_cannot_confuse_the_fields() {
        let stat = Stat::parse("7 (a) b (c 1 2 3) S 5 6 4 0 -1 9").unwrap();
        assert_eq!((stat.parent(), stat.group(), stat.session()), (5, 6, 4));
        assert_eq!(stat.started(), 0);
    }

    #[test]
    fn this_process_has_a_parent_and_a_start() {
        let stat = Stat::of(std::process::id() as i32).unwrap();
        assert_eq!(stat.parent(), std::os::unix::process::parent_id() as i32);
        assert!(stat.started() > 0);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_process_of_any_name_is_read(line in testbed::texts(&[
            "17 (a) b (c) S 4 5 6 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 12345 9 9",
        ])) {
            if let Some(stat) = Stat::parse(&line) {
                let _ = (stat.parent(), stat.group(), stat.session(), stat.started());
            }
        }
    }
}
