//! The directory of this test process, and the shell that cleans up after it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The reaper's script. It waits for the end of its input, which comes when the last descriptor of
/// the test process is closed. Then it kills every process whose working directory is in the
/// test process's directory, and deletes that directory. It ignores signals that a terminal sends
/// to all processes (Ctrl-C).
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
while read -r _; do :; done
round=0
while [ "$round" -lt 100 ]; do
    found=''
    for process in /proc/[0-9]*; do
        works_in=$(readlink "$process/cwd" 2>/dev/null) || continue
        case $works_in in
        "$1" | "$1"/*)
            kill -KILL "${process#/proc/}" 2>/dev/null
            found=yes
            ;;
        esac
    done
    [ -n "$found" ] || break
    round=$((round + 1))
    sleep 0.05
done
# Shared memory that a killed PostgreSQL leaves behind. A machine has few such segments.
for server in "$1"/*/data/postmaster.pid; do
    [ -r "$server" ] && ipcrm -m "$(sed -n '7s/.* //p' "$server")" 2>/dev/null
done
# Sockets that SeaweedFS creates in /tmp, whatever directory it is configured to use.
cat "$1"/*/ports 2>/dev/null | while read -r port; do
    rm -f "/tmp/seaweedfs-"*"-grpc-$port.sock"
done
# A disk of which a killed test has not removed the mount.
umount --lazy "$1"/disk-*/mounted 2>/dev/null
rm -rf -- "$1"
"#;

struct Place {
    directory: PathBuf,
    /// The reaper. The kernel closes its input when this process ends, which starts the clean-up.
    _reaper: Child,
}

/// Returns a file system in memory with enough room for many servers, unless the user has set
/// `TMPDIR`. Data in it survives SIGKILL of a server too. And a busy disk does not pause the
/// servers there. The tests are about faults, and not about the disk.
fn in_memory() -> Option<PathBuf> {
    const ROOM: u64 = 8 << 30;
    if std::env::var_os("TMPDIR").is_some() {
        return None;
    }
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let options = fields.find_map(|fields| match fields.as_slice() {
        [_, "/dev/shm", "tmpfs", options, ..] => Some(options.to_string()),
        _ => None,
    })?;
    // Servers load libraries that are compiled there.
    let usable = options.split(',').all(|option| option != "noexec" && option != "ro");
    let room = rustix::fs::statvfs("/dev/shm").ok()?;
    let memory = std::fs::read_to_string("/proc/meminfo").ok()?;
    let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available: u64 = available.trim().trim_end_matches(" kB").parse().ok()?;
    let has_room = room.f_bavail * room.f_frsize >= ROOM && available << 10 >= ROOM;
    (usable && has_room).then(|| PathBuf::from("/dev/shm"))
}

fn place() -> &'static Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    PLACE.get_or_init(|| {
        // The name is short, because paths of Unix sockets are limited to 107 bytes. The directory
        // is readable, because some servers run as another user.
        let mut builder = tempfile::Builder::new();
        builder.prefix("lh-").permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755));
        let made = match in_memory() {
            Some(parent) => builder.tempdir_in(parent),
            None => builder.tempdir(),
        };
        let made = made.expect("a temporary directory");
        // Links are resolved, because /proc shows the true path.
        let directory = made.path().canonicalize().expect("the directory was just made");
        let mut reaper = Command::new("sh");
        reaper.args(["-c", SCRIPT, "reaper"]).arg(&directory).current_dir("/");
        reaper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // The reaper has its own process group, so that it is not killed together with the tests'
        // group.
        std::os::unix::process::CommandExt::process_group(&mut reaper, 0);
        let reaper = reaper.spawn().expect("a shell to clean up after the tests");
        // From here on the reaper deletes the directory. Until here `made` deletes it, for example
        // if the reaper cannot be started.
        let _ = made.keep();
        Place { directory, _reaper: reaper }
    })
}

/// The directory in which servers keep their data, if it is not this process's own.
static ELSEWHERE: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Places the directories of all servers that are started from now on in this directory, or in this
/// process's own one. It must be below the latter, so that the reaper finds the processes.
pub(crate) fn place_servers_in(directory: Option<PathBuf>) {
    *ELSEWHERE.lock().unwrap_or_else(PoisonError::into_inner) = directory;
}

/// Creates a new directory for one server. It is deleted at the end of this process at the latest.
pub(crate) fn directory(kind: &str) -> PathBuf {
    let elsewhere = ELSEWHERE.lock().unwrap_or_else(PoisonError::into_inner).clone();
    new_directory(elsewhere.as_deref().unwrap_or(&place().directory), kind)
}

/// Creates a new directory that is not on a [`Disk`](crate::Disk), and exists until the end of this
/// process.
pub(crate) fn lasting_directory(kind: &str) -> PathBuf {
    new_directory(&place().directory, kind)
}

fn new_directory(parent: &Path, kind: &str) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let directory = parent.join(format!("{kind}-{number}"));
    std::fs::create_dir(&directory).expect("a new directory in our own");
    directory
}

/// Returns every process that works at or below the directory. That includes all children of a
/// server, whatever sessions and groups they have. Dead processes are not included.
pub(crate) fn processes_in(directory: &Path) -> Vec<i32> {
    let all = std::fs::read_dir("/proc").expect("/proc is mounted");
    let working_there = |pid: &i32| {
        std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(directory))
    };
    all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(working_there)
        .collect()
}
