//! Rows and their values, as statement arguments and as results.

use std::sync::Arc;
use std::time::Duration;

use super::fault::Failure;
use super::wire::{Arg, Cell, Row};
use leasehold_core::queue::Entry;
use leasehold_core::store::ClaimState;
use leasehold_core::{ClaimId, Error, ErrorKind, Holder, Kind, Token};

/// A lock's row.
pub(super) struct LockRow {
    pub(super) kind: Kind,
    pub(super) capacity: u32,
    pub(super) last_token: u64,
    /// The number of claims that have rows of their own.
    pub(super) claims: usize,
    pub(super) head: Option<Entry>,
}

/// Returns the values of the same columns as [`common`], for a row without a claim.
pub(super) fn nobody(token: u64) -> Vec<Arg> {
    let mut args = vec![int(token)];
    args.extend(vec![Arg::Int(0); 5]);
    args.extend(["".into(), 0.into(), "".into()]);
    args
}

/// Returns a claim's values of the columns token, weight, standing, since, expires, lock_delay,
/// host, pid and label.
pub(super) fn common(e: &Entry) -> Vec<Arg> {
    // For a departed claim, `expires` includes the delay. The fast path adds the two.
    let delay = if e.state == ClaimState::Cooldown { 0 } else { e.lock_delay };
    vec![
        int(e.token.get()),
        i64::from(e.weight).into(),
        state_number(e.state).into(),
        time(e.since),
        time(e.expires.unwrap_or(0)),
        time(delay),
        plain(&e.holder.host).into(),
        i64::from(e.holder.pid).into(),
        plain(&e.holder.label).into(),
    ]
}

/// Returns the text without control characters, shortened to fit into a column. A label can be any
/// text.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(256).collect()
}

pub(super) fn int(n: u64) -> Arg {
    Arg::Int(i64::try_from(n).unwrap_or(i64::MAX))
}

/// Returns a time as an argument, limited so that the database can still add another time to it.
pub(super) fn time(n: u64) -> Arg {
    Arg::Int(i64::try_from(n).unwrap_or(i64::MAX).min(i64::MAX / 4))
}

/// Returns a duration in microseconds as an argument, limited like [`time`].
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

pub(super) fn state_number(state: ClaimState) -> i64 {
    match state {
        ClaimState::Waiting => 0,
        ClaimState::Holding => 1,
        ClaimState::Cooldown => 2,
    }
}

pub(super) fn corrupt(what: &str) -> Failure {
    let what = format!("unexpected value in leasehold's tables, in place of {what}");
    let hint = "find the other program that writes to these tables";
    Failure::Final(Error::new(ErrorKind::Corrupt, what).with_hint(hint))
}

/// A row that is read from left to right.
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

    pub(super) fn lock(&mut self) -> Result<LockRow, Failure> {
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
            // Skips the columns from token to label.
            self.0.by_ref().take(9).for_each(drop);
            return Ok(LockRow { kind, capacity, last_token, claims, head: None });
        }
        let head = Some(self.entry(&claim)?);
        Ok(LockRow { kind, capacity, last_token, claims, head })
    }

    /// Reads a claim. Returns `None` if the row contains no claim, as the result of a LEFT JOIN.
    pub(super) fn claim(&mut self) -> Result<Option<Entry>, Failure> {
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
            state: match self.count::<i64>()? {
                0 => ClaimState::Waiting,
                1 => ClaimState::Holding,
                2 => ClaimState::Cooldown,
                _ => return Err(corrupt("a claim's state")),
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
