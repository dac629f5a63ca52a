//! SeaweedFS: one server with the S3 protocol and a bucket.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::daemon::{Daemon, Launch, Setup, accepts};
use crate::{port, python, reaper};

/// The bucket that exists from the beginning.
const BUCKET: &str = "locks";

/// Fixed options: no additional ports, no telemetry, and little disk space.
const FIXED: [&str; 5] = [
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=64",
    "-volume.max=20",
];

/// A SeaweedFS server, without access control unless configured. Further arguments of its command
/// line can be added with [`Setup::arg`].
#[derive(Debug)]
pub struct SeaweedFs {
    daemon: Daemon,
    port: u16,
}

impl SeaweedFs {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
    pub fn with(setup: Setup) -> Self {
        let mut last = String::new();
        for _ in 0..5 {
            match Self::try_start(&setup) {
                Ok(server) => return server,
                Err(why) if why.to_lowercase().contains("address already in use") => last = why,
                Err(why) => panic!("{why}"),
            }
        }
        panic!("five times a port was taken: {last}");
    }

    /// Starts a server that accepts only this key and secret.
    pub fn guarded(key: &str, secret: &str) -> Self {
        let directory = reaper::directory("seaweed-users");
        let file = directory.join("users.json");
        let users = format!(
            r#"{{"identities":[{{"name":"lh","credentials":[{{"accessKey":"{key}","secretKey":"{secret}"}}],
            "actions":["Admin","Read","Write","List"]}}]}}"#
        );
        std::fs::write(&file, users).expect("a file of ours");
        Self::with(Setup::new().arg(format!("-s3.config={}", file.display())))
    }

    fn try_start(setup: &Setup) -> Result<Self, String> {
        let directory = reaper::directory("seaweed");
        let data = directory.join("data");
        std::fs::create_dir_all(&data).map_err(|why| why.to_string())?;
        let mut args: Vec<String> =
            ["server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
                .map(Into::into)
                .to_vec();
        args.push(format!("-dir={}", data.display()));
        args.extend(FIXED.map(Into::into));
        for part in ["filer", "s3"] {
            let socket = directory.join(format!("{part}.sock"));
            args.push(format!("-{part}.localSocket={}", socket.display()));
        }
        let (s3, mut others) = (port::free(), String::new());
        for part in ["master", "volume", "filer", "s3"] {
            let (port, other) = (if part == "s3" { s3 } else { port::free() }, port::free());
            args.push(format!("-{part}.port={port}"));
            args.push(format!("-{part}.port.grpc={other}"));
            others.push_str(&format!("{other}\n"));
        }
        // The server's sockets are in a fixed location, so the reaper removes them.
        std::fs::write(directory.join("ports"), others).map_err(|why| why.to_string())?;
        args.extend(setup.args.iter().cloned());
        let weed = python().with_file_name("weed");
        assert!(weed.exists(), "no {}: run ./test.sh once", weed.display());
        let launch = Launch { program: weed, args, user: None }.before_others();
        let daemon = Daemon::start("seaweed", directory, launch, None, &|| is_ready(s3))?;
        Ok(Self { daemon, port: s3 })
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the server's endpoint URL.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the URL of this folder in the server's bucket.
    pub fn url(&self, folder: &str) -> String {
        format!("s3://{BUCKET}/{folder}?anonymous=yes&endpoint={}", self.endpoint())
    }

    /// Sends a request for an object in the bucket, and returns the status and the body of the
    /// answer.
    pub fn ask(&self, method: &str, object: &str, body: &str) -> (u16, String) {
        ask(self.port, method, &format!("/{BUCKET}/{object}"), body).expect("it answers")
    }

    /// Returns the server's output.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Returns the server's process ID.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Sends SIGSTOP to the server.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Sends SIGCONT to the server.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// Sends SIGKILL to the server.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same ports with its data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }
}

/// Returns whether the server accepts objects, and not only connections. A refusal for lack of
/// permission also counts as ready.
fn is_ready(port: u16) -> bool {
    let is_done = |reply: Option<(u16, String)>| matches!(reply, Some((200 | 403 | 409, _)));
    accepts(port)
        && is_done(ask(port, "PUT", &format!("/{BUCKET}"), ""))
        && is_done(ask(port, "PUT", &format!("/{BUCKET}/ready"), "yes"))
}

fn ask(port: u16, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((status, answer.split_once("\r\n\r\n")?.1.to_owned()))
}
