//! Compares the store on NATS JetStream with a handmade lock over a bare connection. That is a
//! message that is accepted only if the key has none, and a marker that removes it. It has no
//! queue, no token and no lease.

use std::time::Duration;

use testbed::Nats;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::Builder;

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::queued;

const CLIENTS: usize = 8;

/// A bare connection, and the number of the last message of the key.
struct Bare {
    stream: BufReader<TcpStream>,
    last: u64,
}

impl Bare {
    async fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        let mut stream = BufReader::new(stream);
        let hello = "CONNECT {\"verbose\":false,\"headers\":true}\r\nSUB answer 1\r\n";
        stream.write_all(hello.as_bytes()).await?;
        Ok(Self { stream, last: 0 })
    }

    /// Writes a message on the condition that the last one is unchanged.
    async fn write(&mut self, more: &str, value: &str) -> Result<()> {
        let last = self.last;
        let head = format!("NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {last}\r\n{more}\r\n");
        let (headers, all) = (head.len(), head.len() + value.len());
        let text = format!("HPUB $KV.leasehold.raw answer {headers} {all}\r\n{head}{value}\r\n");
        self.stream.write_all(text.as_bytes()).await?;
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).await?;
            if line.starts_with("PING") {
                self.stream.write_all(b"PONG\r\n").await?;
            } else if line.starts_with("MSG ") {
                let length: usize = line.trim_end().rsplit(' ').next().unwrap_or("0").parse()?;
                let mut payload = vec![0; length + 2];
                self.stream.read_exact(&mut payload).await?;
                let payload_text = String::from_utf8_lossy(&payload).into_owned();
                let number = payload_text.split("\"seq\":").nth(1).unwrap_or_default();
                let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
                self.last = digits.parse().map_err(|_| format!("not taken: {payload_text}"))?;
                return Ok(());
            } else if line.is_empty() || line.starts_with("-ERR") {
                return Err(format!("not an answer: {line}").into());
            }
        }
    }
}

pub(crate) fn pair(effort: Effort) -> Result<()> {
    let server = Nats::start();
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let bare = tokio::sync::Mutex::new(runtime.block_on(Bare::open(server.port()))?);
    let by_hand = time_pairs(&runtime, effort, async || {
        let mut bare = bare.lock().await;
        bare.write("Nats-TTL: 15\r\n", "0123456789abcdef0123456789abcdef").await?;
        bare.write("KV-Operation: DEL\r\n", "").await
    });
    let mut subjects = vec![Subject::new("create + delete", by_hand)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("nats:, uncontended pair", &alternate(effort, subjects)?, 1);
    Ok(())
}

/// Returns how many messages the bucket has accepted.
fn written(server: &Nats) -> f64 {
    let reply = server.ask("$JS.API.STREAM.INFO.KV_leasehold", "");
    let last = reply.split("\"last_seq\":").nth(1).and_then(|rest| rest.split(',').next());
    last.and_then(|n| n.parse().ok()).unwrap_or(f64::NAN)
}

pub(crate) fn contention(effort: Effort) -> Result<()> {
    let server = Nats::start();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // One more client holds the lock until all contenders wait.
    let clients: std::result::Result<Vec<_>, _> =
        (0..=CLIENTS).map(|_| runtime.block_on(leasehold::connect(server.url()))).collect();
    let clients = clients?;
    for n in [8, 32] {
        let ours = || {
            let count = async || Ok(written(&server));
            runtime.block_on(queued::contend(&clients, n, effort, Duration::ZERO, count))
        };
        let subjects = vec![Subject::new("leasehold", ours)];
        let title = format!("nats:, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 0);
    }
    Ok(())
}
