//! One lock's queue, read from its rows and written back to them.
//!
//! If a claim joined when the queue was empty, it is stored in the lock's own row. All other claims
//! have rows of their own. A claim never moves from one kind of row to the other.
//!
//! # A long queue is not read completely
//! Holders are a prefix of the queue, and the first waiter ends it. No claim after a waiter holds
//! the lock or can be granted. So it is enough to read the front of the queue and the claim that
//! the call is about. **This holds as long as a claim in that front still waits when the call is
//! done** ([`QueueSnapshot::is_enough`]). Otherwise all claims that were read hold, have left or
//! have expired. In this case the whole queue is read and the call is repeated on it. Nothing has
//! been written by then.
//!
//! The lock's row counts the claims. So the claims that were not read are counted, and a claim that
//! joins knows how many are ahead of it. A claim that expired further back is removed when it
//! reaches the front, or by the next call that reads the whole queue.

use std::collections::HashMap;
use std::time::Duration;

use super::fault::Failure;
use super::rows::{Cells, LockRow, common, corrupt, int, kind_number, nobody, state_number, time};
use super::statements::{FRONT_LIMIT, Statements, Write};
use super::wire::{Arg, Row, Step, Wire};
use leasehold_core::queue::{Entry, Queue};
use leasehold_core::store::{ClaimState, Joined, Place, Renewal};
use leasehold_core::{Claim, ClaimId, Name, Token};

/// The part of a queue to read.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReadScope {
    All,
    /// The front, and this claim wherever it is.
    FrontAnd(ClaimId),
}

/// A lock's queue as it was read.
#[derive(Debug)]
pub(super) struct QueueSnapshot {
    pub(super) queue: Queue,
    /// The server's clock. In a section, it is read after the lock's row was locked.
    pub(super) now: u64,
    /// The number of claims that were not read.
    hidden: usize,
    /// The token of a claim that was read although it is not in the front.
    behind: Option<Token>,
    /// The claim that is stored in the lock's row.
    head: Option<Token>,
    before: Vec<Entry>,
    last_before: u64,
}

/// The way in which a section begins.
#[derive(Clone, Copy, Debug)]
pub(super) enum SectionStart<'a> {
    Begin,
    /// Creates the row of a lock that was never used.
    Create(&'a Claim),
    /// The section has already begun.
    Again,
}

/// Reads the queue of `name` with its row locked, in one round trip where the database supports
/// that. Returns `None` if the row does not exist.
pub(super) async fn load(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
    scope: ReadScope,
    start: SectionStart<'_>,
) -> Result<Option<QueueSnapshot>, Failure> {
    let named = || Arg::Name(name.as_str().into());
    if sql.one_writer {
        match start {
            SectionStart::Begin => wire.raw(sql.begin).await?,
            SectionStart::Create(claim) => {
                wire.script(vec![create(sql, claim)], &mut Vec::new()).await?;
            }
            SectionStart::Again => {}
        }
        return match scope {
            ReadScope::All => snapshot(wire.rows(&sql.read, vec![named()]).await?),
            ReadScope::FrontAnd(claim) => read_front(wire, sql, name, claim).await,
        };
    }
    let mut steps = match start {
        SectionStart::Begin => vec![Step::Raw(sql.begin.into())],
        SectionStart::Create(claim) => vec![create(sql, claim)],
        SectionStart::Again => Vec::new(),
    };
    steps.push(Step::Rows(&sql.lock, vec![named()]));
    steps.push(match scope {
        ReadScope::All => Step::Rows(&sql.claims, vec![named()]),
        ReadScope::FrontAnd(claim) => {
            Step::Rows(&sql.front, vec![named(), named(), named(), claim.to_hex().into()])
        }
    });
    let mut read = Vec::new();
    wire.script(steps, &mut read).await?;
    let (rows, locks) = (read.pop().unwrap_or_default(), read.pop().unwrap_or_default());
    let Some(lock) = locks.into_iter().next() else { return Ok(None) };
    let lock = Cells::new(lock).lock()?;
    let mut now = 0;
    let mut claims: Vec<Entry> = Vec::new();
    for row in rows {
        let mut cells = Cells::new(row);
        now = now.max(cells.count()?);
        claims.extend(cells.claim()?);
    }
    Ok(Some(match scope {
        ReadScope::All => QueueSnapshot::of(lock, claims, now),
        ReadScope::FrontAnd(_) => QueueSnapshot::of_front(lock, claims, now),
    }))
}

/// Reads the front of the queue of `name`, and this claim, without locking anything.
pub(super) async fn read_front(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
    claim: ClaimId,
) -> Result<Option<QueueSnapshot>, Failure> {
    let named = || Arg::Name(name.as_str().into());
    let args = vec![named(), named(), named(), claim.to_hex().into(), named()];
    let rows = wire.rows(&sql.look, args).await?;
    let read = lock_and_claims(rows)?;
    Ok(read.map(|(lock, claims, now)| QueueSnapshot::of_front(lock, claims, now)))
}

/// Returns the step that creates the row of a lock, unless the row exists.
fn create<'a>(sql: &'a Statements, claim: &Claim) -> Step<'a> {
    let args = vec![
        Arg::Name(claim.name.as_str().into()),
        kind_number(claim.kind).into(),
        i64::from(claim.capacity).into(),
    ];
    Step::Rows(&sql.create, args)
}

/// Builds a snapshot from the rows of one lock. Each contains the clock, the lock and a claim, if
/// there is one. Returns `None` if there are no rows.
pub(super) fn snapshot(rows: Vec<Row>) -> Result<Option<QueueSnapshot>, Failure> {
    Ok(lock_and_claims(rows)?.map(|(lock, claims, now)| QueueSnapshot::of(lock, claims, now)))
}

fn lock_and_claims(rows: Vec<Row>) -> Result<Option<(LockRow, Vec<Entry>, u64)>, Failure> {
    let mut lock = None;
    let mut now = 0;
    let mut claims = Vec::new();
    for row in rows {
        let mut cells = Cells::new(row);
        now = now.max(cells.count()?);
        lock = Some(cells.lock()?);
        claims.extend(cells.claim()?);
    }
    Ok(lock.map(|lock| (lock, claims, now)))
}

/// Reads rows of many locks like [`snapshot`]. Each row begins with the name of its lock.
pub(super) fn snapshots(rows: Vec<Row>) -> Result<Vec<(Name, QueueSnapshot)>, Failure> {
    let mut order: Vec<Name> = Vec::new();
    let mut by_name: HashMap<Name, Vec<Row>> = HashMap::new();
    for mut row in rows {
        let rest = row.split_off(1);
        let name = Name::new(Cells::new(row).text()?).map_err(|_| corrupt("a lock's name"))?;
        if !by_name.contains_key(&name) {
            order.push(name.clone());
        }
        by_name.entry(name).or_default().push(rest);
    }
    let mut all = Vec::new();
    for name in order {
        let rows = by_name.remove(&name).unwrap_or_default();
        if let Some(loaded) = snapshot(rows)? {
            all.push((name, loaded));
        }
    }
    Ok(all)
}

impl QueueSnapshot {
    fn of(lock: LockRow, claims: Vec<Entry>, now: u64) -> Self {
        let head = lock.head.as_ref().map(|e| e.token);
        let before: Vec<Entry> = lock.head.into_iter().chain(claims).collect();
        let queue = Queue::restored(lock.kind, lock.capacity, lock.last_token, before.clone());
        let last_before = lock.last_token;
        Self { queue, now, hidden: 0, behind: None, head, before, last_before }
    }

    /// Creates the queue from its front and one more claim. If that claim is in the front, it was
    /// read twice.
    fn of_front(lock: LockRow, mut claims: Vec<Entry>, now: u64) -> Self {
        claims.dedup_by_key(|e| e.token);
        let hidden = lock.claims.saturating_sub(claims.len());
        let behind = claims.get(FRONT_LIMIT).map(|e| e.token);
        Self { hidden, behind, ..Self::of(lock, claims, now) }
    }

    /// Returns whether the claims that were not read cannot affect the result. See the module
    /// header.
    pub(super) fn is_enough(&self) -> bool {
        let in_front = |e: &&Entry| self.is_in_front(e.token);
        let waits = |e: &Entry| e.state == ClaimState::Waiting;
        self.hidden == 0 || self.queue.entries().filter(in_front).any(waits)
    }

    /// Returns whether some claims were not read.
    pub(super) fn is_cut(&self) -> bool {
        self.hidden > 0
    }

    /// Returns whether this claim and all claims ahead of it were read.
    pub(super) fn is_in_front(&self, token: Token) -> bool {
        Some(token) != self.behind && self.was_read(token)
    }

    /// Returns whether a claim is stored in the lock's row.
    pub(super) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Returns whether a claim was read whose number of claims ahead is not known.
    pub(super) fn has_uncounted(&self) -> bool {
        self.hidden > 0 && self.behind.is_some()
    }

    /// Corrects the number of claims ahead in the reply to a join, if the claim joined behind
    /// claims that were not read.
    pub(super) fn with_hidden(&self, joined: Joined) -> Joined {
        match joined {
            Joined::Waiting(place) if !place.token.is_some_and(|token| self.was_read(token)) => {
                Joined::Waiting(Place { ahead: place.ahead + self.hidden, ..place })
            }
            joined => joined,
        }
    }

    fn was_read(&self, token: Token) -> bool {
        self.before.iter().any(|e| e.token == token)
    }

    /// Returns whether nothing has expired and nothing could be granted.
    pub(super) fn is_settled(&self) -> bool {
        let mut queue = self.queue.clone();
        queue.settle(self.now);
        let same = |(a, b): (&Entry, &Entry)| a.token == b.token && a.state == b.state;
        queue.entries().len() == self.before.len() && queue.entries().zip(&self.before).all(same)
    }

    /// Returns the renewal of a claim whose row was extended just before the queue was read.
    /// Returns `None` if the claim has left or expired since.
    pub(super) fn state_of(&mut self, claim: &Claim, lease: Duration, now: u64) -> Option<Renewal> {
        match self.queue.peek(claim.id, now)? {
            Renewal::Holding { token, remaining } => {
                let remaining = remaining.map(|left| left.min(lease));
                Some(Renewal::Holding { token, remaining })
            }
            Renewal::Waiting(place) => Some(Renewal::Waiting(place)),
            Renewal::Lost | Renewal::Unknown { .. } => None,
        }
    }

    /// Returns the writes, each of which changes one row. The lock's row is locked, so no other
    /// client has changed it since it was read. A claim's row may have been renewed, so a write
    /// that ends or shortens a claim's place checks that it was not renewed.
    pub(super) fn changes<'a>(&self, sql: &'a Statements, name: &Name) -> Vec<Write<'a>> {
        let (before, after) = (by_token(&self.before), by_token(self.queue.entries()));
        let head = self.head_after(&before);
        let same = |e: &Entry| before.get(&e.token).is_some_and(|old| !differs(old, e));
        let unchanged = self.queue.last_token() == self.last_before
            && after.len() == before.len()
            && after.keys().all(|token| before.contains_key(token))
            && head.is_none_or(same);
        let mut writes = Vec::new();
        if !unchanged {
            writes.push(self.write_lock(sql, name, head, self.queue.last_token()));
        }
        for gone in self.before.iter().filter(|e| !after.contains_key(&e.token)) {
            if Some(gone.token) != self.head {
                writes.push(delete(sql, name, gone));
            }
        }
        for e in self.queue.entries().filter(|e| Some(e.token) != head.map(|head| head.token)) {
            match before.get(&e.token) {
                None => writes.push(insert(sql, name, e)),
                Some(old) => {
                    writes.extend(is_moved(old, e).then(|| update(sql, name, old, e)));
                    writes.extend((old.weight != e.weight).then(|| convert(sql, name, e)));
                }
            }
        }
        if unchanged && !writes.is_empty() && sql.certifies {
            // Galera and Group Replication roll back one of two transactions that change the same
            // row on two nodes at the same time. They ignore row locks. So every change of a queue
            // must change its lock's row. Tokens may skip numbers.
            let last = self.queue.last_token().saturating_add(1);
            writes.insert(0, self.write_lock(sql, name, head, last));
        }
        writes
    }

    /// Returns the claim that is stored in the lock's row from now on. This is the claim that was
    /// stored there before, or a claim that joined an empty queue. A place is identified by its
    /// token, because a claim can have two places one after the other. This happens if its `join`
    /// arrives again after the first place expired. The second place is at the end of the queue.
    fn head_after(&self, before: &HashMap<Token, &Entry>) -> Option<&Entry> {
        let mut entries = self.queue.entries();
        match self.head {
            Some(head) => entries.find(|e| e.token == head),
            None if entries.len() + self.hidden == 1 => {
                entries.find(|e| !before.contains_key(&e.token))
            }
            None => None,
        }
    }

    fn write_lock<'a>(
        &self,
        sql: &'a Statements,
        name: &Name,
        head: Option<&Entry>,
        last_token: u64,
    ) -> Write<'a> {
        let others = self.queue.entries().len() - usize::from(head.is_some()) + self.hidden;
        let mut args = vec![
            kind_number(self.queue.kind()).into(),
            i64::from(self.queue.capacity()).into(),
            int(last_token),
            int(u64::try_from(others).unwrap_or(0)),
            head.map_or(String::new(), |e| e.id.to_hex()).into(),
        ];
        // The row of a free lock still describes its last holder.
        let last = self.before.first().filter(|e| Some(e.token) == self.head);
        args.extend(head.or(last).map_or_else(|| nobody(self.all_are_above()), common));
        args.push(Arg::Name(name.as_str().to_owned()));
        (&sql.write_lock, args)
    }

    /// Returns a number below the tokens of all claims that have rows of their own. The number is
    /// written to the lock's row. A query for the front can then skip the dead index entries of
    /// claims that left.
    fn all_are_above(&self) -> u64 {
        let first = self.queue.entries().next().map(|e| e.token.get().saturating_sub(1));
        first.unwrap_or_else(|| self.queue.last_token())
    }
}

fn by_token<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> HashMap<Token, &'a Entry> {
    entries.into_iter().map(|e| (e.token, e)).collect()
}

fn insert<'a>(sql: &'a Statements, name: &Name, e: &Entry) -> Write<'a> {
    let mut args = vec![Arg::Name(name.as_str().to_owned()), e.id.to_hex().into()];
    args.extend(common(e));
    args.push(e.session.clone().into());
    (&sql.insert_claim, args)
}

fn delete<'a>(sql: &'a Statements, name: &Name, e: &Entry) -> Write<'a> {
    let name = Arg::Name(name.as_str().to_owned());
    (&sql.delete_claim, vec![name, int(e.token.get()), time(e.expires.unwrap_or(0))])
}

fn update<'a>(sql: &'a Statements, name: &Name, old: &Entry, e: &Entry) -> Write<'a> {
    let end = time(e.expires.unwrap_or(0));
    let mut args = vec![state_number(e.state).into(), time(e.since), end];
    args.extend([Arg::Name(name.as_str().to_owned()), int(e.token.get())]);
    match e.state {
        ClaimState::Cooldown => {
            args.push(time(old.expires.unwrap_or(0)));
            (&sql.turn_claim, args)
        }
        ClaimState::Holding | ClaimState::Waiting => (&sql.extend_claim, args),
    }
}

fn convert<'a>(sql: &'a Statements, name: &Name, e: &Entry) -> Write<'a> {
    let name = Arg::Name(name.as_str().to_owned());
    (&sql.set_weight, vec![i64::from(e.weight).into(), name, int(e.token.get())])
}

fn is_moved(a: &Entry, b: &Entry) -> bool {
    (a.state, a.since, a.expires) != (b.state, b.since, b.expires)
}

fn differs(a: &Entry, b: &Entry) -> bool {
    is_moved(a, b) || a.weight != b.weight
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    use super::super::rows::plain;
    use super::super::wire::Cell;
    use super::*;
    use leasehold_core::{ErrorKind, Holder};

    const CLAIM: &str = "0123456789abcdef0123456789abcdef";

    fn cells(args: Vec<Arg>) -> Row {
        let cell = |arg| match arg {
            Arg::Int(n) => Cell::Int(Some(n)),
            Arg::Text(text) | Arg::Name(text) => Cell::Text(Some(text)),
        };
        args.into_iter().map(cell).collect()
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let states = [ClaimState::Waiting, ClaimState::Holding];
        let times = (0_u64..1 << 60, 0_u64..1 << 60, 0_u64..1 << 60);
        let text = || testbed::texts(&["host", "a label", "job 7/x"]).prop_map(|text| plain(&text));
        let holder = (text(), any::<u32>(), text());
        let numbers = (any::<u128>(), 1_u64..1 << 62, any::<u32>());
        (numbers, select(states.to_vec()), times, holder, text()).prop_map(
            |((id, token, weight), state, (since, expires, delay), (host, pid, label), session)| {
                Entry {
                    id: ClaimId::from_hex(&format!("{id:032x}")).unwrap(),
                    token: Token::new(token).unwrap(),
                    weight,
                    state,
                    since,
                    expires: Some(expires),
                    lock_delay: delay,
                    holder: Arc::new(Holder { host, pid, label }),
                    session,
                }
            },
        )
    }

    /// Returns a row with a lock's name, the clock, the lock, the claim in its row, and another
    /// claim.
    fn right() -> Row {
        let held = |state| {
            let mut args = vec![Arg::from(CLAIM), 7.into(), 1.into(), Arg::Int(state)];
            args.extend([5.into(), 90.into(), 0.into(), "host".into(), 17.into(), "label".into()]);
            args
        };
        let mut args = vec![Arg::from("name"), 10.into(), 2.into(), 3.into(), 9.into(), 1.into()];
        args.extend(held(1));
        args.extend(held(0));
        args.push("session".into());
        cells(args)
    }

    fn cell() -> impl Strategy<Value = Cell> {
        let numbers = [-1, 0, 1, 2, 3, 4, 9, i64::from(u32::MAX), 1 << 40, i64::MAX, i64::MIN];
        prop_oneof![
            select(numbers.to_vec()).prop_map(|n| Cell::Int(Some(n))),
            testbed::texts(&[CLAIM, "name", "host"]).prop_map(|text| Cell::Text(Some(text))),
            Just(Cell::Int(None)),
            Just(Cell::Text(None)),
        ]
    }

    /// Returns a valid row with up to three wrong cells or too few cells, or an arbitrary row.
    fn row() -> impl Strategy<Value = Row> {
        let nearly = vec((any::<Index>(), cell()), 0..=3).prop_map(|errors| {
            errors.into_iter().fold(right(), |mut row, (at, cell)| {
                let at = at.index(row.len());
                row[at] = cell;
                row
            })
        });
        let short = (1..right().len()).prop_map(|cells| right().into_iter().take(cells).collect());
        prop_oneof![6 => nearly, 1 => short, 1 => vec(cell(), 1..40)]
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_rows_are_read_or_reported_as_corrupt(rows in vec(row(), 0..4)) {
            let count = rows.len();
            match snapshots(rows) {
                Ok(read) => {
                    prop_assert!(read.len() <= count);
                    for (_, loaded) in read {
                        let _ = (loaded.is_settled(), loaded.is_enough());
                        prop_assert!(loaded.before.len() <= 2 * count);
                    }
                }
                Err(failure) => {
                    let error = failure.into_error();
                    prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
                    prop_assert_eq!(format!("{error:#}").lines().count(), 1);
                }
            }
        }

        #[test]
        fn claims_are_read_back_from_rows_unchanged(entry in entry()) {
            let mut args = vec![Arg::from(entry.id.to_hex())];
            args.extend(common(&entry));
            args.push(entry.session.clone().into());
            let read = Cells::new(cells(args)).claim().unwrap().unwrap();
            prop_assert_eq!(format!("{read:?}"), format!("{entry:?}"));
        }
    }
}
