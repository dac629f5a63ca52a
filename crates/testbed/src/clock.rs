//! A server's wall clock, which can be shifted while it runs (`clockskew.c` explains how).

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::command::run;
use crate::reaper;

#[derive(Debug)]
pub(crate) struct MovableClock {
    path: PathBuf,
    file: File,
}

impl MovableClock {
    /// Creates a clock that shows the true time until it is shifted.
    pub(crate) fn new(directory: &Path) -> Self {
        let path = directory.join("clock-offset");
        let file = File::create_new(&path).expect("a new file in our directory");
        file.set_permissions(PermissionsExt::from_mode(0o644)).expect("our own file");
        let clock = Self { path, file };
        clock.shift(0);
        clock
    }

    /// Sets the clock to the true time plus `nanoseconds`, from now on.
    pub(crate) fn shift(&self, nanoseconds: i64) {
        self.file.write_all_at(&nanoseconds.to_ne_bytes(), 0).expect("our own file");
    }

    pub(crate) fn preload(&self, command: &mut Command) {
        command.env("LD_PRELOAD", shim()).env("CLOCKSKEW_FILE", &self.path);
    }
}

/// Returns the shared object of `clockskew.c`, which is compiled once for each test process.
fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let directory = reaper::directory("clock");
        let (source, object) = (directory.join("clockskew.c"), directory.join("clockskew.so"));
        std::fs::write(&source, include_str!("clockskew.c")).expect("a file in our directory");
        run(Command::new("cc").args(["-O2", "-shared", "-fPIC", "-o"]).arg(&object).arg(&source));
        object
    })
}
