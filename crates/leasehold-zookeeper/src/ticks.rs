//! The maximum length of the servers' tick. No server reports it to clients. But by default,
//! servers grant no session shorter than two ticks, and they report the session that they grant.

use std::io;
use std::time::Duration;

use leasehold_core::kit::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::members::Members;

/// Returns the shortest session that a member grants. Requests a session on a separate connection,
/// and closes it again.
pub(super) async fn shortest_session(members: &Members) -> io::Result<Duration> {
    let mut fault = io::Error::from(io::ErrorKind::NotFound);
    for member in members.in_turn().await {
        let limit = members.patience(true) * 2;
        let asked = async { ask(members.reach(&member).await?).await };
        match timeout(limit, asked).await {
            Ok(Ok((shortest, stream))) => {
                // If this fails, the server ends the short session soon.
                let _ = timeout(limit, close_session(stream)).await;
                return Ok(shortest);
            }
            Ok(Err(why)) => fault = why,
            Err(late) => fault = late.into(),
        }
    }
    Err(fault)
}

/// Requests a session and returns the time that the server grants.
async fn ask(mut stream: Box<dyn Stream>) -> io::Result<(Duration, Box<dyn Stream>)> {
    // Length; version, last transaction seen, a session of 1 ms, no existing session; no password.
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
    Ok((Duration::from_millis(u32::from_be_bytes([a, b, c, d]).into()), stream))
}

/// Closes the session of this connection, and waits until the server closes the connection.
async fn close_session(mut stream: Box<dyn Stream>) -> io::Result<()> {
    // Length; number, "close the session".
    let mut goodbye = Vec::with_capacity(12);
    goodbye.extend(8_u32.to_be_bytes());
    goodbye.extend(1_i32.to_be_bytes());
    goodbye.extend((-11_i32).to_be_bytes());
    stream.write_all(&goodbye).await?;
    stream.flush().await?;
    // The rest of both replies is read until the server closes the connection.
    let mut rest = [0; 64];
    while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {}
    Ok(())
}
