//! A browser without a screen: what it makes of a page, as text and as a picture.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::command::program;
use crate::reaper;

/// How long a page may take. Only ever reached when something is wrong.
const PATIENCE: Duration = Duration::from_secs(120);

/// A way to look at pages: Chromium, with a profile of its own.
#[derive(Debug)]
pub struct Browser {
    directory: PathBuf,
    size: (u32, u32),
    is_dark: bool,
}

impl Browser {
    /// With a window of this size.
    pub fn new(width: u32, height: u32) -> Self {
        Self { directory: reaper::directory("browser"), size: (width, height), is_dark: false }
    }

    /// Of somebody who prefers dark pages.
    pub fn dark(mut self) -> Self {
        self.is_dark = true;
        self
    }

    /// The document as it is when the page's programs have run. `address` is behind the file's name,
    /// as `#place`.
    pub fn document(&self, page: &Path, address: &str) -> String {
        String::from_utf8(self.run(&["--dump-dom"], page, address)).expect("a document of text")
    }

    /// What is seen, as PNG.
    pub fn picture(&self, page: &Path, address: &str) -> Vec<u8> {
        self.filed("--screenshot", page, address)
    }

    /// What is printed, as PDF.
    pub fn print(&self, page: &Path) -> Vec<u8> {
        self.filed("--print-to-pdf", page, "")
    }

    /// What Chromium writes into a file.
    fn filed(&self, what: &str, page: &Path, address: &str) -> Vec<u8> {
        let file = self.directory.join("result.png");
        let _ = std::fs::remove_file(&file);
        self.run(&[&format!("{what}={}", file.display())], page, address);
        std::fs::read(&file).unwrap_or_else(|e| panic!("no {what} of {}: {e}", page.display()))
    }

    fn run(&self, what: &[&str], page: &Path, address: &str) -> Vec<u8> {
        let (width, height) = self.size;
        let mut command = Command::new(program("chromium", &[], "chromium"));
        // Root may not have its sandbox, and these pages are ours.
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        command.args([
            "--force-device-scale-factor=1",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ]);
        command.arg(format!("--window-size={width},{height}"));
        command.arg(format!("--user-data-dir={}", self.directory.join("profile").display()));
        // Light is 1.
        command.arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!self.is_dark)));
        command.args(what).arg(format!("file://{}{address}", page.display()));
        let said = std::fs::File::create(self.directory.join("said")).expect("our own directory");
        let printed = self.directory.join("printed");
        let out = std::fs::File::create(&printed).expect("our own directory");
        command.current_dir(&self.directory).stdin(Stdio::null()).stdout(out).stderr(said);
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
        let end = Instant::now() + PATIENCE;
        let status = loop {
            match child.try_wait().expect("our own child") {
                Some(status) => break status,
                None if Instant::now() > end => {
                    let _ = child.kill();
                    panic!("{} is not done after {PATIENCE:?}", page.display());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let said = std::fs::read_to_string(self.directory.join("said")).unwrap_or_default();
        assert!(status.success(), "{command:?}: {status}\n{said}");
        std::fs::read(printed).expect("our own file")
    }
}
