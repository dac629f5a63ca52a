//! The state of `leasehold top`, and the effect of each key on it.
//!
//! This module does no I/O. A key changes what is shown or returns an [`Action`] for the code that
//! has the store and the terminal. A selected claim or lock stays selected when new data arrives.
//! The confirmation of an eviction refers to the claim's token, so another claim that takes the
//! same position is never evicted by mistake.

use std::cmp::Reverse;
use std::time::Duration;

use leasehold::Token;
use leasehold::store::{ClaimInfo, ClaimState, LockInfo};

use super::keys::Key;
use crate::table::{clean, short};
use crate::take::held_by;

/// What a key requests from the code outside this module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    None,
    Quit,
    /// Suspend the process, as other programs do on Ctrl-Z.
    Suspend,
    /// Draw everything again.
    Redraw,
    Evict(Victim),
}

/// The hold to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    pub(crate) name: String,
    pub(crate) token: Token,
}

/// The order of the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    LongestHold,
    OldestWait,
}

/// The view that is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Locks,
    /// The queue of the lock with this name.
    Queue(String),
}

/// What is shown on top of the table and receives the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    Nothing,
    /// The input of the filter.
    Filter,
    /// The help text, scrolled down by this number of lines.
    Help(usize),
    Question(Question),
}

/// The request to confirm an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) victim: Victim,
    /// The holder in words, without control characters.
    pub(crate) who: String,
    /// Whether the claim holds the lock. Otherwise it only keeps the lock unavailable.
    pub(crate) holds: bool,
}

/// The help text.
pub(crate) const HELP: [&str; 14] = [
    "Locks in use, and their queues.",
    "",
    "up, down, j, k    move by a line",
    "PgUp, PgDn        move by a page",
    "Home, End         first line, last line",
    "Enter             show the queue of a lock",
    "Esc, q            back",
    "q, Ctrl-C         quit",
    "s                 sort by longest hold, or",
    "                  by longest wait",
    "/                 filter by text",
    "e                 in a queue: evict a holder",
    "Ctrl-L            redraw",
    "Ctrl-Z            suspend; fg resumes",
];

/// The selected row of a table. Until the user selects one, it is the first row.
#[derive(Clone, Debug)]
struct Cursor<K> {
    chosen: Option<K>,
    index: usize,
}

impl<K: Clone + PartialEq> Cursor<K> {
    const FIRST: Self = Self { chosen: None, index: 0 };

    fn go(&mut self, index: usize, keys: &[K]) {
        self.index = index.min(keys.len().saturating_sub(1));
        self.chosen = keys.get(self.index).cloned().filter(|_| self.index > 0);
    }

    /// Finds the selected row after the table has changed.
    fn settle(&mut self, keys: &[K]) {
        let Some(chosen) = &self.chosen else { return self.index = 0 };
        if keys.get(self.index) != Some(chosen) {
            // If the selected row is gone, the row that is now at its position is selected.
            let index = keys.iter().position(|key| key == chosen).unwrap_or(self.index);
            self.index = index.min(keys.len().saturating_sub(1));
            self.chosen = keys.get(self.index).cloned();
        }
    }
}

/// The fields that identify a claim in successive polls.
type ClaimKey = (Option<Token>, String, u32, String);

fn key_of(claim: &ClaimInfo) -> ClaimKey {
    let holder = &claim.holder;
    (claim.token, holder.host.clone(), holder.pid, holder.label.clone())
}

/// Everything that is shown.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) store: String,
    pub(crate) prefix: String,
    pub(crate) every: Duration,
    /// The last answer of the store; `None` before the first one.
    picture: Option<Vec<LockInfo>>,
    pub(crate) sort: Sort,
    pub(crate) filter: String,
    pub(crate) at: At,
    pub(crate) over: Over,
    /// The reason why the last poll failed; `None` if it succeeded.
    pub(crate) away: Option<String>,
    /// The result of the last action, in one line.
    pub(crate) status_line: Option<String>,
    /// The eviction in progress.
    pub(crate) evicting: Option<Victim>,
    lock: Cursor<String>,
    claim: Cursor<ClaimKey>,
}

impl State {
    pub(crate) fn new(store: &str, prefix: &str, every: Duration) -> Self {
        Self {
            store: clean(store),
            prefix: clean(prefix),
            every,
            picture: None,
            sort: Sort::LongestHold,
            filter: String::new(),
            at: At::Locks,
            over: Over::Nothing,
            away: None,
            status_line: None,
            evicting: None,
            lock: Cursor::FIRST,
            claim: Cursor::FIRST,
        }
    }

    /// Stores the locks that a poll returned.
    pub(crate) fn see(&mut self, locks: Vec<LockInfo>) {
        (self.picture, self.away) = (Some(locks), None);
        self.settle();
    }

    /// Notes that the store did not answer.
    pub(crate) fn miss(&mut self, why: &str) {
        self.away = Some(clean(why));
    }

    /// Records the result of the eviction: the number of evicted claims, or the error in words.
    pub(crate) fn evicted(&mut self, ended: Result<usize, String>) {
        let Some(victim) = self.evicting.take() else { return };
        let what = format!("token {} of {}", victim.token, clean(&victim.name));
        self.status_line = Some(match ended {
            Ok(0) => format!("nothing was evicted: the hold with {what} had already ended"),
            Ok(_) => format!("evicted {what}"),
            Err(why) => format!("{what}: {}", clean(&why)),
        });
    }

    pub(crate) fn has_picture(&self) -> bool {
        self.picture.is_some()
    }

    /// Returns all locks, regardless of the filter.
    pub(crate) fn all(&self) -> &[LockInfo] {
        self.picture.as_deref().unwrap_or_default()
    }

    /// Returns the locks that match the filter, in the selected order.
    pub(crate) fn shown(&self) -> Vec<&LockInfo> {
        let wanted = self.filter.to_lowercase();
        let mut shown: Vec<_> = self.all().iter().filter(|lock| has(lock, &wanted)).collect();
        shown.sort_by_cached_key(|lock| {
            let (hold, wait) = (longest_hold(lock), oldest_wait(lock));
            let ages = match self.sort {
                Sort::LongestHold => [hold, wait],
                Sort::OldestWait => [wait, hold],
            };
            (Reverse(ages), lock.name.as_str().to_owned())
        });
        shown
    }

    /// Returns the lock whose queue is shown, if the lock is in use.
    pub(crate) fn queue(&self) -> Option<&LockInfo> {
        let At::Queue(name) = &self.at else { return None };
        self.all().iter().find(|lock| lock.name.as_str() == name)
    }

    /// Returns the index of the selected row.
    pub(crate) fn index(&self) -> usize {
        match self.at {
            At::Locks => self.lock.index,
            At::Queue(_) => self.claim.index,
        }
    }

    /// Handles a key. `page` is the number of table rows on the screen.
    pub(crate) fn press(&mut self, key: Key, page: usize) -> Action {
        match key {
            Key::Interrupt => return Action::Quit,
            Key::Suspend => return Action::Suspend,
            Key::Redraw => return Action::Redraw,
            _ => {}
        }
        if self.evicting.is_none() {
            self.status_line = None;
        }
        match &mut self.over {
            Over::Nothing => self.press_in_table(key, page),
            Over::Filter => self.press_in_filter(key),
            Over::Help(line) => {
                match key {
                    Key::Up | Key::Char('k') => *line = line.saturating_sub(1),
                    Key::Down | Key::Char('j') => *line = (*line + 1).min(HELP.len() - 1),
                    _ => self.over = Over::Nothing,
                }
                Action::None
            }
            Over::Question(question) => {
                let victim = question.victim.clone();
                self.answer(key, victim)
            }
        }
    }

    fn press_in_table(&mut self, key: Key, page: usize) -> Action {
        let (now, page) = (self.index(), page.max(1));
        match (key, &self.at) {
            (Key::Up | Key::Char('k'), _) => self.go(now.saturating_sub(1)),
            (Key::Down | Key::Char('j'), _) => self.go(now + 1),
            (Key::PageUp, _) => self.go(now.saturating_sub(page)),
            (Key::PageDown, _) => self.go(now + page),
            (Key::Home, _) => self.go(0),
            (Key::End, _) => self.go(usize::MAX),
            (Key::Char('?'), _) => self.over = Over::Help(0),
            (Key::Char('q'), At::Locks) => return Action::Quit,
            (Key::Char('q') | Key::Escape, At::Queue(_)) => self.at = At::Locks,
            (Key::Escape, At::Locks) => self.filter_by(String::new()),
            (Key::Enter, At::Locks) => self.enter(),
            (Key::Char('s'), At::Locks) => self.turn(),
            (Key::Char('/'), At::Locks) => self.over = Over::Filter,
            (Key::Char('e'), At::Locks) => {
                self.status_line =
                    Some("press Enter to open the queue, then e to evict a holder".into());
            }
            (Key::Char('e'), At::Queue(_)) => self.ask(),
            _ => {}
        }
        Action::None
    }

    fn press_in_filter(&mut self, key: Key) -> Action {
        match key {
            Key::Enter => self.over = Over::Nothing,
            Key::Escape => {
                self.over = Over::Nothing;
                self.filter_by(String::new());
            }
            Key::Backspace => {
                let mut shorter = self.filter.clone();
                shorter.pop();
                self.filter_by(shorter);
            }
            Key::Char(c) => self.filter_by(format!("{}{c}", self.filter)),
            _ => {}
        }
        Action::None
    }

    /// Handles a key while an eviction must be confirmed. `y` confirms it, and `n`, `q` and Esc
    /// cancel it. Any other key was probably not meant as an answer, so it is ignored.
    fn answer(&mut self, key: Key, victim: Victim) -> Action {
        match key {
            Key::Char('y' | 'Y') => {
                self.over = Over::Nothing;
                let what = format!("token {} of {}", victim.token, clean(&victim.name));
                self.status_line = Some(format!("evicting {what} …"));
                self.evicting = Some(victim.clone());
                Action::Evict(victim)
            }
            Key::Char('n' | 'N' | 'q') | Key::Escape => {
                self.over = Over::Nothing;
                self.status_line = Some("nothing was evicted".into());
                Action::None
            }
            _ => Action::None,
        }
    }

    /// Asks for confirmation to evict the selected claim.
    fn ask(&mut self) {
        let Some(lock) = self.queue() else { return };
        let Some(claim) = lock.claims.get(self.claim.index) else { return };
        let holds = claim.state == ClaimState::Holding;
        let refused = match (claim.state, claim.token) {
            (ClaimState::Waiting, _) => "a waiter does not hold the lock, so it cannot be evicted",
            (_, None) => {
                "it has no token: it is a lock of another program, which leasehold does not evict"
            }
            (_, Some(_)) if self.evicting.is_some() => {
                "the last eviction has not been answered yet"
            }
            (_, Some(token)) => {
                let who = match holds {
                    true => format!("held by {} for {}", claim.holder, short(claim.since)),
                    // This contains only the one claim, so that the text does not mention others in
                    // the queue.
                    false => {
                        let claims = vec![claim.clone()];
                        let alone =
                            LockInfo::new(lock.name.clone(), lock.kind, lock.capacity, claims);
                        held_by(&alone).unwrap_or_default()
                    }
                };
                let victim = Victim { name: lock.name.as_str().to_owned(), token };
                self.over = Over::Question(Question { victim, who, holds });
                return;
            }
        };
        self.status_line = Some(refused.into());
    }

    fn enter(&mut self) {
        let name = self.shown().get(self.lock.index).map(|lock| lock.name.as_str().to_owned());
        if let Some(name) = name {
            (self.at, self.claim) = (At::Queue(name), Cursor::FIRST);
        }
    }

    fn turn(&mut self) {
        self.sort = match self.sort {
            Sort::LongestHold => Sort::OldestWait,
            Sort::OldestWait => Sort::LongestHold,
        };
        self.settle();
    }

    fn filter_by(&mut self, text: String) {
        self.filter = text;
        self.settle();
    }

    fn go(&mut self, index: usize) {
        match self.at {
            At::Locks => {
                let keys = self.lock_keys();
                self.lock.go(index, &keys);
            }
            At::Queue(_) => {
                let keys = self.claim_keys();
                self.claim.go(index, &keys);
            }
        }
    }

    fn settle(&mut self) {
        let (locks, claims) = (self.lock_keys(), self.claim_keys());
        self.lock.settle(&locks);
        self.claim.settle(&claims);
    }

    fn lock_keys(&self) -> Vec<String> {
        self.shown().iter().map(|lock| lock.name.as_str().to_owned()).collect()
    }

    fn claim_keys(&self) -> Vec<ClaimKey> {
        self.queue().map_or_else(Vec::new, |lock| lock.claims.iter().map(key_of).collect())
    }
}

/// Returns whether the text occurs in the lock's name, or in the host or label of a claim in its
/// queue.
fn has(lock: &LockInfo, wanted: &str) -> bool {
    let holders = lock.claims.iter().flat_map(|c| [&c.holder.host, &c.holder.label]);
    let mut texts = std::iter::once(lock.name.as_str()).chain(holders.map(String::as_str));
    wanted.is_empty() || texts.any(|text| text.to_lowercase().contains(wanted))
}

/// Returns how long the earliest holder has held the lock.
pub(crate) fn longest_hold(lock: &LockInfo) -> Option<Duration> {
    lock.holders().map(|claim| claim.since).max()
}

/// Returns how long the earliest waiter has waited.
pub(crate) fn oldest_wait(lock: &LockInfo) -> Option<Duration> {
    lock.waiters().map(|claim| claim.since).max()
}

#[cfg(test)]
mod tests {
    use leasehold::{Holder, Kind, Name};

    use super::*;

    fn claim(claim_state: ClaimState, token: u64, since: u64, label: &str) -> ClaimInfo {
        let holder = Holder { host: "web-1".into(), pid: 7, label: label.into() };
        ClaimInfo::new(claim_state, holder, Token::new(token), 1, Duration::from_secs(since), None)
    }

    fn lock(name: &str, claims: Vec<ClaimInfo>) -> LockInfo {
        LockInfo::new(Name::new(name).unwrap(), Kind::Mutex, 1, claims)
    }

    /// Returns a lock with a holder and a waiter that have these ages in seconds.
    fn busy(name: &str, held: u64, waited: u64) -> LockInfo {
        let holds = claim(ClaimState::Holding, 1, held, "nightly");
        lock(name, vec![holds, claim(ClaimState::Waiting, 2, waited, "")])
    }

    fn state(locks: Vec<LockInfo>) -> State {
        let mut state = State::new("file:", "", Duration::from_secs(1));
        state.see(locks);
        state
    }

    fn names(state: &State) -> Vec<&str> {
        state.shown().iter().map(|lock| lock.name.as_str()).collect()
    }

    fn press(state: &mut State, keys: &str) -> Vec<Action> {
        let mut actions = Vec::new();
        for c in keys.chars() {
            let key = match c {
                '\n' => Key::Enter,
                '\u{1b}' => Key::Escape,
                '\u{7f}' => Key::Backspace,
                c => Key::Char(c),
            };
            actions.push(state.press(key, 2));
        }
        actions.retain(|action| *action != Action::None);
        actions
    }

    #[test]
    fn the_longest_hold_or_the_oldest_wait_is_first() {
        let free = lock("free", vec![claim(ClaimState::Cooldown, 3, 99, "")]);
        let mut state = state(vec![busy("a", 1, 5), busy("b", 9, 2), free, busy("c", 5, 9)]);
        assert_eq!(names(&state), ["b", "c", "a", "free"]);
        press(&mut state, "s");
        assert_eq!(names(&state), ["c", "a", "b", "free"]);
        press(&mut state, "s");
        assert_eq!(names(&state), ["b", "c", "a", "free"]);
    }

    #[test]
    fn selection_stays_within_the_table() {
        let all = ["a", "b", "c", "d", "e"];
        let mut state = state(all.iter().map(|name| busy(name, 1, 1)).collect());
        let mut at = |keys: &[Key]| {
            keys.iter().for_each(|key| _ = state.press(*key, 2));
            state.index()
        };
        assert_eq!(at(&[Key::Up]), 0);
        assert_eq!(at(&[Key::Down, Key::Char('j'), Key::Char('k')]), 1);
        assert_eq!(at(&[Key::PageDown]), 3);
        assert_eq!(at(&[Key::PageDown]), 4);
        assert_eq!(at(&[Key::PageUp]), 2);
        assert_eq!(at(&[Key::End, Key::Down]), 4);
        assert_eq!(at(&[Key::Home]), 0);
        let mut empty = super::tests::state(Vec::new());
        for key in [Key::Down, Key::End, Key::PageDown, Key::Enter, Key::Char('e')] {
            assert_eq!(empty.press(key, 0), Action::None);
        }
        assert_eq!((empty.index(), &empty.at), (0, &At::Locks));
    }

    #[test]
    fn selection_follows_its_row_when_the_order_changes() {
        let mut state = state(vec![busy("a", 3, 1), busy("b", 2, 1), busy("c", 1, 1)]);
        press(&mut state, "j");
        assert_eq!(names(&state)[state.index()], "b");
        state.see(vec![busy("a", 3, 1), busy("b", 9, 1), busy("c", 4, 1)]);
        assert_eq!((names(&state)[state.index()], state.index()), ("b", 0));
        // The row is gone, so the row at its position is selected.
        state.see(vec![busy("a", 3, 1), busy("c", 4, 1)]);
        assert_eq!(names(&state)[state.index()], "c");
        state.see(Vec::new());
        assert_eq!(state.index(), 0);
    }

    #[test]
    fn filter_matches_names_hosts_and_labels() {
        let mut state = state(vec![busy("Alpha", 1, 1), lock("beta", vec![])]);
        press(&mut state, "/alx");
        assert!(names(&state).is_empty());
        press(&mut state, "\u{7f}\n");
        assert_eq!((names(&state), &state.over), (vec!["Alpha"], &Over::Nothing));
        press(&mut state, "\u{1b}/NIGHT\n");
        assert_eq!(names(&state), ["Alpha"]);
        press(&mut state, "\u{1b}");
        assert_eq!(names(&state).len(), 2);
        // During the input of the filter, letters are text.
        assert_eq!(press(&mut state, "/qse?"), []);
        assert_eq!(state.filter, "qse?");
        press(&mut state, "\u{1b}");
        assert_eq!((state.filter.as_str(), &state.over), ("", &Over::Nothing));
    }

    #[test]
    fn keys_open_a_queue_go_back_and_quit() {
        let mut state = state(vec![busy("a", 1, 1)]);
        for back in ["q", "\u{1b}"] {
            assert_eq!(press(&mut state, "\n"), []);
            assert_eq!(state.at, At::Queue("a".into()));
            assert_eq!(press(&mut state, back), []);
            assert_eq!(state.at, At::Locks);
        }
        assert_eq!(press(&mut state, "\u{1b}"), []);
        assert_eq!(press(&mut state, "q"), [Action::Quit]);
        for over in [Over::Nothing, Over::Filter, Over::Help(0)] {
            state.over = over;
            assert_eq!(state.press(Key::Interrupt, 2), Action::Quit);
            assert_eq!(state.press(Key::Suspend, 2), Action::Suspend);
        }
    }

    fn victim(token: u64) -> Victim {
        Victim { name: "a".into(), token: Token::new(token).unwrap() }
    }

    #[test]
    fn only_yes_evicts_and_only_the_claim_in_the_prompt() {
        let mut state = state(vec![busy("a", 1, 1)]);
        press(&mut state, "\ne");
        let Over::Question(question) = &state.over else { panic!("{:?}", state.over) };
        assert_eq!((&question.victim, question.holds), (&victim(1), true));
        assert_eq!(question.who, "held by web-1 pid 7 (nightly) for 1s");
        for no in ["n", "N", "q", "\u{1b}"] {
            assert_eq!(press(&mut state, &format!("e{no}")), []);
            assert_eq!((&state.over, &state.at), (&Over::Nothing, &At::Queue("a".into())));
        }
        assert_eq!(press(&mut state, "ex \nj"), []);
        assert!(matches!(state.over, Over::Question(_)), "another key answered the question");
        // Another claim is at that position by now.
        state.see(vec![lock("a", vec![claim(ClaimState::Holding, 2, 0, "")])]);
        assert_eq!(press(&mut state, "y"), [Action::Evict(victim(1))]);
        assert_eq!(press(&mut state, "y"), []);
        press(&mut state, "e");
        assert_eq!(state.over, Over::Nothing, "a second eviction was started");
        state.evicted(Ok(0));
        assert_eq!(
            state.status_line.as_deref(),
            Some("nothing was evicted: the hold with token 1 of a had already ended")
        );
        assert_eq!(press(&mut state, "ey"), [Action::Evict(victim(2))]);
        state.evicted(Ok(1));
        assert_eq!(state.status_line.as_deref(), Some("evicted token 2 of a"));
        press(&mut state, "ey");
        state.evicted(Err("gone\u{1b}[2J".into()));
        assert_eq!(state.status_line.as_deref(), Some("token 2 of a: gone\\u{1b}[2J"));
        press(&mut state, "j");
        assert_eq!(state.status_line, None);
    }

    #[test]
    fn freeze_can_be_evicted_and_waiter_cannot() {
        let closed = claim(ClaimState::Cooldown, 5, 9, "frozen: moved");
        let mut foreign = claim(ClaimState::Holding, 1, 9, "");
        foreign.token = None;
        let waits = claim(ClaimState::Waiting, 6, 9, "");
        let mut state = state(vec![lock("a", vec![closed, waits, foreign])]);
        press(&mut state, "\ne");
        let Over::Question(question) = &state.over else { panic!("{:?}", state.over) };
        assert_eq!((&question.victim, question.holds), (&victim(5), false));
        assert!(question.who.starts_with("frozen by web-1: moved"), "{}", question.who);
        assert_eq!(press(&mut state, "nje"), []);
        assert_eq!((&state.over, state.status_line.is_some()), (&Over::Nothing, true));
        assert_eq!(press(&mut state, "je"), []);
        assert!(
            state
                .status_line
                .as_deref()
                .is_some_and(|status_line| status_line.contains("no token"))
        );
    }

    #[test]
    fn last_view_stays_while_the_store_is_unreachable() {
        let mut state = state(vec![busy("a", 1, 1)]);
        state.miss("cannot reach\n\u{1b}");
        assert_eq!(names(&state), ["a"]);
        assert_eq!(state.away.as_deref(), Some("cannot reach\\n\\u{1b}"));
        state.see(vec![busy("b", 1, 1)]);
        assert_eq!((names(&state), &state.away), (vec!["b"], &None));
    }

    #[test]
    fn help_scrolls_to_its_end() {
        let mut state = state(Vec::new());
        press(&mut state, "?");
        (0..99).for_each(|_| _ = state.press(Key::Down, 2));
        assert_eq!(state.over, Over::Help(HELP.len() - 1));
        press(&mut state, "k");
        assert_eq!(state.over, Over::Help(HELP.len() - 2));
        assert_eq!(press(&mut state, "q"), []);
        assert_eq!(state.over, Over::Nothing);
    }
}
