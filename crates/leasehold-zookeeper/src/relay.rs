//! One connection of the driver's, passed on to whichever member serves.
//!
//! The driver connects, and what it says first (its session, its credentials, what it watches) is kept
//! until a member has answered: so it can be said to another one when this one does not. All of that may
//! be said twice; requests the driver sends only when it has been answered, and those are passed on once,
//! to the member that answered, or not at all: when that one is left, the driver's connection ends, what
//! is under way fails, and the driver comes again.
//!
//! A member is left when it owes an answer and says nothing for as long as [`Members::patience`]. What it
//! owes is counted in pieces (four bytes of length, and so many more): each that goes there is answered by
//! one that comes, and what a member says unasked begins with −1. The time is counted in ticks, so that
//! a client that stood still itself does not blame the member for it.

use leasehold_core::kit::locked;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{sleep, timeout};

use super::members::{Member, Members};
use super::stream::Stream;

/// How long what was sent last may take to leave.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long we wait before the next round when no member serves.
const PAUSE: Duration = Duration::from_millis(100);
/// How many ticks the patience has.
const TICKS: u32 = 4;
/// What the driver may say before it is answered. More it does not, whatever it watches.
const MOST_KEPT: usize = 64 << 20;

/// Why passing on has ended.
enum End {
    /// The member did not even greet: another may.
    Unanswered,
    /// The driver wants no more, or has been served and comes again.
    Over,
}

/// Serves one connection of the driver's until either side is done.
/// It has said this already.
pub(super) async fn relay(local: TcpStream, mut said: Vec<u8>, members: Arc<Members>) {
    if local.set_nodelay(true).is_err() {
        return;
    }
    let (mut from_driver, mut to_driver) = local.into_split();
    loop {
        for member in members.in_turn().await {
            let end = match members.reach(&member).await {
                Ok(stream) => {
                    let driver = (&mut from_driver, &mut to_driver);
                    carry(driver, stream, &mut said, (&members, &member)).await
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
        // The driver knows how long it waits for this.
        sleep(PAUSE).await;
    }
}

/// Passes everything on between the driver and a member.
async fn carry(
    (from_driver, to_driver): (&mut OwnedReadHalf, &mut OwnedWriteHalf),
    stream: Box<dyn Stream>,
    said: &mut Vec<u8>,
    (members, member): (&Members, &Member),
) -> End {
    let (mut from_member, mut to_member) = tokio::io::split(stream);
    let talk = Mutex::new(Talk::default());
    let talk = || -> MutexGuard<'_, Talk> { locked(&talk) };
    talk().asked(said);
    let ask = async {
        let mut broken = to_member.write_all(said).await.is_err();
        broken |= to_member.flush().await.is_err();
        let mut buffer = vec![0; 16 * 1024];
        loop {
            // What the member has said last must be heard: its end is seen where it is read.
            if broken {
                std::future::pending::<()>().await;
            }
            let n = match from_driver.read(&mut buffer).await {
                Ok(n) if n > 0 => n,
                Ok(_) | Err(_) => break,
            };
            if talk().asked(&buffer[..n]) {
                *said = Vec::new();
            } else if said.len() < MOST_KEPT {
                said.extend_from_slice(&buffer[..n]);
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
            sleep(members.patience() / TICKS).await;
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

/// What a member owes, and for how long it has said nothing.
#[derive(Debug, Default)]
struct Talk {
    asked: Pieces,
    answered: Pieces,
    owed: u64,
    ticks: u32,
    /// It has said something.
    begun: bool,
}

impl Talk {
    /// Tells whether the member has said something already.
    fn asked(&mut self, bytes: &[u8]) -> bool {
        if self.owed == 0 {
            self.ticks = 0;
        }
        let owed = &mut self.owed;
        self.asked.feed(bytes, |_| *owed += 1);
        self.begun
    }

    /// Tells whether these are the first.
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

    /// For how many ticks it has owed an answer and said nothing.
    fn tick(&mut self) -> u32 {
        if self.owed > 0 {
            self.ticks = self.ticks.saturating_add(1);
        }
        self.ticks
    }
}

/// A stream that is being cut into its pieces.
#[derive(Debug, Default)]
struct Pieces {
    /// The length of the piece, and the four bytes with which it begins.
    head: [u8; 8],
    known: usize,
    left: usize,
}

impl Pieces {
    /// Takes in what came, and tells with what each piece begins.
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
    fn pieces_are_told_apart_however_they_come() {
        let all: Vec<u8> = [piece(0, 40), piece(-1, 0), piece(7, 100), piece(-2, 12)].concat();
        for step in [1, 3, 8, 50, all.len()] {
            let mut pieces = Pieces::default();
            let mut seen = Vec::new();
            for bytes in all.chunks(step) {
                pieces.feed(bytes, |begins| seen.push(begins));
            }
            assert_eq!(seen, [0, -1, 7, -2], "{step} at once");
        }
        // Whatever a stranger sends.
        Pieces::default().feed(&[0; 64], |_| ());
        Pieces::default().feed(&[0xff; 64], |_| ());
    }

    #[test]
    fn f08_what_is_owed_is_counted() {
        let mut talk = Talk::default();
        assert_eq!(talk.tick(), 0, "nothing was asked");
        talk.asked(&[piece(0, 40), piece(1, 20)].concat());
        assert_eq!((talk.tick(), talk.tick()), (1, 2));
        assert!(talk.answered(&piece(0, 36)));
        assert_eq!(talk.tick(), 1, "it still owes one");
        // News is no answer, though a sign of life.
        assert!(!talk.answered(&piece(-1, 30)));
        assert_eq!(talk.tick(), 1);
        talk.answered(&piece(1, 16));
        assert_eq!((talk.tick(), talk.owed), (0, 0));
        talk.asked(&piece(2, 20));
        assert_eq!(talk.tick(), 1);
    }
}
