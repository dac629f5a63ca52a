//! A headless browser, which returns a page as text or as a picture.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::command::program;
use crate::reaper;

/// Time limit for a page. It is only reached if something is wrong.
const PATIENCE: Duration = Duration::from_secs(120);

/// Chromium with its own profile.
#[derive(Debug)]
pub struct Browser {
    directory: PathBuf,
    size: (u32, u32),
    is_dark: bool,
}

impl Browser {
    /// Creates a browser with a window of this size.
    pub fn new(width: u32, height: u32) -> Self {
        Self { directory: reaper::directory("browser"), size: (width, height), is_dark: false }
    }

    /// Sets the user's preference for dark pages.
    pub fn dark(mut self) -> Self {
        self.is_dark = true;
        self
    }

    /// Returns the page's HTML after its scripts have run. `address` is appended to the file's
    /// name, such as `#place`.
    pub fn document(&self, page: &Path, address: &str) -> String {
        String::from_utf8(self.run(&["--dump-dom"], page, address)).expect("a document of text")
    }

    /// Returns a picture of the visible part of the page, as PNG.
    pub fn picture(&self, page: &Path, address: &str) -> Vec<u8> {
        self.filed("--screenshot", page, address)
    }

    /// Returns the printed page as PDF.
    pub fn print(&self, page: &Path) -> Vec<u8> {
        self.filed("--print-to-pdf", page, "")
    }

    /// Starts a browser that is controlled by messages of the Chrome DevTools Protocol.
    pub fn control(&self) -> DevTools {
        // Chromium reads messages from descriptor 3 and writes them to 4.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$@" 3<&0 4>&1 0</dev/null 1>&2"#, "sh"]);
        command.arg(program("chromium", &[], "chromium"));
        self.options(&mut command);
        command.args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--remote-debugging-pipe",
        ]);
        let log = std::fs::File::create(self.directory.join("output")).expect("our own directory");
        command.current_dir(&self.directory).stderr(log);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
        let requests = child.stdin.take().expect("it is piped");
        let answers = BufReader::new(child.stdout.take().expect("it is piped"));
        let (sender, messages) = mpsc::channel();
        std::thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let message = String::from_utf8(message).expect("messages are UTF-8");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        DevTools { child, requests, messages }
    }

    /// Returns the contents of a file that Chromium writes.
    fn filed(&self, what: &str, page: &Path, address: &str) -> Vec<u8> {
        let file = self.directory.join("result.png");
        let _ = std::fs::remove_file(&file);
        self.run(&[&format!("{what}={}", file.display())], page, address);
        std::fs::read(&file).unwrap_or_else(|e| panic!("no {what} of {}: {e}", page.display()))
    }

    /// Adds the options that are the same for each start.
    fn options(&self, command: &mut Command) {
        let (width, height) = self.size;
        // Root cannot use Chromium's sandbox, and these pages are trusted.
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        command.args([
            "--force-device-scale-factor=1",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ]);
        command.arg(format!("--window-size={width},{height}"));
        command.arg(format!("--user-data-dir={}", self.directory.join("profile").display()));
        // 0 means dark, 1 means light.
        command.arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!self.is_dark)));
    }

    fn run(&self, what: &[&str], page: &Path, address: &str) -> Vec<u8> {
        let mut command = Command::new(program("chromium", &[], "chromium"));
        self.options(&mut command);
        command.args(what).arg(format!("file://{}{address}", page.display()));
        let output =
            std::fs::File::create(self.directory.join("output")).expect("our own directory");
        let printed = self.directory.join("printed");
        let out = std::fs::File::create(&printed).expect("our own directory");
        command.current_dir(&self.directory).stdin(Stdio::null()).stdout(out).stderr(output);
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
        let output = std::fs::read_to_string(self.directory.join("output")).unwrap_or_default();
        assert!(status.success(), "{command:?}: {status}\n{output}");
        std::fs::read(printed).expect("our own file")
    }
}

/// A browser that is controlled by messages of the Chrome DevTools Protocol: JSON objects, as text.
/// Dropping it ends the browser.
#[derive(Debug)]
pub struct DevTools {
    child: Child,
    requests: ChildStdin,
    messages: mpsc::Receiver<String>,
}

impl DevTools {
    /// Sends a message.
    pub fn send(&mut self, message: &str) {
        let sent = self.requests.write_all(&[message.as_bytes(), &[0]].concat());
        sent.and_then(|()| self.requests.flush()).expect("the browser runs");
    }

    /// Waits for the next message.
    pub fn receive(&self) -> String {
        self.messages.recv_timeout(PATIENCE).expect("a message of the browser")
    }
}

impl Drop for DevTools {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
