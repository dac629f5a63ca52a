//! Compares the store on memcached with the usual handmade lock: `add` with an expiry, and
//! `delete`, over a bare connection. That has no queue and no token, and deletes whatever exists.

use std::time::Duration;

use testbed::Memcached;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::Builder;

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};
use crate::queued;

const CLIENTS: usize = 8;

pub(crate) fn pair(effort: Effort) -> Result<()> {
    let server = Memcached::start();
    let runtime = pair::runtime()?;
    // The server has just been started, so no lock was lost.
    let locks = runtime.block_on(leasehold::connect(server.url() + "?restart_delay_ms=0"))?;
    let bare = runtime.block_on(TcpStream::connect(("127.0.0.1", server.port())))?;
    bare.set_nodelay(true)?;
    let bare = tokio::sync::Mutex::new(BufReader::new(bare));
    let by_hand = time_pairs(&runtime, effort, async || {
        let mut bare = bare.lock().await;
        expect_reply(
            &mut bare,
            "add raw 0 15 32\r\n0123456789abcdef0123456789abcdef\r\n",
            "STORED",
        )
        .await?;
        expect_reply(&mut bare, "delete raw\r\n", "DELETED").await
    });
    let mut subjects = vec![Subject::new("add + delete", by_hand)];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("memcached:, uncontended pair", &alternate(effort, subjects)?, 1);
    Ok(())
}

async fn expect_reply(bare: &mut BufReader<TcpStream>, what: &str, wanted: &str) -> Result<()> {
    bare.write_all(what.as_bytes()).await?;
    let mut line = String::new();
    bare.read_line(&mut line).await?;
    if line.trim_end() == wanted { Ok(()) } else { Err(format!("not {wanted}: {line}").into()) }
}

pub(crate) fn contention(effort: Effort) -> Result<()> {
    let server = Memcached::start();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let url = server.url() + "?restart_delay_ms=0";
    // One more client holds the lock until all contenders wait.
    let clients: std::result::Result<Vec<_>, _> =
        (0..=CLIENTS).map(|_| runtime.block_on(leasehold::connect(&url))).collect();
    let clients = clients?;
    for n in [8, 32] {
        let ours = || {
            let count = async || Ok((server.figure("cmd_get") + server.figure("cmd_set")) as f64);
            runtime.block_on(queued::contend(&clients, n, effort, Duration::ZERO, count))
        };
        let subjects = vec![Subject::new("leasehold", ours)];
        let title = format!("memcached:, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 0);
    }
    Ok(())
}
