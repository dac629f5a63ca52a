//! The members of an ensemble, as one client knows them: which is tried first, how long one may be
//! silent, and why the last one that was tried is of no use.
//!
//! # Which one
//! Every address that the hosts' names have is a member. They are tried in an order by chance, so that
//! clients spread, but who has failed us within the last minute comes last, and of those first who failed
//! us longest ago: the one that went silent just now is never the next one tried while there is another.
//!
//! # How long
//! A member that has not said a word for a second, though it owes an answer, is left; for less in a
//! session shorter than ten seconds. Where another one was left for that within the last minute, it may
//! be the whole ensemble that is slow (a disk, a leader that stands still), and the patience is doubled,
//! up to three seconds: who changes members again and again gets nothing done either. A member that
//! nobody can take the place of is given three tenths of the session.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::stream::Stream;
use super::tls::Encryption;
use super::together::all_of;
use leasehold_core::kit::Host;
use leasehold_core::{Clock, Moment};

/// How long a member may owe an answer, where there is another.
const SILENT: Duration = Duration::from_secs(1);
/// And at most, where all are slow.
const SILENT_AT_MOST: Duration = Duration::from_secs(3);
/// For so long it counts that a member has failed us.
const REMEMBERED: Duration = Duration::from_secs(60);

/// One that can be tried.
#[derive(Clone)]
pub(super) struct Member {
    host: Arc<Host>,
    address: SocketAddr,
}

pub(super) struct Members {
    hosts: Vec<Arc<Host>>,
    tls: Option<Encryption>,
    /// How long one may be silent, at first and at most.
    patience: (Duration, Duration),
    /// And one that nobody can take the place of.
    patience_alone: Duration,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Who has failed us, and when.
    failed: HashMap<SocketAddr, Moment>,
    /// When one was left last that owed an answer, and how patient we were.
    silent: Option<(Moment, Duration)>,
    /// Whether there is nobody else to go to.
    alone: bool,
    fault: Option<String>,
}

impl Members {
    /// Of these hosts.
    pub(super) fn new(hosts: &[Host], tls: Option<Encryption>, session: Duration) -> Self {
        let hosts: Vec<_> = hosts.iter().cloned().map(Arc::new).collect();
        let patience_alone = session * 3 / 10;
        let at_most = SILENT_AT_MOST.min(patience_alone);
        let patience = (SILENT.min(session / 10).min(at_most), at_most);
        let state = State { alone: hosts.len() == 1, ..State::default() };
        let (clock, state) = (Clock::default(), Mutex::new(state));
        Self { hosts, tls, patience, patience_alone, clock, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs between two consistent states.
        locked(&self.state)
    }

    /// Whether there is a member to go to when one is silent.
    pub(super) fn are_several(&self) -> bool {
        !self.state().alone
    }

    /// Why the last that was tried is of no use, if it is not.
    pub(super) fn fault(&self) -> Option<String> {
        self.state().fault.clone()
    }

    /// How long a member may owe an answer as of now.
    pub(super) fn patience(&self) -> Duration {
        let (at_first, at_most) = self.patience;
        let state = self.state();
        match state.silent {
            _ if state.alone => self.patience_alone,
            Some((when, before)) if self.clock.now().since(when) < REMEMBERED => {
                (before * 2).min(at_most)
            }
            _ => at_first,
        }
    }

    /// All of them in the order in which they are to be tried.
    pub(super) async fn in_turn(&self) -> Vec<Member> {
        let asked = self.hosts.iter().map(|host| self.addresses(host)).collect();
        let mut all: Vec<Member> = all_of(asked).await.into_iter().flatten().collect();
        let chance = RandomState::new();
        let now = self.clock.now();
        let mut state = self.state();
        // An ensemble whose names nobody tells just now is no smaller for it.
        state.alone = self.hosts.len() == 1 && all.len() <= 1;
        state.failed.retain(|_, when| now.since(*when) < REMEMBERED);
        let failed = |member: &Member| state.failed.get(&member.address).copied();
        all.sort_by_cached_key(|member| (failed(member), chance.hash_one(member.address)));
        all
    }

    async fn addresses(&self, host: &Arc<Host>) -> Vec<Member> {
        let asked = tokio::net::lookup_host((host.name.as_str(), host.port));
        let found = match timeout(self.patience(), asked).await {
            Ok(Ok(found)) => found.collect(),
            Ok(Err(why)) => {
                self.note(host, &why.to_string());
                Vec::new()
            }
            Err(_) => {
                self.note(host, "DNS lookup timed out");
                Vec::new()
            }
        };
        found.into_iter().map(|address| Member { host: host.clone(), address }).collect()
    }

    /// Connects with one.
    pub(super) async fn reach(&self, member: &Member) -> io::Result<Box<dyn Stream>> {
        let patience = self.patience();
        let stream = timeout(patience, TcpStream::connect(member.address)).await??;
        stream.set_nodelay(true)?;
        match &self.tls {
            Some(tls) => timeout(patience, tls.greet(&member.host, stream)).await?,
            None => Ok(Box::new(stream)),
        }
    }

    /// One has answered.
    pub(super) fn answers(&self, member: &Member) {
        let mut state = self.state();
        state.failed.remove(&member.address);
        state.fault = None;
    }

    /// One is left: it could not be reached, or has ended the connection.
    pub(super) fn failed(&self, member: &Member, why: &io::Error) {
        self.state().failed.insert(member.address, self.clock.now());
        self.note(&member.host, &why.to_string());
    }

    /// One is left that owes an answer; of one that served us, others may be as slow.
    pub(super) fn was_silent(&self, member: &Member, served: bool) {
        let patience = self.patience();
        let now = self.clock.now();
        let mut state = self.state();
        state.failed.insert(member.address, now);
        if served {
            state.silent = Some((now, patience));
        }
        drop(state);
        self.note(&member.host, &format!("no response within {patience:?}"));
    }

    fn note(&self, host: &Host, what: &str) {
        self.state().fault = Some(format!("{host}: {what}"));
    }
}

impl std::fmt::Debug for Members {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Members").field("hosts", &self.hosts.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::kit::UrlParts;

    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    fn members(hosts: &str, session: u64) -> Members {
        let url = UrlParts::parse(&format!("x://{hosts}"), "", 1).unwrap();
        let members = Members::new(&url.hosts, None, Duration::from_secs(session));
        Members { clock: Clock::stepped(), ..members }
    }

    async fn ports(members: &Members) -> Vec<u16> {
        members.in_turn().await.iter().map(|member| member.address.port()).collect()
    }

    #[test]
    fn f08_who_went_silent_is_tried_last_for_a_minute() {
        run(async {
            let all = members("127.0.0.1:1,127.0.0.1:2,[::1]:3", 15);
            for _ in 0..20 {
                let order = all.in_turn().await;
                assert_eq!(order.len(), 3);
                all.clock.advance(Duration::from_secs(1));
                all.was_silent(&order[0], true);
                let next = all.in_turn().await;
                assert_eq!(next[2].address, order[0].address);
                // And of those that failed, who failed last.
                all.clock.advance(Duration::from_secs(1));
                all.failed(&next[0], &io::ErrorKind::ConnectionRefused.into());
                let after = ports(&all).await;
                let (silent, refused) = (order[0].address.port(), next[0].address.port());
                assert_eq!(after[1..], [silent, refused]);
                all.answers(&next[0]);
                assert_eq!(ports(&all).await[2], silent);
                all.clock.advance(REMEMBERED);
            }
            let mut first: Vec<u16> = Vec::new();
            for _ in 0..100 {
                first.push(ports(&all).await[0]);
            }
            for port in [1, 2, 3] {
                assert!(first.contains(&port), "{port} is never the first");
            }
        });
    }

    #[test]
    fn f08_the_patience_is_a_second_and_grows_where_all_are_slow() {
        run(async {
            let all = members("127.0.0.1:1,127.0.0.1:2", 60);
            let order = all.in_turn().await;
            let second = Duration::from_secs(1);
            assert_eq!(all.patience(), second);
            for longer in [second * 2, second * 3, second * 3] {
                all.was_silent(&order[0], true);
                assert_eq!(all.patience(), longer);
            }
            all.clock.advance(REMEMBERED);
            assert_eq!(all.patience(), second);
            // One that has not even greeted tells nothing of the others.
            all.was_silent(&order[0], false);
            assert_eq!(all.patience(), second);
            // Nobody else to go to.
            assert_eq!(members("127.0.0.1:1", 60).patience(), second * 18);
            assert_eq!(members("127.0.0.1:1,127.0.0.1:2", 4).patience(), second * 4 / 10);
        });
    }
}
