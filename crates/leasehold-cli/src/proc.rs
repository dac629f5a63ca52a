//! Reads what the kernel reports about a process: the fields of /proc/PID/stat, and its initial
//! environment.

use std::fs;

/// The fields of /proc/PID/stat, numbered as in proc(5).
#[derive(Clone, Debug)]
pub(crate) struct Stat {
    pid: i32,
    name: String,
    is_zombie: bool,
    /// The fields from the third one on.
    numbers: Vec<u64>,
}

impl Stat {
    /// Reads the fields of process `pid`. Returns `None` if it does not exist.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(line: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, and may contain any characters.
        let (before, rest) = line.rsplit_once(')')?;
        let (pid, name) = before.split_once(" (")?;
        let mut fields = rest.split_whitespace().peekable();
        let is_zombie = fields.peek().is_some_and(|state| ["Z", "X"].contains(state));
        // Fields with other letters or negative numbers are not needed.
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

    /// Returns the program's name, truncated to 15 bytes by the kernel.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether any thread of the process may still run. The first thread may end before the
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

    /// Returns when the process started, in clock ticks since boot. The pid and the start time
    /// together identify a process.
    pub(crate) fn started(&self) -> u64 {
        self.field(22)
    }
}

/// Returns the pids of the process, its parent, and so on.
pub(crate) fn lineage(pid: i32) -> impl Iterator<Item = i32> {
    let parent = |pid: &i32| Stat::of(*pid).map(|stat| stat.parent()).filter(|&pid| pid > 0);
    std::iter::successors(Some(pid), parent)
}

/// Returns a variable of the environment that the process was started with. Returns `None` if the
/// variable is missing, or if the process runs as a user whose processes this one may not read.
pub(crate) fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let values = environment.split(|&byte| byte == 0);
    let mut values = values.filter_map(|line| line.strip_prefix(name.as_bytes()));
    values.find_map(|rest| Some(String::from_utf8_lossy(rest.strip_prefix(b"=")?).into_owned()))
}

/// Returns the arguments of the process's command line.
pub(crate) fn words(pid: i32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|&byte| byte == 0);
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Returns whether /proc belongs to this process's PID namespace. Otherwise its numbers denote
/// other processes.
pub(crate) fn is_ours() -> bool {
    fs::read_link("/proc/self")
        .is_ok_and(|own| own.as_os_str() == std::process::id().to_string().as_str())
}

/// Returns all processes.
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
    fn own_process_has_a_parent_and_a_start_time() {
        let stat = Stat::of(std::process::id() as i32).unwrap();
        assert_eq!(stat.parent(), std::os::unix::process::parent_id() as i32);
        assert!(stat.started() > 0);
    }

    #[test]
    fn process_is_alive_while_any_of_its_threads_is() {
        let zombie = |threads| {
            let line = format!("7 (x) Z 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 5");
            Stat::parse(&line).unwrap()
        };
        assert!(!zombie(0).is_alive() && zombie(2).is_alive());
        assert_eq!(zombie(0).started(), 5);
    }

    #[test]
    fn initial_environment_of_a_process_is_read() {
        let pid = std::process::id() as i32;
        assert_eq!(variable(pid, "PATH"), std::env::var("PATH").ok());
        assert_eq!(variable(pid, "PAT"), None);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn parsing_any_stat_line_does_not_panic(line in testbed::texts(&[
            "17 (a) b (c) S 4 5 6 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 12345 9 9",
        ])) {
            if let Some(stat) = Stat::parse(&line) {
                let _ = (stat.parent(), stat.group(), stat.session(), stat.started());
            }
        }
    }
}
