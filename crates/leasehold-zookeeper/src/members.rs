//! The members of an ensemble, as one client sees them: the order in which they are tried, how long
//! a member may be silent, and why the last one failed.
//!
//! # Order
//! Every address of the hosts' names is a member. The members are tried in random order, so that
//! clients spread. Members that failed within the last minute come last, those that failed longest
//! ago first. So the member that has just failed is never the next one tried if there is another.
//!
//! # Time limits
//! The client leaves a member that has sent nothing for a second although a reply is due. The limit
//! is shorter for sessions of less than ten seconds. If the client left another member for that
//! reason within the last minute, the whole ensemble may be slow, for example because of a disk or
//! a paused leader. Then the limit is doubled, up to three seconds, because a client that keeps
//! changing members gets nothing done either. If there is only one member, the limit is three
//! tenths of the session.

use leasehold_core::kit::{Encryption, Host, Stream, locked};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::join_all::join_all;
use leasehold_core::{Clock, Moment};

/// Time limit for an overdue reply if there is another member.
const SILENT: Duration = Duration::from_secs(1);
/// Maximum time limit for an overdue reply if all members are slow.
const SILENT_AT_MOST: Duration = Duration::from_secs(3);
/// How long a failure of a member is remembered.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A member that can be tried.
#[derive(Clone)]
pub(super) struct Member {
    host: Arc<Host>,
    address: SocketAddr,
}

pub(super) struct Members {
    hosts: Vec<Arc<Host>>,
    tls: Option<Encryption>,
    /// How long a member may be silent, at first and at most.
    patience: (Duration, Duration),
    /// How long the only member may be silent.
    patience_alone: Duration,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The members that failed, and when.
    failed: HashMap<SocketAddr, Moment>,
    /// When a member was last left because of an overdue reply, and the time limit that applied.
    silent: Option<(Moment, Duration)>,
    /// Whether the ensemble has only one member.
    alone: bool,
    fault: Option<String>,
}

impl Members {
    /// Creates the list of the members at these hosts.
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

    /// Returns whether the ensemble has several members.
    pub(super) fn are_several(&self) -> bool {
        !self.state().alone
    }

    /// Returns why the last member that was tried failed, if it did.
    pub(super) fn fault(&self) -> Option<String> {
        self.state().fault.clone()
    }

    /// Returns the current time limit for an overdue reply. `begun`: whether the member has sent
    /// anything on this connection. A server that is starting accepts connections and never answers
    /// their greeting, so the greeting is soon sent again, even to the only member.
    pub(super) fn patience(&self, begun: bool) -> Duration {
        let (at_first, at_most) = self.patience;
        let state = self.state();
        let at_most = if state.alone { self.patience_alone } else { at_most };
        match state.silent {
            _ if state.alone && begun => self.patience_alone,
            Some((when, before)) if self.clock.now().since(when) < REMEMBERED => {
                (before * 2).min(at_most)
            }
            _ => at_first,
        }
    }

    /// Returns all members in the order in which they are to be tried.
    pub(super) async fn in_turn(&self) -> Vec<Member> {
        let asked = self.hosts.iter().map(|host| self.addresses(host)).collect();
        let mut all: Vec<Member> = join_all(asked).await.into_iter().flatten().collect();
        let chance = RandomState::new();
        let now = self.clock.now();
        let mut state = self.state();
        // The ensemble is not considered smaller because a DNS lookup fails.
        state.alone = self.hosts.len() == 1 && all.len() <= 1;
        state.failed.retain(|_, when| now.since(*when) < REMEMBERED);
        let failed = |member: &Member| state.failed.get(&member.address).copied();
        all.sort_by_cached_key(|member| (failed(member), chance.hash_one(member.address)));
        all
    }

    async fn addresses(&self, host: &Arc<Host>) -> Vec<Member> {
        let asked = tokio::net::lookup_host((host.name.as_str(), host.port));
        let found = match timeout(self.patience(true), asked).await {
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

    /// Connects to a member.
    pub(super) async fn reach(&self, member: &Member) -> io::Result<Box<dyn Stream>> {
        let patience = self.patience(true);
        let stream = timeout(patience, TcpStream::connect(member.address)).await??;
        stream.set_nodelay(true)?;
        match &self.tls {
            Some(tls) => timeout(patience, tls.greet(&member.host, stream)).await?,
            None => Ok(Box::new(stream)),
        }
    }

    /// Records that a member has responded.
    pub(super) fn answers(&self, member: &Member) {
        let mut state = self.state();
        state.failed.remove(&member.address);
        state.fault = None;
    }

    /// Records that the connection to a member failed or that the member has closed it.
    pub(super) fn failed(&self, member: &Member, why: &io::Error) {
        self.state().failed.insert(member.address, self.clock.now());
        self.note(&member.host, &why.to_string());
    }

    /// Records that a member was left because of an overdue reply. If it had served this client
    /// before, other members may be just as slow. The only member gets more time for each greeting.
    pub(super) fn was_silent(&self, member: &Member, served: bool) {
        let patience = self.patience(served);
        let now = self.clock.now();
        let mut state = self.state();
        state.failed.insert(member.address, now);
        if served != state.alone {
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

    // F08
    #[test]
    fn silent_member_is_tried_last_for_a_minute() {
        run(async {
            let all = members("127.0.0.1:1,127.0.0.1:2,[::1]:3", 15);
            for _ in 0..20 {
                let order = all.in_turn().await;
                assert_eq!(order.len(), 3);
                all.clock.advance(Duration::from_secs(1));
                all.was_silent(&order[0], true);
                let next = all.in_turn().await;
                assert_eq!(next[2].address, order[0].address);
                // Of the members that failed, the last one to fail comes last.
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
                assert!(first.contains(&port), "member {port} is never the first");
            }
        });
    }

    // F08
    #[test]
    fn member_timeout_is_one_second_and_grows_if_all_are_slow() {
        run(async {
            let all = members("127.0.0.1:1,127.0.0.1:2", 60);
            let order = all.in_turn().await;
            let second = Duration::from_secs(1);
            assert_eq!(all.patience(true), second);
            for longer in [second * 2, second * 3, second * 3] {
                all.was_silent(&order[0], true);
                assert_eq!(all.patience(true), longer);
            }
            all.clock.advance(REMEMBERED);
            assert_eq!(all.patience(true), second);
            // A member that has not even answered the greeting does not show that the others are
            // slow.
            all.was_silent(&order[0], false);
            assert_eq!(all.patience(true), second);
            // The ensemble has only one member.
            let alone = members("127.0.0.1:1", 60);
            assert_eq!(alone.patience(true), second * 18);
            // A server that is starting does not answer the greeting.
            let only = &alone.in_turn().await[0];
            for longer in [second, second * 2, second * 4] {
                assert_eq!(alone.patience(false), longer);
                alone.was_silent(only, false);
            }
            assert_eq!(alone.patience(true), second * 18);
            assert_eq!(members("127.0.0.1:1,127.0.0.1:2", 4).patience(true), second * 4 / 10);
        });
    }
}
