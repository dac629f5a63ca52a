//! SeaweedFS: one server that speaks S3, with a bucket.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::daemon::{Daemon, Launch, Setup, accepts};
use crate::{port, python, reaper};

/// The bucket that is there from the beginning.
const BUCKET: &str = "locks";

/// No ports that were not asked for, no word to anybody, and little room.
const FIXED: [&str; 5] = [
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=64",
    "-volume.max=20",
];

/// A SeaweedFS server that lets everybody in, unless it was told otherwise. More arguments, as on its own
/// command line, with [`Setup::arg`].
#[derive(Debug)]
pub struct SeaweedFs {
    daemon: Daemon,
    port: u16,
}

impl SeaweedFs {
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// The same, with more wishes.
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

    /// Only for whoever may do this: the rest is refused.
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
        // Their sockets are where they cannot be told to be: the reaper removes them.
        std::fs::write(directory.join("ports"), others).map_err(|why| why.to_string())?;
        args.extend(setup.args.iter().cloned());
        let weed = python().with_file_name("weed");
        assert!(weed.exists(), "no {}: run ./test.sh once", weed.display());
        let launch = Launch { program: weed, args, user: None };
        let daemon = Daemon::start("seaweed", directory, launch, None, &|| is_ready(s3))?;
        Ok(Self { daemon, port: s3 })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What it is asked at.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The URL of this folder of its bucket.
    pub fn url(&self, folder: &str) -> String {
        format!("s3://{BUCKET}/{folder}?anonymous=yes&endpoint={}", self.endpoint())
    }

    /// Its status and what it says, of an object in the bucket.
    pub fn ask(&self, method: &str, object: &str, body: &str) -> (u16, String) {
        ask(self.port, method, &format!("/{BUCKET}/{object}"), body).expect("it answers")
    }

    /// What it printed.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// kill -9.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Up again on the same ports, with what it kept; killed before if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }
}

/// It takes objects, not only connections: or it would not let us, and is there all the same.
fn is_ready(port: u16) -> bool {
    let is_done = |told: Option<(u16, String)>| matches!(told, Some((200 | 403 | 409, _)));
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
