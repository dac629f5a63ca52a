//! moto, an S3 emulator in Python. It implements the protocol independently of SeaweedFS, and keeps
//! objects in memory.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

use crate::daemon::{Daemon, Launch, accepts, start_somewhere};
use crate::{python, reaper};

/// Runs moto's server, and answers one request after the other. By itself, moto checks the
/// condition of a write and then writes, so two threads could replace the same version.
const PROGRAM: &str = r#"
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

moto = DomainDispatcherApplication(create_backend_app)
turn = threading.Lock()

def answer(environ, start_response):
    with turn:
        return list(moto(environ, start_response))

run_simple("127.0.0.1", int(sys.argv[1]), answer, threaded=True)
"#;

/// The bucket that exists from the beginning.
const BUCKET: &str = "locks";
/// Request header with the caller's identity. moto requires it, but does not verify it.
const OWNER: &str = "AWS4-HMAC-SHA256 Credential=lh/20260101/us-east-1/s3/aws4_request, \
                     SignedHeaders=host, Signature=lh";

/// A server with a bucket that all clients may write to.
#[derive(Debug)]
pub struct Moto {
    daemon: Daemon,
    port: u16,
}

impl Moto {
    /// Starts a private server.
    pub fn start() -> Self {
        start_somewhere(Self::try_start)
    }

    fn try_start(port: u16) -> Result<Self, String> {
        let directory = reaper::directory("moto");
        let args = vec!["-c".to_owned(), PROGRAM.to_owned(), port.to_string()];
        let launch = Launch { program: python(), args, user: None };
        let launch = launch.before_others();
        let is_ready = || accepts(port) && has_bucket(port);
        let daemon = Daemon::start("moto", directory, launch, None, &is_ready)?;
        Ok(Self { daemon, port })
    }

    /// Returns the URL of this folder in the server's bucket.
    pub fn url(&self, folder: &str) -> String {
        let port = self.port;
        format!("s3://{BUCKET}/{folder}?anonymous=yes&endpoint=http://127.0.0.1:{port}")
    }

    /// Returns the server's output.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}

/// Creates the bucket and returns whether that succeeded. A policy grants access to its objects.
/// Without it, an object is private for a moment before its own access list exists, and anonymous
/// readers are refused.
fn has_bucket(port: u16) -> bool {
    let policy = format!(
        r#"{{"Version":"2012-10-17","Statement":[{{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":"arn:aws:s3:::{BUCKET}/*"}}]}}"#
    );
    let done =
        |path: &str, body: &str| put(port, path, body).is_some_and(|status| status / 100 == 2);
    done(BUCKET, "") && done(&format!("{BUCKET}?policy"), &policy)
}

/// Sends a PUT request, and returns the status of the answer.
fn put(port: u16, path: &str, body: &str) -> Option<u16> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    let length = body.len();
    let request = format!(
        "PUT /{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-amz-acl: public-read-write\r\n\
         Authorization: {OWNER}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split(' ').nth(1)?.parse().ok()
}
