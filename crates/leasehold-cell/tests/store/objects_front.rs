//! A proxy before an object store with the faults of proxies and stores. It reads each request and
//! decides what to do.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Does {
    Passes,
    /// Passes it on without the conditional headers, like a proxy that does not know them.
    Carelessly,
    /// Sends it twice and returns the second reply.
    Twice,
    /// Replies with this status and code, and does not pass the request on.
    Says(u16, &'static str),
    /// Never replies.
    Hangs,
}

/// Starts a proxy before this port, which decides by a request's first line. Returns the proxy's
/// port.
pub(crate) fn front(behind: u16, does: impl Fn(&str) -> Does + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let does = Arc::new(does);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let does = does.clone();
            std::thread::spawn(move || pass_on(&mut stream.unwrap(), behind, &*does));
        }
    });
    port
}

/// Handles one request.
fn pass_on(stream: &mut TcpStream, behind: u16, does: &dyn Fn(&str) -> Does) -> Option<()> {
    let mut request = BufReader::new(stream.try_clone().ok()?);
    let mut first = String::new();
    request.read_line(&mut first).ok()?;
    let does = does(&first);
    let (mut head, mut length) = (first, 0);
    loop {
        let mut line = String::new();
        request.read_line(&mut line).ok()?;
        let small = line.to_lowercase();
        if let Some(content_length) = small.strip_prefix("content-length:") {
            length = content_length.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
        let is_dropped = does == Does::Carelessly && small.starts_with("if-");
        if !is_dropped && !small.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    request.read_exact(&mut body).ok()?;
    let ask = || {
        let mut server = TcpStream::connect(("127.0.0.1", behind)).ok()?;
        server.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).ok()?;
        server.write_all(&body).ok()?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer).ok()?;
        Some(answer)
    };
    match does {
        Does::Passes | Does::Carelessly => stream.write_all(&ask()?).ok(),
        Does::Twice => {
            ask()?;
            stream.write_all(&ask()?).ok()
        }
        Does::Says(status, code) => {
            let page = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
            let answer = format!(
                "HTTP/1.1 {status} Said\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\
                 Connection: close\r\n\r\n{page}",
                page.len()
            );
            stream.write_all(answer.as_bytes()).ok()
        }
        Does::Hangs => {
            // Wait until the client closes the connection.
            let _ = request.read(&mut [0; 1]);
            None
        }
    }
}
