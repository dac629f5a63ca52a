//! A disk whose power can be cut.
//!
//! The disk is an ext4 file system in a file. A cut of its power uses the kernel's own means for
//! such tests: the file system stops all output at once and discards what is still in memory,
//! including its journal (`EXT4_IOC_SHUTDOWN` with `EXT4_GOING_FLAGS_NOLOGFLUSH`, see `xfs_io`'s
//! command `shutdown`). From then on, each sync of a server fails. The next mount replays the
//! journal. The disk then contains everything that was synced before, and perhaps more, because the
//! kernel also writes on its own. A cut can also tear the writes that were not synced (`torn.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant, SystemTime};

use crate::command::{program, run, succeeds};
use crate::network::{self, in_own_network};
use crate::reaper;
use crate::seeded_rng::SeededRng;
use crate::torn::Files;

/// Size for several servers. Only the blocks that are used take memory.
const SIZE: &str = "2G";

/// The ioctl in Python, because Rust's libraries offer it only as unsafe code.
const SHUT_DOWN: &str = "import fcntl, os, struct, sys\n\
    fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack('I', 2))";

/// Time limit for the last process to close its files.
const PATIENCE: Duration = Duration::from_secs(20);

/// A disk for all servers that are started while it exists. There is one at a time.
#[derive(Debug)]
pub struct Disk {
    image: PathBuf,
    directory: PathBuf,
    /// How many cuts tore writes.
    torn: AtomicU64,
}

impl Disk {
    /// Returns whether a disk can be created. It requires root, a loop device, and a [private
    /// network](crate::in_own_network), which also has private mounts: these end with the test,
    /// however it ends.
    pub fn is_possible() -> bool {
        network::is_private() && succeeds(Command::new("losetup").arg("--find"))
    }

    /// Creates a disk for several servers. It must be [possible](Self::is_possible).
    pub fn new() -> Self {
        Self::of(SIZE)
    }

    /// Creates a disk of this size, such as `64M`. It must be [possible](Self::is_possible).
    pub fn of(size: &str) -> Self {
        assert!(Self::is_possible(), "a disk requires root and a loop device");
        let place = reaper::directory("disk");
        let (image, directory) = (place.join("image"), place.join("mounted"));
        std::fs::create_dir(&directory).expect("a directory in our directory");
        run(Command::new("truncate").args(["--size", size]).arg(&image));
        let mkfs = program("mkfs.ext4", &[], "e2fsprogs");
        run(Command::new(mkfs).args(["-q", "-F", "-E", "lazy_itable_init=1"]).arg(&image));
        let disk = Self { image, directory, torn: AtomicU64::new(0) };
        disk.mount();
        reaper::place_servers_in(Some(disk.directory.clone()));
        disk
    }

    /// Returns the directory at which the disk is mounted.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Writes everything, like the sync that the kernel does after half a minute at the latest.
    /// Servers do not sync files that were copied for them, such as a new database.
    pub fn sync(&self) {
        run(Command::new("sync").arg("--file-system").arg(&self.directory));
    }

    /// Cuts the power of all servers on the disk, which `kill` kills, and restores it. They can be
    /// started again afterwards.
    pub fn cycle_power(&self, kill: impl FnOnce()) {
        self.cut_power();
        kill();
        self.restore_power();
    }

    /// Like [`cycle_power`](Self::cycle_power), but the servers are killed before the power is cut,
    /// and the writes that were not synced are torn. Returns the number of changed files.
    pub fn cycle_power_tearing_writes(&self, kill: impl FnOnce()) -> usize {
        kill();
        let written = Files::of(&self.directory);
        self.cut_power();
        self.restore_power();
        let mut rng = SeededRng(self.torn.fetch_add(1, SeqCst) + 1);
        let changed = written.tear(&self.directory, &mut rng);
        self.sync();
        changed
    }

    /// Cuts the power: nothing is written any more, and what was not written is lost. All processes
    /// that use the disk must be killed before [`restore_power`](Self::restore_power).
    pub fn cut_power(&self) {
        let python = program("python3", &[], "python3");
        run(Command::new(python).args(["-c", SHUT_DOWN]).arg(&self.directory));
    }

    /// Restores the power. The disk contains what was written before it was cut.
    pub fn restore_power(&self) {
        self.unmount();
        self.mount();
    }

    /// Makes this machine look as after a restart: it has another boot ID, and the disk's files are
    /// older than its start. Only this test sees the ID.
    pub fn pretend_restart(&self) {
        const ID: &str = "/proc/sys/kernel/random/boot_id";
        let file = self.image.with_file_name("boot_id");
        let is_first = !file.exists();
        let id = std::fs::read("/proc/sys/kernel/random/uuid").expect("a random ID");
        std::fs::write(&file, id).expect("a file in our directory");
        if is_first {
            run(Command::new("mount").arg("--bind").arg(&file).arg(ID));
        }
        crate::torn::set_times(&self.directory, SystemTime::UNIX_EPOCH);
    }

    fn mount(&self) {
        run(Command::new("mount").args(["-o", "loop"]).args([&self.image, &self.directory]));
        // Servers that run as other users reach their directories.
        run(Command::new("chmod").arg("755").arg(&self.directory));
    }

    fn unmount(&self) {
        let end = Instant::now() + PATIENCE;
        while !succeeds(Command::new("umount").arg(&self.directory)) {
            assert!(Instant::now() < end, "a process still uses {}", self.directory.display());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        reaper::place_servers_in(None);
        // A server that still uses the disk keeps it until the server ends.
        let _ = succeeds(Command::new("umount").arg("--lazy").arg(&self.directory));
        let _ = std::fs::remove_file(&self.image);
    }
}

/// Runs the body of a test in a [network and with mounts of its own](in_own_network), where it can
/// create a disk. `test` is its name in the test harness. If the machine has no loop device, this
/// prints a message and does nothing.
pub fn where_disks_are_possible(test: &str, body: impl FnOnce()) {
    in_own_network(test, || match Disk::is_possible() {
        true => body(),
        false => eprintln!("{test}: not run: this machine has no loop device"),
    });
}
