//! One lock's queue, read out of its rows and written back into them.
//!
//! The first in the queue lives in the lock's own row if it came when nobody else was there; all
//! others live in rows of their own. Nobody ever moves from one to the other.

use std::collections::HashMap;
use std::time::Duration;

use super::fault::Failure;
use super::rows::{Cells, LockRow, common, corrupt, int, kind_number, standing_number, time};
use super::statements::Statements;
use super::wire::{Arg, Row, Wire};
use crate::claim::{Claim, ClaimId};
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
    head: Option<ClaimId>,
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
        let head = lock.head.as_ref().map(|e| e.id);
        let before: Vec<Entry> = lock.head.into_iter().chain(claims).collect();
        let queue = Queue::restored(lock.kind, lock.capacity, lock.last_token, before.clone());
        Self { queue, now, head, before, last_before: lock.last_token }
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

    /// Writes what changed. The lock's row is ours alone since it was read; a claim's row may have
    /// been renewed meanwhile, so what ends or shortens a place checks that it was not.
    pub(super) async fn save(
        &self,
        wire: &mut dyn Wire,
        sql: &Statements,
        name: &Name,
    ) -> Result<(), Failure> {
        let queue = &self.queue;
        let after: HashMap<ClaimId, &Entry> = queue.entries().map(|e| (e.id, e)).collect();
        let before: HashMap<ClaimId, &Entry> = self.before.iter().map(|e| (e.id, e)).collect();
        let alone = queue.entries().len() == 1;
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
        if changed {
            let others = queue.entries().len() - usize::from(head.is_some());
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
            one(wire.run(&sql.write_lock, args).await?.affected)?;
        }
        let in_rows = |e: &&Entry| Some(e.id) != self.head && Some(e.id) != head_id;
        for e in self.before.iter().filter(|e| Some(e.id) != self.head) {
            if !after.contains_key(&e.id) {
                let args = vec![name(), int(e.token.get()), time(e.expires.unwrap_or(0))];
                one(wire.run(&sql.delete_claim, args).await?.affected)?;
            }
        }
        for e in queue.entries().filter(in_rows) {
            let Some(old) = before.get(&e.id) else {
                let mut args = vec![name(), e.id.to_hex().into()];
                args.extend(common(e));
                args.push(e.session.clone().into());
                one(wire.run(&sql.insert_claim, args).await?.affected)?;
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
            one(wire.run(statement, args).await?.affected)?;
        }
        Ok(())
    }
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
