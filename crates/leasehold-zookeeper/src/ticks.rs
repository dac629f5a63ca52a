//! How long a tick of the servers' can be: nobody tells clients, but servers give no session below two
//! ticks unless they are told to, and tell what they give.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::members::Members;
use super::stream::Stream;

/// The shortest session that a member gives: asked for on a connection of its own, and given back.
pub(super) async fn shortest_session(members: &Members) -> io::Result<Duration> {
    let mut fault = io::Error::from(io::ErrorKind::NotFound);
    for member in members.in_turn().await {
        let asked = async { ask(members.reach(&member).await?).await };
        match timeout(members.patience() * 2, asked).await {
            Ok(Ok(shortest)) => return Ok(shortest),
            Ok(Err(why)) => fault = why,
            Err(late) => fault = late.into(),
        }
    }
    Err(fault)
}

async fn ask(mut stream: Box<dyn Stream>) -> io::Result<Duration> {
    // Length; version, last transaction seen, a session of 1 ms, no session of ours; no password.
    let mut request = Vec::with_capacity(64);
    request.extend(45_u32.to_be_bytes());
    request.extend([0; 12]);
    request.extend(1_u32.to_be_bytes());
    request.extend([0; 8]);
    request.extend(16_u32.to_be_bytes());
    request.extend([0; 16 + 1]);
    stream.write_all(&request).await?;
    stream.flush().await?;
    // Length, version, the session's time.
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await?;
    let [.., a, b, c, d] = answer;
    let shortest = Duration::from_millis(u32::from_be_bytes([a, b, c, d]).into());
    // Length; number, "close the session". Should it not arrive, that session is soon over.
    let mut goodbye = Vec::with_capacity(12);
    goodbye.extend(8_u32.to_be_bytes());
    goodbye.extend(1_i32.to_be_bytes());
    goodbye.extend((-11_i32).to_be_bytes());
    stream.write_all(&goodbye).await?;
    stream.flush().await?;
    // The rest of both answers, up to the end that the server makes.
    let mut rest = [0; 64];
    while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {}
    Ok(shortest)
}
