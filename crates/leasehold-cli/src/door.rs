//! Where a `leasehold hold` that nobody talks to is asked to release: by `leasehold release NAME --token T`.
//!
//! It alone knows whether the lock was held all the time, and keeps what `--min-hold` promised; so it is asked, and
//! answers how its release went. Only this user's processes are listened to.
//!
//! The socket's name is abstract (no file to leave behind) and made of the user, the token, and a
//! digest of store and lock. It is a shortcut: where there is none, `release` takes the claim out of
//! the store. So a name that somebody squats on costs nothing but that.

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

/// The longest that either says, in bytes.
const LONGEST: u64 = 16 * 1024;

/// Where a hold listens, and what it is asked for.
#[derive(Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Door {
    store: String,
    name: String,
    token: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    failure: Option<(u8, String)>,
}

/// Somebody who asked for the release, and waits for the answer.
#[derive(Debug)]
pub(crate) struct Asker(UnixStream);

impl Asker {
    /// Tells how the release went.
    pub(crate) async fn answer(mut self, released: &Result<(), Failure>) {
        let failure = released.as_ref().err().map(|f| (f.code, f.message.clone()));
        let answer = serde_json::to_vec(&Answer { failure }).unwrap_or_default();
        let _ = timeout(PATIENCE, self.0.write_all(&answer)).await;
    }
}

impl Door {
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

    /// Listens behind this door, and hands whoever may ask for the release to `asked`.
    pub(crate) fn open(self, asked: impl Fn(Asker) + Send + 'static) -> io::Result<()> {
        let listener = net::UnixListener::bind_addr(&self.address()?)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        tokio::spawn(async move {
            loop {
                if let Some(asker) = self.next(&listener).await {
                    asked(asker);
                }
            }
        });
        Ok(())
    }

    /// The next who asks for this very lock's release and may; `None` for anybody else.
    async fn next(&self, listener: &UnixListener) -> Option<Asker> {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, perhaps: not to be asked again at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
            return None;
        };
        if !is_ours(&stream) {
            return None;
        }
        let mut line = String::new();
        let mut reader = BufReader::new(stream).take(LONGEST);
        timeout(PATIENCE, reader.read_line(&mut line)).await.ok()?.ok()?;
        self.is_asked_for(&line).then(|| Asker(reader.into_inner().into_inner()))
    }

    fn is_asked_for(&self, line: &str) -> bool {
        serde_json::from_str(line).is_ok_and(|asked: Self| asked == *self)
    }

    /// Asks the hold behind this door to release; `None` if there is none.
    pub(crate) async fn knock(&self) -> Option<Result<(), Failure>> {
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
        // One that died meanwhile holds nothing; one that hangs is passed by.
        timeout(PATIENCE, talk).await.ok()?.ok()?;
        heard(&answer)
    }
}

/// How the release went, by what the hold answered; `None` if that says nothing.
fn heard(answer: &[u8]) -> Option<Result<(), Failure>> {
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
        fn what_is_said_at_the_door_is_understood_or_passed_by(said in testbed::texts(&[
            r#"{"store":"file:/a@b","name":"x","token":7}"#, r#"{"failure":null}"#,
            r#"{"failure":[69,"the store is away"]}"#,
        ])) {
            let door = Door::new("file:/a@b", "x", 7);
            if door.is_asked_for(&said) {
                let asked: serde_json::Value = serde_json::from_str(&said).unwrap();
                let asked = ["store", "name", "token"].map(|field| asked[field].to_string());
                prop_assert_eq!(asked, ["\"file:/a@b\"", "\"x\"", "7"].map(str::to_owned));
            }
            let _ = heard(said.as_bytes());
        }

        #[test]
        fn what_is_written_at_the_door_is_read_the_same(
            (store, name) in ("\\PC{0,20}", "\\PC{0,20}"),
            token: u64,
            failure: Option<(u8, String)>,
        ) {
            let door = Door::new(&store, &name, token);
            prop_assert!(door.is_asked_for(&serde_json::to_string(&door).unwrap()));
            let answer = serde_json::to_vec(&Answer { failure: failure.clone() }).unwrap();
            let read = heard(&answer).unwrap().err().map(|f| (f.code, f.message));
            prop_assert_eq!(read, failure);
        }
    }
}
