//! The control socket of a `leasehold hold` that runs in the background. `leasehold release NAME
//! --token T` contacts it.
//!
//! Only the hold knows whether the lock was held all the time, and it keeps the lock for the time
//! of `--min-hold`. So the hold itself releases the lock, and answers with the result. It accepts
//! only processes of the same user.
//!
//! The socket has an abstract name, so there is no file to clean up. The name consists of the user,
//! the token, and a digest of the store and the lock. The socket is a shortcut. If it does not
//! exist, `release` removes the claim from the store. So if another program occupies the name, only
//! the shortcut is lost.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::exit::Failure;

/// How long either side of the socket waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum length of a message in either direction, in bytes.
const LONGEST: u64 = 16 * 1024;

/// The address of a hold, and at the same time the content of the request.
#[derive(Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ControlSocket {
    store: String,
    name: String,
    token: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    failure: Option<(u8, String)>,
}

/// A process that requested the release and waits for the answer.
#[derive(Debug)]
pub(crate) struct ReleaseRequest(UnixStream);

impl ReleaseRequest {
    /// Sends the result of the release.
    pub(crate) async fn answer(mut self, released: &Result<(), Failure>) {
        let failure = released.as_ref().err().map(|f| (f.code, f.message.clone()));
        let answer = serde_json::to_vec(&Answer { failure }).unwrap_or_default();
        let _ = timeout(PATIENCE, self.0.write_all(&answer)).await;
    }
}

impl ControlSocket {
    pub(crate) fn new(store: &str, name: &str, token: u64) -> Self {
        Self { store: store.to_owned(), name: name.to_owned(), token }
    }

    fn address(&self) -> io::Result<net::SocketAddr> {
        let mut digest = DefaultHasher::new();
        self.hash(&mut digest);
        let user = rustix::process::geteuid().as_raw();
        let name = format!("leasehold-keeper-{user}-{}-{:016x}", self.token, digest.finish());
        net::SocketAddr::from_abstract_name(name)
    }

    /// Listens on the socket. Calls `on_request` for each authorized process that requests the
    /// release.
    pub(crate) fn open(
        self,
        on_request: impl Fn(ReleaseRequest) + Send + 'static,
    ) -> io::Result<()> {
        let listener = net::UnixListener::bind_addr(&self.address()?)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        tokio::spawn(async move {
            loop {
                if let Some(request) = self.next(&listener).await {
                    on_request(request);
                }
            }
        });
        Ok(())
    }

    /// Waits for the next request to release this lock by an authorized process. Returns `None` for
    /// any other connection.
    async fn next(&self, listener: &UnixListener) -> Option<ReleaseRequest> {
        let Ok((stream, _)) = listener.accept().await else {
            // The process may be out of descriptors, so it pauses before the next attempt.
            tokio::time::sleep(Duration::from_millis(100)).await;
            return None;
        };
        if !is_ours(&stream) {
            return None;
        }
        let mut line = String::new();
        let mut reader = BufReader::new(stream).take(LONGEST);
        timeout(PATIENCE, reader.read_line(&mut line)).await.ok()?.ok()?;
        self.matches(&line).then(|| ReleaseRequest(reader.into_inner().into_inner()))
    }

    fn matches(&self, line: &str) -> bool {
        serde_json::from_str(line).is_ok_and(|wanted: Self| wanted == *self)
    }

    /// Requests the release from the hold. Returns `None` if the hold cannot be reached.
    pub(crate) async fn request_release(&self) -> Option<Result<(), Failure>> {
        let stream = net::UnixStream::connect_addr(&self.address().ok()?).ok()?;
        stream.set_nonblocking(true).ok()?;
        let mut stream = UnixStream::from_std(stream).ok()?;
        if !is_ours(&stream) {
            return None;
        }
        let mut request = serde_json::to_vec(self).ok()?;
        request.push(b'\n');
        let mut answer = Vec::new();
        let talk = async {
            stream.write_all(&request).await?;
            stream.take(LONGEST).read_to_end(&mut answer).await
        };
        // If the hold has died, it holds nothing. If it hangs, `release` uses the store instead.
        timeout(PATIENCE, talk).await.ok()?.ok()?;
        parse_answer(&answer)
    }
}

/// Parses the hold's answer about the release. Returns `None` if it is invalid.
fn parse_answer(answer: &[u8]) -> Option<Result<(), Failure>> {
    let answer: Answer = serde_json::from_slice(answer).ok()?;
    Some(answer.failure.map_or(Ok(()), |(code, message)| Err(Failure::new(code, message))))
}

fn is_ours(stream: &UnixStream) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == ours)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_control_message_is_parsed_or_rejected(text in testbed::texts(&[
            r#"{"store":"file:/a@b","name":"x","token":7}"#, r#"{"failure":null}"#,
            r#"{"failure":[69,"the store is away"]}"#,
        ])) {
            let socket = ControlSocket::new("file:/a@b", "x", 7);
            if socket.matches(&text) {
                let asked: serde_json::Value = serde_json::from_str(&text).unwrap();
                let asked = ["store", "name", "token"].map(|field| asked[field].to_string());
                prop_assert_eq!(asked, ["\"file:/a@b\"", "\"x\"", "7"].map(str::to_owned));
            }
            let _ = parse_answer(text.as_bytes());
        }

        #[test]
        fn control_messages_round_trip(
            (store, name) in ("\\PC{0,20}", "\\PC{0,20}"),
            token: u64,
            failure: Option<(u8, String)>,
        ) {
            let socket = ControlSocket::new(&store, &name, token);
            prop_assert!(socket.matches(&serde_json::to_string(&socket).unwrap()));
            let answer = serde_json::to_vec(&Answer { failure: failure.clone() }).unwrap();
            let read = parse_answer(&answer).unwrap().err().map(|f| (f.code, f.message));
            prop_assert_eq!(read, failure);
        }
    }
}
