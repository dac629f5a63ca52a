//! Objects: what people get wrong as they connect, and object stores that cannot keep locks.

#![cfg(all(feature = "s3", feature = "gs", feature = "az"))]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use crate::common::*;
use leasehold::ErrorKind;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee};
use testbed::SeaweedFs;

/// What is told to whoever connects so.
async fn told(url: &str) -> (ErrorKind, String) {
    let error = leasehold::connect(url).await.expect_err(url);
    let text = format!("{error:#}");
    assert!(!text.contains("sekret") && text.lines().count() == 1, "{text}");
    (error.kind(), text)
}

/// A proxy that leaves out the headers it does not know, which are those of conditions.
fn careless(behind: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || pass_on(&mut stream.unwrap(), behind));
        }
    });
    port
}

/// One request, and its answer.
fn pass_on(stream: &mut TcpStream, behind: u16) -> Option<()> {
    let mut request = BufReader::new(stream.try_clone().ok()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        request.read_line(&mut line).ok()?;
        let small = line.to_lowercase();
        if let Some(told) = small.strip_prefix("content-length:") {
            length = told.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
        if !small.starts_with("if-") && !small.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    request.read_exact(&mut body).ok()?;
    let mut server = TcpStream::connect(("127.0.0.1", behind)).ok()?;
    server.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).ok()?;
    server.write_all(&body).ok()?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).ok()?;
    stream.write_all(&answer).ok()
}

#[test]
fn s94_connection_mistakes_at_object_stores_name_the_fix() {
    run(async {
        let closed = SeaweedFs::start();
        closed.kill();
        let (kind, text) = told(&closed.url("s94")).await;
        assert!(kind == ErrorKind::Unreachable && text.contains("check endpoint"), "{text}");
        // Something else listens there.
        let redis = testbed::redis().port();
        let wrong = format!("s3://locks?anonymous=yes&endpoint=http://127.0.0.1:{redis}");
        let (kind, text) = told(&wrong).await;
        assert!(kind == ErrorKind::Unreachable && text.contains("check endpoint"), "{text}");
        // Somebody else's bucket.
        let guarded = SeaweedFs::guarded("lh", "sekret");
        let (kind, text) = told(&guarded.url("s94")).await;
        assert!(kind == ErrorKind::Denied && text.contains("s3:PutObject"), "{text}");
        // Nobody's.
        let google = testbed::google();
        let (kind, text) = told(&google.url("s94").replace("gs://locks", "gs://nobodys")).await;
        assert!(kind == ErrorKind::Config && text.contains("there is no gs://nobodys"), "{text}");
        let azure = testbed::azurite();
        let (kind, text) = told(&azure.url("s94").replace("az://locks", "az://nobodys")).await;
        assert!(kind == ErrorKind::Config && text.contains("there is no az://nobodys"), "{text}");
    });
}

#[test]
fn an_endpoint_that_leaves_conditions_out_is_refused() {
    run(async {
        let server = SeaweedFs::start();
        let careless = careless(server.port());
        let url = format!("s3://locks/a?anonymous=yes&endpoint=http://127.0.0.1:{careless}");
        let (kind, text) = told(&url).await;
        assert!(kind == ErrorKind::Config && text.contains("Two could hold"), "{text}");
        // That the bucket was proved from elsewhere is no proof of this way to it.
        connect(&server.url("a")).await;
        let (kind, text) = told(&url).await;
        assert!(kind == ErrorKind::Config && text.contains("Two could hold"), "{text}");
    });
}

#[test]
fn require_and_doctor_say_what_objects_cannot_keep() {
    run(async {
        let url = testbed::seaweed().url("doctor");
        for wanted in [
            Guarantee::GrantDurability(Durability::Disk),
            Guarantee::Push,
            Guarantee::AtLeast,
            Guarantee::LockDelay,
        ] {
            let refused = leasehold::builder().require(wanted).connect(&url).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported, "{wanted}");
        }
        for wanted in [Guarantee::ExclusiveOnStoreCrash, Guarantee::Fifo] {
            leasehold::builder().require(wanted).connect(&url).await.unwrap();
        }
        let locks = connect(&url).await;
        let found = locks.diagnose().await.unwrap();
        let found: Vec<_> = found.iter().map(|found| (found.id, found.severity)).collect();
        assert_eq!(found, [("lifecycle", Severity::Note)]);
    });
}
