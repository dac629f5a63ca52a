//! Azurite, the official emulator of Azure Blob Storage: one server, with a container.

use std::process::Command;

use crate::command::run;
use crate::daemon::{Daemon, Launch, accepts, start_somewhere};
use crate::{python, reaper};

/// The container that exists from the beginning.
const CONTAINER: &str = "locks";
/// The account of every emulator, and its key.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// An Azurite server that keeps acknowledged writes when it is killed.
#[derive(Debug)]
pub struct Azurite {
    daemon: Daemon,
    port: u16,
}

impl Azurite {
    /// Starts a private server.
    pub fn start() -> Self {
        let server = start_somewhere(Self::try_start);
        server.make_container();
        server
    }

    fn try_start(port: u16) -> Result<Self, String> {
        let directory = reaper::directory("azurite");
        let program = python::node_module("azurite/dist/src/blob/main.js");
        let (port_text, place) = (port.to_string(), directory.display().to_string());
        let script = program.display().to_string();
        let fixed = [
            &script,
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            &port_text,
            "--location",
            &place,
        ];
        let args = fixed.map(str::to_owned).to_vec();
        let launch = Launch { program: python().with_file_name("node"), args, user: None };
        let launch = launch.before_others();
        let daemon = Daemon::start("azurite", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port })
    }

    fn make_container(&self) {
        let port = self.port.to_string();
        let script = include_str!("azurite/container.py");
        run(Command::new(python()).args(["-c", script, &port, ACCOUNT, KEY, CONTAINER]));
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the URL of this folder in the server's container.
    pub fn url(&self, folder: &str) -> String {
        let port = self.port;
        format!("az://{CONTAINER}/{folder}?emulator=yes&endpoint=http://127.0.0.1:{port}")
    }

    /// Sends SIGKILL to the server.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same port with its data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| accepts(self.port));
    }
}
