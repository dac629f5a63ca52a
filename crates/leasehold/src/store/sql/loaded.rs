//! One lock's queue, read out of its rows and written back into them.
//!
//! The first in the queue lives in the lock's own row if it came when nobody else was there; all
//! others live in rows of their own. Nobody ever moves from one to the other.

use std::collections::HashMap;
use std::time::Duration;

use super::fault::Failure;
use super::rows::{
    Cells, LockRow, common, corrupt, int, kind_number, nobody, standing_number, time,
};
use super::statements::Statements;
use super::wire::{Arg, Row, Wire};
use crate::claim::{Claim, Token};
use crate::name::Name;
use crate::queue::{Entry, Queue};
use crate::store::{Renewal, Standing};

/// A lock's queue as it was read.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) queue: Queue,
    /// The server's clock, read when the row was locked already.
    pub(super) now: u64,
    /// Who lives in the lock's row.
    head: Option<Token>,
    before: Vec<Entry>,
    last_before: u64,
}

/// Reads the queue of `name` with its row locked. `None`: there is no such row.
pub(super) async fn load(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
) -> Result<Option<Loaded>, Failure> {
    let rows = wire.rows(&sql.lock, vec![Arg::Name(name.as_str().into())]).await?;
    let Some(lock) = rows.into_iter().next() else { return Ok(None) };
    let rows = wire.rows(&sql.claims, vec![Arg::Name(name.as_str().into())]).await?;
    let mut now = 0;
    let mut claims = Vec::new();
    for row in rows {
        let mut cells = Cells::new(row);
        now = now.max(cells.count()?);
        claims.extend(cells.claim()?);
    }
    Ok(Some(Loaded::of(Cells::new(lock).lock()?, claims, now)))
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

impl Loaded {
    fn of(lock: LockRow, claims: Vec<Entry>, now: u64) -> Self {
        let head = lock.head.as_ref().map(|e| e.token);
        let before: Vec<Entry> = lock.head.into_iter().chain(claims).collect();
        let queue = Queue::restored(lock.kind, lock.capacity, lock.last_token, before.clone());
        Self { queue, now, head, before, last_before: lock.last_token }
    }

    /// Whether anything has expired or could be granted.
    pub(super) fn is_settled(&self) -> bool {
        let mut queue = self.queue.clone();
        queue.settle(self.now);
        let same = |(a, b): (&Entry, &Entry)| a.token == b.token && a.standing == b.standing;
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

    /// Writes what changed. The lock's row is ours alone since it was read; a claim's row may have
    /// been renewed meanwhile, so what ends or shortens a place checks that it was not.
    pub(super) async fn save(
        &self,
        wire: &mut dyn Wire,
        sql: &Statements,
        name: &Name,
    ) -> Result<(), Failure> {
        let (before, after) = (by_token(&self.before), by_token(self.queue.entries()));
        let head = self.head_after(&before);
        let same = |e: &Entry| before.get(&e.token).is_some_and(|old| !differs(old, e));
        let unchanged = self.queue.last_token() == self.last_before
            && after.len() == before.len()
            && after.keys().all(|token| before.contains_key(token))
            && head.is_none_or(same);
        if !unchanged {
            self.write_lock(wire, sql, name, head).await?;
        }
        for gone in self.before.iter().filter(|e| !after.contains_key(&e.token)) {
            if Some(gone.token) != self.head {
                delete(wire, sql, name, gone).await?;
            }
        }
        for e in self.queue.entries().filter(|e| Some(e.token) != head.map(|head| head.token)) {
            match before.get(&e.token) {
                None => insert(wire, sql, name, e).await?,
                Some(old) if differs(old, e) => update(wire, sql, name, old, e).await?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Who lives in the lock's row from now on: who did, or who came when nobody was there. A place
    /// is known by its token: a claim can have two, one after the other, when its `join` arrives
    /// again after the first expired, and the second is at the end of the queue.
    fn head_after(&self, before: &HashMap<Token, &Entry>) -> Option<&Entry> {
        let mut entries = self.queue.entries();
        match self.head {
            Some(head) => entries.find(|e| e.token == head),
            None if entries.len() == 1 => entries.find(|e| !before.contains_key(&e.token)),
            None => None,
        }
    }

    async fn write_lock(
        &self,
        wire: &mut dyn Wire,
        sql: &Statements,
        name: &Name,
        head: Option<&Entry>,
    ) -> Result<(), Failure> {
        let others = self.queue.entries().len() - usize::from(head.is_some());
        let mut args = vec![
            kind_number(self.queue.kind()).into(),
            i64::from(self.queue.capacity()).into(),
            int(self.queue.last_token()),
            int(u64::try_from(others).unwrap_or(0)),
            head.map_or(String::new(), |e| e.id.to_hex()).into(),
        ];
        // The row of a free lock goes on telling of its last holder.
        let last = self.before.first().filter(|e| Some(e.token) == self.head);
        args.extend(head.or(last).map_or_else(nobody, common));
        args.push(Arg::Name(name.as_str().to_owned()));
        one(wire.run(&sql.write_lock, args).await?.affected)
    }
}

fn by_token<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> HashMap<Token, &'a Entry> {
    entries.into_iter().map(|e| (e.token, e)).collect()
}

async fn insert(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
    e: &Entry,
) -> Result<(), Failure> {
    let mut args = vec![Arg::Name(name.as_str().to_owned()), e.id.to_hex().into()];
    args.extend(common(e));
    args.push(e.session.clone().into());
    one(wire.run(&sql.insert_claim, args).await?.affected)
}

async fn delete(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
    e: &Entry,
) -> Result<(), Failure> {
    let name = Arg::Name(name.as_str().to_owned());
    let args = vec![name, int(e.token.get()), time(e.expires.unwrap_or(0))];
    one(wire.run(&sql.delete_claim, args).await?.affected)
}

async fn update(
    wire: &mut dyn Wire,
    sql: &Statements,
    name: &Name,
    old: &Entry,
    e: &Entry,
) -> Result<(), Failure> {
    let end = time(e.expires.unwrap_or(0));
    let mut args = vec![standing_number(e.standing).into(), time(e.since), end];
    args.extend([Arg::Name(name.as_str().to_owned()), int(e.token.get())]);
    let statement = match e.standing {
        Standing::Departed => {
            args.push(time(old.expires.unwrap_or(0)));
            &sql.turn_claim
        }
        Standing::Holding | Standing::Waiting => &sql.extend_claim,
    };
    one(wire.run(statement, args).await?.affected)
}

/// Another than one row: it was renewed meanwhile.
fn one(affected: u64) -> Result<(), Failure> {
    match affected {
        1 => Ok(()),
        _ => Err(Failure::Conflict(sqlx::Error::RowNotFound)),
    }
}

fn differs(a: &Entry, b: &Entry) -> bool {
    (a.standing, a.since, a.expires) != (b.standing, b.since, b.expires)
}
