//! One connection of the driver, forwarded to whichever member responds.
//!
//! **Retries.** The first bytes that the driver sends (its session, its credentials, its watches)
//! are kept until a member has responded. If a member does not respond, they are sent to another
//! one. It is safe to send all of them twice. The driver sends requests only after a response.
//! These are forwarded once to the member that responded, or not at all. When that member is left,
//! the driver's connection ends, the requests under way fail, and the driver connects again.
//!
//! **Time limits.** A member is left if a reply is due and the member sends nothing for as long as
//! [`Members::patience`]. Due replies are counted in messages (four bytes of length, and that many
//! more bytes). Each message to the member is answered by one message, and unsolicited messages
//! begin with −1. The time is counted in ticks, so that a client that was paused itself does not
//! blame the member.

use leasehold_core::kit::{Stream, locked};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{sleep, timeout};

use super::members::{Member, Members};

/// Time limit for sending the last bytes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before the next round if no member responds.
const PAUSE: Duration = Duration::from_millis(100);
/// Number of ticks per time limit.
const TICKS: u32 = 4;
/// Maximum number of bytes from the driver before the first response. Even with many watches the
/// driver sends less.
const MOST_KEPT: usize = 64 << 20;

/// The reason why forwarding has ended.
enum End {
    /// The member did not even answer the greeting, so another member may be tried.
    Unanswered,
    /// The driver has closed the connection, or a member has served the connection, so the driver
    /// must connect again.
    Over,
}

/// Forwards one connection of the driver until either side closes it. `sent` contains the bytes
/// that the driver has already sent.
pub(super) async fn relay(local: TcpStream, mut sent: Vec<u8>, members: Arc<Members>) {
    if local.set_nodelay(true).is_err() {
        return;
    }
    let (mut from_driver, mut to_driver) = local.into_split();
    loop {
        for member in members.in_turn().await {
            let end = match members.reach(&member).await {
                Ok(stream) => {
                    let driver = (&mut from_driver, &mut to_driver);
                    carry(driver, stream, &mut sent, (&members, &member)).await
                }
                Err(why) => {
                    members.failed(&member, &why);
                    End::Unanswered
                }
            };
            if let End::Over = end {
                return;
            }
        }
        // The driver limits how long it waits for a connection.
        sleep(PAUSE).await;
    }
}

/// Forwards everything between the driver and a member.
async fn carry(
    (from_driver, to_driver): (&mut OwnedReadHalf, &mut OwnedWriteHalf),
    stream: Box<dyn Stream>,
    sent: &mut Vec<u8>,
    (members, member): (&Members, &Member),
) -> End {
    let (mut from_member, mut to_member) = tokio::io::split(stream);
    let talk = Mutex::new(Talk::default());
    let talk = || -> MutexGuard<'_, Talk> { locked(&talk) };
    talk().asked(sent);
    let ask = async {
        let mut broken = to_member.write_all(sent).await.is_err();
        broken |= to_member.flush().await.is_err();
        let mut buffer = vec![0; 16 * 1024];
        loop {
            // The member's last bytes must still be read. The reading side detects the end of the
            // connection.
            if broken {
                std::future::pending::<()>().await;
            }
            let n = match from_driver.read(&mut buffer).await {
                Ok(n) if n > 0 => n,
                Ok(_) | Err(_) => break,
            };
            if talk().asked(&buffer[..n]) {
                *sent = Vec::new();
            } else if sent.len() < MOST_KEPT {
                sent.extend_from_slice(&buffer[..n]);
            } else {
                break;
            }
            broken = to_member.write_all(&buffer[..n]).await.is_err();
            broken |= to_member.flush().await.is_err();
        }
        let _ = timeout(CLOSE_TIMEOUT, to_member.shutdown()).await;
        Ok(())
    };
    let answer = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let n = match from_member.read(&mut buffer).await {
                Ok(0) => {
                    let what = "the server closed the connection before it replied";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
                }
                Ok(n) => n,
                Err(why) => return Err(why),
            };
            if talk().answered(&buffer[..n]) {
                members.answers(member);
            }
            if to_driver.write_all(&buffer[..n]).await.is_err() {
                return Ok(());
            }
        }
    };
    let silence = async {
        loop {
            let begun = talk().begun;
            sleep(members.patience(begun) / TICKS).await;
            if talk().tick() > TICKS {
                return Err::<(), _>(io::Error::from(io::ErrorKind::TimedOut));
            }
        }
    };
    let ended = tokio::select! {
        biased;
        ended = answer => ended,
        ended = ask => ended,
        ended = silence => ended,
    };
    let Err(why) = ended else { return End::Over };
    let served = talk().begun;
    match why.kind() {
        io::ErrorKind::TimedOut => members.was_silent(member, served),
        _ => members.failed(member, &why),
    }
    if served { End::Over } else { End::Unanswered }
}

/// How many replies a member owes, and for how long it has sent nothing.
#[derive(Debug, Default)]
struct Talk {
    asked: Pieces,
    answered: Pieces,
    owed: u64,
    ticks: u32,
    /// Whether the member has sent anything.
    begun: bool,
}

impl Talk {
    /// Counts the requests in these bytes. Returns whether the member has already sent anything.
    fn asked(&mut self, bytes: &[u8]) -> bool {
        if self.owed == 0 {
            self.ticks = 0;
        }
        let owed = &mut self.owed;
        self.asked.feed(bytes, |_| *owed += 1);
        self.begun
    }

    /// Counts the replies in these bytes. Returns whether these are the first bytes from the
    /// member.
    fn answered(&mut self, bytes: &[u8]) -> bool {
        self.ticks = 0;
        let owed = &mut self.owed;
        self.answered.feed(bytes, |begins| {
            if begins != -1 {
                *owed = owed.saturating_sub(1);
            }
        });
        !std::mem::replace(&mut self.begun, true)
    }

    /// Returns for how many ticks the member has owed a reply and sent nothing.
    fn tick(&mut self) -> u32 {
        if self.owed > 0 {
            self.ticks = self.ticks.saturating_add(1);
        }
        self.ticks
    }
}

/// A stream that is being divided into messages.
#[derive(Debug, Default)]
struct Pieces {
    /// The length of the message, and the four bytes after it.
    head: [u8; 8],
    known: usize,
    left: usize,
}

impl Pieces {
    /// Reads these bytes, and calls `piece` with the start of each message.
    fn feed(&mut self, mut bytes: &[u8], mut piece: impl FnMut(i32)) {
        while let [first, rest @ ..] = bytes {
            if self.known == 8 {
                let skipped = self.left.min(bytes.len());
                self.left -= skipped;
                bytes = &bytes[skipped..];
            } else {
                self.head[self.known] = *first;
                self.known += 1;
                bytes = rest;
                if self.known == 8 {
                    let [a, b, c, d, begins @ ..] = self.head;
                    let length = u32::from_be_bytes([a, b, c, d]);
                    self.left = usize::try_from(length).unwrap_or(usize::MAX).saturating_sub(4);
                    piece(i32::from_be_bytes(begins));
                }
            }
            if self.known == 8 && self.left == 0 {
                self.known = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(begins: i32, more: usize) -> Vec<u8> {
        let length = u32::try_from(more + 4).unwrap().to_be_bytes();
        let body = begins.to_be_bytes();
        length.into_iter().chain(body).chain((0..more).map(|_| 0xff)).collect()
    }

    #[test]
    fn packets_are_split_correctly_for_any_chunk_size() {
        let all: Vec<u8> = [piece(0, 40), piece(-1, 0), piece(7, 100), piece(-2, 12)].concat();
        for step in [1, 3, 8, 50, all.len()] {
            let mut pieces = Pieces::default();
            let mut seen = Vec::new();
            for bytes in all.chunks(step) {
                pieces.feed(bytes, |begins| seen.push(begins));
            }
            assert_eq!(seen, [0, -1, 7, -2], "with {step} bytes at once");
        }
        // Any bytes from an unknown client must be accepted.
        Pieces::default().feed(&[0; 64], |_| ());
        Pieces::default().feed(&[0xff; 64], |_| ());
    }

    // F08
    #[test]
    fn unanswered_requests_are_counted() {
        let mut talk = Talk::default();
        assert_eq!(talk.tick(), 0, "no request is unanswered");
        talk.asked(&[piece(0, 40), piece(1, 20)].concat());
        assert_eq!((talk.tick(), talk.tick()), (1, 2));
        assert!(talk.answered(&piece(0, 36)));
        assert_eq!(talk.tick(), 1, "one request is unanswered");
        // A notification is not a reply, but proves that the member is alive.
        assert!(!talk.answered(&piece(-1, 30)));
        assert_eq!(talk.tick(), 1);
        talk.answered(&piece(1, 16));
        assert_eq!((talk.tick(), talk.owed), (0, 0));
        talk.asked(&piece(2, 20));
        assert_eq!(talk.tick(), 1);
    }
}
