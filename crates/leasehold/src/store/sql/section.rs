//! One lock's queue, read out of its rows and written back into them.
//!
//! The first in the queue lives in the lock's own row if it came when nobody else was there; all
//! others live in rows of their own. Nobody ever moves from one to the other.
//!
//! # Not all of a long queue is read
//! Who holds is a prefix of the queue, and the first that waits ends it: whatever stands behind a
//! claim that waits neither holds nor can be granted. So the front of the queue is enough, together
//! with the claim that the call is about, **as long as somebody in that front still waits when the
//! call is done** ([`Loaded::is_enough`]). If not, which means that all who were read hold, have
//! left or are dead, the whole queue is read and the call done again on it; nothing was written
//! before that. The lock's row counts the claims, so what was not read is counted, and a claim that
//! joins knows how many are before it. What has expired further back is removed when it has come to
//! the front, or by whoever reads all.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::fault::Failure;
use super::statements::{self, Statements};
use super::wire::{Arg, Cell, Row, Statement, Wire};
use crate::claim::{Claim, ClaimId, Holder, Kind, Token};
use crate::error::{Error, ErrorKind};
use crate::name::Name;
use crate::queue::{Entry, Queue};
use crate::store::{Joined, Place, Renewal, Standing};

/// How much of a queue is read at first.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reach {
    All,
    /// The front, and this claim wherever it stands.
    FrontAnd(ClaimId),
}

/// How many claims the front is: enough for the readers and permits of most locks, and for a few
/// dead waiters. As it stands in the statement, too.
pub(super) const FRONT: usize = 16;

/// A lock's queue as it was read.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) queue: Queue,
    /// The server's clock, read when the row was locked already.
    pub(super) now: u64,
    /// How many claims were not read.
    pub(super) hidden: usize,
    /// The claim that was read though it does not stand in the front.
    behind: Option<ClaimId>,
    /// Who lives in the lock's row.
    head: Option<ClaimId>,
    before: Vec<Entry>,
    last_before: u64,
}

/// Reads the queue of `name` with its row locked. `None`: there is no such row.
pub(super) async fn load(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
    reach: Reach,
) -> Result<Option<Loaded>, Failure> {
    let named = || Arg::Name(name.as_str().into());
    let rows = wire.rows(&sql.lock, vec![named()]).await?;
    let Some(lock) = rows.into_iter().next() else { return Ok(None) };
    let lock = Cells::new(lock).lock()?;
    let rows = match reach {
        Reach::All => wire.rows(&sql.claims, vec![named()]).await?,
        Reach::FrontAnd(claim) => {
            wire.rows(&sql.front, vec![named(), named(), claim.to_hex().into()]).await?
        }
    };
    let mut now = 0;
    let mut claims: Vec<Entry> = Vec::new();
    for row in rows {
        let mut cells = Cells::new(row);
        now = now.max(cells.count()?);
        claims.extend(cells.claim()?);
    }
    // A claim in the front was found twice.
    claims.dedup_by_key(|e| e.id);
    let counted = lock.claims;
    let mut loaded = Loaded::of(lock, claims, now);
    if let Reach::FrontAnd(_) = reach {
        let (read, behind) = (loaded.claims().len(), loaded.claims().get(FRONT).map(|e| e.id));
        (loaded.hidden, loaded.behind) = (counted.saturating_sub(read), behind);
    }
    Ok(Some(loaded))
}

/// Makes the row of a lock that never was.
pub(super) async fn create(
    wire: &mut dyn Wire,
    sql: &Statements,
    claim: &Claim,
) -> Result<(), Failure> {
    let args = vec![
        Arg::Name(claim.name.as_str().into()),
        kind_number(claim.kind).into(),
        i64::from(claim.capacity).into(),
    ];
    wire.run(&sql.create, args).await?;
    Ok(())
}

/// Reads rows that begin with the clock, a lock and a claim, all of one lock.
pub(super) fn snapshot(rows: Vec<Row>) -> Result<Option<Loaded>, Failure> {
    let mut lock = None;
    let mut now = 0;
    let mut claims = Vec::new();
    for row in rows {
        let mut cells = Cells::new(row);
        now = now.max(cells.count()?);
        lock = Some(cells.lock()?);
        claims.extend(cells.claim()?);
    }
    Ok(lock.map(|lock| Loaded::of(lock, claims, now)))
}

/// The same for rows of many locks that begin with the name.
pub(super) fn snapshots(rows: Vec<Row>) -> Result<Vec<(Name, Loaded)>, Failure> {
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

/// A lock's row.
struct LockRow {
    kind: Kind,
    capacity: u32,
    last_token: u64,
    /// How many claims have rows of their own.
    claims: usize,
    head: Option<Entry>,
}

impl Loaded {
    fn of(lock: LockRow, claims: Vec<Entry>, now: u64) -> Self {
        let head = lock.head.as_ref().map(|e| e.id);
        let before: Vec<Entry> = lock.head.into_iter().chain(claims).collect();
        let queue = Queue::restored(lock.kind, lock.capacity, lock.last_token, before.clone());
        let last_before = lock.last_token;
        Self { queue, now, hidden: 0, behind: None, head, before, last_before }
    }

    /// Those read that have rows of their own.
    fn claims(&self) -> &[Entry] {
        self.before.get(usize::from(self.head.is_some())..).unwrap_or_default()
    }

    /// Whether what was not read can make no difference to what was done to the queue: see above.
    pub(super) fn is_enough(&self) -> bool {
        let in_front = |e: &&Entry| Some(e.id) != self.behind && self.was_there(e.id);
        let waits = |e: &Entry| e.standing == Standing::Waiting;
        self.hidden == 0 || self.queue.entries().filter(in_front).any(waits)
    }

    /// The answer to a claim that joined behind those who were not read.
    pub(super) fn with_hidden(&self, id: ClaimId, joined: Joined) -> Joined {
        match joined {
            Joined::Waiting(place) if !self.was_there(id) => {
                Joined::Waiting(Place { ahead: place.ahead + self.hidden, ..place })
            }
            joined => joined,
        }
    }

    /// Whether the claim stood in what was read.
    fn was_there(&self, id: ClaimId) -> bool {
        self.before.iter().any(|e| e.id == id)
    }

    /// Whether the claim stands so far back that nobody has counted who is before it.
    pub(super) fn is_behind(&self, id: ClaimId) -> bool {
        self.hidden > 0 && self.behind == Some(id)
    }

    /// Whether anything has expired or could be granted.
    pub(super) fn is_settled(&self) -> bool {
        let mut queue = self.queue.clone();
        queue.settle(self.now);
        let same = |(a, b): (&Entry, &Entry)| a.id == b.id && a.standing == b.standing;
        queue.entries().len() == self.before.len() && queue.entries().zip(&self.before).all(same)
    }

    /// What a claim is told whose row was lengthened just before this was read. `None`: gone since.
    pub(super) fn standing_of(
        &mut self,
        claim: &Claim,
        lease: Duration,
        now: u64,
    ) -> Option<Renewal> {
        match self.queue.peek(claim.id, now)? {
            Renewal::Holding { token, remaining } => {
                let remaining = remaining.map(|left| left.min(lease));
                Some(Renewal::Holding { token, remaining })
            }
            Renewal::Waiting(place) => Some(Renewal::Waiting(place)),
            Renewal::Lost => None,
        }
    }

    /// What is to be written: each changes one row. The lock's row is ours alone since it was read;
    /// a claim's row may have been renewed meanwhile, so what ends or shortens a place checks that
    /// it was not.
    pub(super) fn changes<'a>(
        &self,
        sql: &'a Statements,
        name: &Name,
    ) -> Vec<(&'a Statement, Vec<Arg>)> {
        let queue = &self.queue;
        let after: HashMap<ClaimId, &Entry> = queue.entries().map(|e| (e.id, e)).collect();
        let before: HashMap<ClaimId, &Entry> = self.before.iter().map(|e| (e.id, e)).collect();
        let alone = queue.entries().len() == 1 && self.hidden == 0;
        let head = queue.entries().find(|e| match self.head {
            Some(head) => e.id == head,
            None => alone && !before.contains_key(&e.id),
        });
        let head_id = head.map(|e| e.id);
        let changed = queue.last_token() != self.last_before
            || after.len() != before.len()
            || head_id != self.head
            || after.keys().any(|id| !before.contains_key(id))
            || head.is_some_and(|e| before.get(&e.id).is_some_and(|b| differs(b, e)));
        let name = || Arg::Name(name.as_str().to_owned());
        let mut writes = Vec::new();
        if changed {
            let others = queue.entries().len() - usize::from(head.is_some()) + self.hidden;
            // The row of a free lock goes on telling of its last holder.
            let last = self.before.first().filter(|e| Some(e.id) == self.head);
            let shown = head.or(last);
            let mut args = vec![
                kind_number(queue.kind()).into(),
                i64::from(queue.capacity()).into(),
                int(queue.last_token()),
                int(u64::try_from(others).unwrap_or(0)),
                head.map_or(String::new(), |e| e.id.to_hex()).into(),
            ];
            args.extend(match shown {
                Some(e) => common(e),
                None => vec![
                    0.into(),
                    0.into(),
                    0.into(),
                    0.into(),
                    0.into(),
                    0.into(),
                    "".into(),
                    0.into(),
                    "".into(),
                ],
            });
            args.push(name());
            writes.push((&sql.write_lock, args));
        }
        let in_rows = |e: &&Entry| Some(e.id) != self.head && Some(e.id) != head_id;
        for e in self.before.iter().filter(|e| Some(e.id) != self.head) {
            if !after.contains_key(&e.id) {
                let args = vec![name(), int(e.token.get()), time(e.expires.unwrap_or(0))];
                writes.push((&sql.delete_claim, args));
            }
        }
        for e in queue.entries().filter(in_rows) {
            let Some(old) = before.get(&e.id) else {
                let mut args = vec![name(), e.id.to_hex().into()];
                args.extend(common(e));
                args.push(e.session.clone().into());
                writes.push((&sql.insert_claim, args));
                continue;
            };
            if !differs(old, e) {
                continue;
            }
            let (end, old_end) = (e.expires.unwrap_or(0), old.expires.unwrap_or(0));
            let mut args = vec![standing_number(e.standing).into(), time(e.since), time(end)];
            args.extend([name(), int(e.token.get())]);
            let statement = match e.standing {
                Standing::Departed => {
                    args.push(time(old_end));
                    &sql.turn_claim
                }
                Standing::Holding | Standing::Waiting => &sql.extend_claim,
            };
            writes.push((statement, args));
        }
        writes
    }
}

/// Does what was to be written: at once where the database can. Another than one row each: it was
/// renewed meanwhile.
pub(super) async fn write(
    wire: &mut dyn Wire,
    sql: &Statements,
    writes: Vec<(&Statement, Vec<Arg>)>,
) -> Result<(), Failure> {
    if sql.joins_writes && (2..=JOINED).contains(&writes.len()) {
        let (statement, args) = statements::joined(writes);
        let row = wire.rows(&statement, args).await?.into_iter().next();
        let mut cells = Cells::new(row.unwrap_or_default());
        for _ in statement.shape.bytes() {
            one(cells.count()?)?;
        }
        return Ok(());
    }
    for (statement, args) in writes {
        one(match statement.shape {
            "" => wire.run(statement, args).await?.affected,
            _ => wire.rows(statement, args).await?.len() as u64,
        })?;
    }
    Ok(())
}

/// How many writes are made one statement of: what hands a lock over, and no more, since each
/// number of them is another statement for the server to keep prepared.
const JOINED: usize = 6;

fn one(affected: u64) -> Result<(), Failure> {
    match affected {
        1 => Ok(()),
        _ => Err(Failure::Conflict(sqlx::Error::RowNotFound)),
    }
}

fn differs(a: &Entry, b: &Entry) -> bool {
    (a.standing, a.since, a.expires) != (b.standing, b.since, b.expires)
}

/// token, weight, standing, since, expires, lock_delay, host, pid, label.
fn common(e: &Entry) -> Vec<Arg> {
    // Departed, the delay is in `expires` already; the fast path adds the two.
    let delay = if e.standing == Standing::Departed { 0 } else { e.lock_delay };
    vec![
        int(e.token.get()),
        i64::from(e.weight).into(),
        standing_number(e.standing).into(),
        time(e.since),
        time(e.expires.unwrap_or(0)),
        time(delay),
        plain(&e.holder.host).into(),
        i64::from(e.holder.pid).into(),
        plain(&e.holder.label).into(),
    ]
}

/// Text as it fits into a column: a label may come from anybody's claim.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(256).collect()
}

pub(super) fn int(n: u64) -> Arg {
    Arg::Int(i64::try_from(n).unwrap_or(i64::MAX))
}

/// A time, as far as the database can still add another to it.
fn time(n: u64) -> Arg {
    Arg::Int(i64::try_from(n).unwrap_or(i64::MAX).min(i64::MAX / 4))
}

/// A duration in microseconds, likewise.
pub(super) fn micros(d: Duration) -> Arg {
    time(u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

pub(super) fn kind_number(kind: Kind) -> i64 {
    match kind {
        Kind::Mutex => 0,
        Kind::RwLock => 1,
        Kind::Semaphore => 2,
    }
}

fn standing_number(standing: Standing) -> i64 {
    match standing {
        Standing::Waiting => 0,
        Standing::Holding => 1,
        Standing::Departed => 2,
    }
}

fn corrupt(what: &str) -> Failure {
    let what = format!(
        "{what} in leasehold's tables is not what leasehold writes: look who else writes there"
    );
    Failure::Final(Error::new(ErrorKind::Corrupt, what))
}

/// A row, read from left to right.
pub(super) struct Cells(std::vec::IntoIter<Cell>);

impl Cells {
    pub(super) fn new(row: Row) -> Self {
        Self(row.into_iter())
    }

    pub(super) fn text(&mut self) -> Result<String, Failure> {
        match self.0.next() {
            Some(Cell::Text(Some(text))) => Ok(text),
            _ => Err(corrupt("a text")),
        }
    }

    pub(super) fn count<T: TryFrom<i64>>(&mut self) -> Result<T, Failure> {
        match self.0.next() {
            Some(Cell::Int(Some(n))) => T::try_from(n).map_err(|_| corrupt("a number")),
            _ => Err(corrupt("a number")),
        }
    }

    fn lock(&mut self) -> Result<LockRow, Failure> {
        let kind = match self.count::<i64>()? {
            0 => Kind::Mutex,
            1 => Kind::RwLock,
            2 => Kind::Semaphore,
            _ => return Err(corrupt("a lock's kind")),
        };
        let capacity = self.count()?;
        let last_token = self.count()?;
        let claims = self.count()?;
        let claim = self.text()?;
        if claim.is_empty() {
            // token to label
            self.0.by_ref().take(9).for_each(drop);
            return Ok(LockRow { kind, capacity, last_token, claims, head: None });
        }
        let head = Some(self.entry(&claim)?);
        Ok(LockRow { kind, capacity, last_token, claims, head })
    }

    /// `None`: the lock was joined with no claim.
    fn claim(&mut self) -> Result<Option<Entry>, Failure> {
        let claim = match self.0.next() {
            Some(Cell::Text(Some(claim))) => claim,
            _ => return Ok(None),
        };
        let mut entry = self.entry(&claim)?;
        entry.session = self.text()?;
        Ok(Some(entry))
    }

    fn entry(&mut self, claim: &str) -> Result<Entry, Failure> {
        Ok(Entry {
            id: ClaimId::from_hex(claim).ok_or_else(|| corrupt("a claim"))?,
            token: Token::new(self.count()?).ok_or_else(|| corrupt("a token"))?,
            weight: self.count()?,
            standing: match self.count::<i64>()? {
                0 => Standing::Waiting,
                1 => Standing::Holding,
                2 => Standing::Departed,
                _ => return Err(corrupt("a claim's standing")),
            },
            since: self.count()?,
            expires: Some(self.count()?),
            lock_delay: self.count()?,
            holder: Arc::new(Holder {
                host: self.text()?,
                pid: self.count()?,
                label: self.text()?,
            }),
            session: String::new(),
        })
    }
}
