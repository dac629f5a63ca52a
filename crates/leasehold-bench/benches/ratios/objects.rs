//! Compares the store in objects with a handmade lock over a bare connection. That is two writes of
//! an object, each on the condition that the object is unchanged since the last write. It has no
//! queue, no token and no lease. The server is SeaweedFS on this machine. So the result is what
//! leasehold adds, and not the speed of an object store.

use std::time::Duration;

use testbed::SeaweedFs;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::Builder;

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::queued;

const CLIENTS: usize = 8;

/// A bare connection, and the tag of the last write.
struct Bare {
    stream: BufReader<TcpStream>,
    tag: Option<String>,
    writes: u64,
}

impl Bare {
    async fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::new(stream), tag: None, writes: 0 })
    }

    /// Writes the object on the condition that it is unchanged since the last write.
    async fn write(&mut self) -> Result<()> {
        let condition = match &self.tag {
            Some(tag) => format!("If-Match: {tag}"),
            None => "If-None-Match: *".to_owned(),
        };
        self.writes += 1;
        let value = format!("{:032}", self.writes);
        let request = format!(
            "PUT /locks/raw HTTP/1.1\r\nHost: 127.0.0.1\r\n{condition}\r\nContent-Length: {}\r\n\r\n{value}",
            value.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).await?;
            let header = line.trim_end().split_once(": ").map(|(n, v)| (n.to_lowercase(), v));
            match header {
                Some((name, value)) if name == "etag" => self.tag = Some(value.to_owned()),
                Some((name, value)) if name == "content-length" => length = value.parse()?,
                _ => {}
            }
            if line.trim_end().is_empty() {
                break;
            }
            head.push_str(&line);
        }
        self.stream.read_exact(&mut vec![0; length]).await?;
        if head.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(format!("no: {head}").into()) }
    }
}

pub(crate) fn pair(effort: Effort) -> Result<()> {
    let server = SeaweedFs::start();
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(server.url("bench")))?;
    let bare = tokio::sync::Mutex::new(runtime.block_on(Bare::open(server.port()))?);
    let by_hand = time_pairs(&runtime, effort, async || {
        let mut bare = bare.lock().await;
        bare.write().await?;
        bare.write().await
    });
    let mut subjects = vec![Subject::new("two conditional writes", by_hand)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("s3:, uncontended pair", &alternate(effort, subjects)?, 1);
    Ok(())
}

pub(crate) fn contention(effort: Effort) -> Result<()> {
    let server = SeaweedFs::start();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // One more client holds the lock until all contenders wait.
    let clients: std::result::Result<Vec<_>, _> =
        (0..=CLIENTS).map(|_| runtime.block_on(leasehold::connect(server.url("bench")))).collect();
    let clients = clients?;
    let ours = || {
        // The server does not count requests.
        let count = async || Ok(0.0);
        runtime.block_on(queued::contend(&clients, CLIENTS, effort, Duration::ZERO, count))
    };
    let subjects = vec![Subject::new("leasehold", ours)];
    contention::show("s3:, 8 contenders", &alternate(effort, subjects)?, 0);
    Ok(())
}
