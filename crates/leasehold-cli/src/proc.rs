//! What the kernel says of a process: /proc/PID/stat, read field by field, and its first
//! environment.

use std::fs;

/// The fields of /proc/PID/stat, numbered as in proc(5).
#[derive(Clone, Debug)]
pub(crate) struct Stat {
    pid: i32,
    name: String,
    is_zombie: bool,
    /// From the third on.
    numbers: Vec<u64>,
}

impl Stat {
    /// Of process `pid`; `None` if there is no such process.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(line: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, and may hold anything.
        let (before, rest) = line.rsplit_once(')')?;
        let (pid, name) = before.split_once(" (")?;
        let mut fields = rest.split_whitespace().peekable();
        let is_zombie = fields.peek().is_some_and(|state| ["Z", "X"].contains(state));
        // Other letters and negative numbers are of no interest here.
        let numbers = fields.map(|f| f.parse().unwrap_or(0)).collect();
        Some(Self { pid: pid.parse().ok()?, name: name.to_owned(), is_zombie, numbers })
    }

    fn field(&self, number: usize) -> u64 {
        self.numbers.get(number - 3).copied().unwrap_or(0)
    }

    fn id(&self, number: usize) -> i32 {
        i32::try_from(self.field(number)).unwrap_or(0)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// The program's name, at most 15 bytes of it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether any of its threads may still run. The first thread of a program may end before the
    /// others.
    pub(crate) fn is_alive(&self) -> bool {
        const THREADS: usize = 20;
        !self.is_zombie || self.field(THREADS) > 1
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

/// A variable of the environment that the process was started with. `None` if it has none of that
/// name, or runs as a user whose processes we may not read.
pub(crate) fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let values = environment.split(|&byte| byte == 0);
    let mut values = values.filter_map(|line| line.strip_prefix(name.as_bytes()));
    values.find_map(|rest| Some(String::from_utf8_lossy(rest.strip_prefix(b"=")?).into_owned()))
}

/// The words of its command line.
pub(crate) fn words(pid: i32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|&byte| byte == 0);
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Whether /proc is of the PID namespace that we are in. Otherwise its numbers mean other processes
/// to us.
pub(crate) fn is_ours() -> bool {
    fs::read_link("/proc/self")
        .is_ok_and(|own| own.as_os_str() == std::process::id().to_string().as_str())
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
        assert_eq!((stat.pid(), stat.name()), (7, "a) b (c 1 2 3"));
        assert_eq!((stat.parent(), stat.group(), stat.session()), (5, 6, 4));
        assert_eq!(stat.started(), 0);
    }

    #[test]
    fn this_process_has_a_parent_and_a_start() {
        let stat = Stat::of(std::process::id() as i32).unwrap();
        assert_eq!(stat.parent(), std::os::unix::process::parent_id() as i32);
        assert!(stat.started() > 0);
    }

    #[test]
    fn a_program_lives_as_long_as_one_of_its_threads() {
        let zombie = |threads| {
            let line = format!("7 (x) Z 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 5");
            Stat::parse(&line).unwrap()
        };
        assert!(!zombie(0).is_alive() && zombie(2).is_alive());
        assert_eq!(zombie(0).started(), 5);
    }

    #[test]
    fn the_first_environment_of_a_process_is_read() {
        let pid = std::process::id() as i32;
        assert_eq!(variable(pid, "PATH"), std::env::var("PATH").ok());
        assert_eq!(variable(pid, "PAT"), None);
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
