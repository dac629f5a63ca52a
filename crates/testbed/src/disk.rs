//! A disk whose power can be cut.
//!
//! The disk is an ext4 file system in a file. A cut of its power uses the kernel's own means for
//! such tests: the file system stops all output at once and discards what is still in memory,
//! including its journal (`EXT4_IOC_SHUTDOWN` with `EXT4_GOING_FLAGS_NOLOGFLUSH`, see `xfs_io`'s
//! command `shutdown`). From then on, each sync of a server fails. The next mount replays the
//! journal. The disk then contains everything that was synced before, and perhaps more, because the
//! kernel also writes on its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::command::{program, run, succeeds};
use crate::{network, reaper};

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
}

impl Disk {
    /// Creates a disk, or returns `None` if that is not possible here. It requires root, a loop
    /// device, and a [private network](crate::in_own_network), which also has private mounts: these
    /// end with the test, however it ends.
    pub fn new() -> Option<Self> {
        Self::of(SIZE)
    }

    /// Like [`new`](Self::new), with a size such as `64M`.
    pub fn of(size: &str) -> Option<Self> {
        let has_loop = || succeeds(Command::new("losetup").arg("--find"));
        if !network::is_private() || !has_loop() {
            return None;
        }
        let place = reaper::directory("disk");
        let (image, directory) = (place.join("image"), place.join("mounted"));
        std::fs::create_dir(&directory).expect("a directory in our directory");
        run(Command::new("truncate").args(["--size", size]).arg(&image));
        let mkfs = program("mkfs.ext4", &[], "e2fsprogs");
        run(Command::new(mkfs).args(["-q", "-F", "-E", "lazy_itable_init=1"]).arg(&image));
        let disk = Self { image, directory };
        disk.mount();
        reaper::place_servers_in(Some(disk.directory.clone()));
        Some(disk)
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

impl Drop for Disk {
    fn drop(&mut self) {
        reaper::place_servers_in(None);
        // A server that still uses it keeps its files, which end with it.
        let _ = succeeds(Command::new("umount").arg("--lazy").arg(&self.directory));
    }
}
