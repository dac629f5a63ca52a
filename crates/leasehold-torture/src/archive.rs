//! Reads and writes a history as a file, so that a run can be checked again later or on another
//! machine.
//!
//! A file may come from anyone, so the reader trusts nothing in it. The checker receives only what
//! a run of this program could produce. The first line that violates this is named in the error.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, BufRead};

use super::checker::{Property, Terms};
use super::history::{
    Event, Fault, Final, History, LockSpec, OpId, Resource, Trouble, What, Write,
};
use super::record::{Content, FORMAT, Header, Locks, Preamble, Record, VERSION, clean};
use super::trial::Trial;
use super::wire::line;

/// Maximum number of locks in a history. Each lock costs time even if it has no events.
const MOST_LOCKS: usize = 1_000;

/// Writes the trial and its history.
///
/// # Errors
/// Any error of `out`.
pub(super) fn write(trial: &Trial, history: &History, out: &mut impl io::Write) -> io::Result<()> {
    let header = Header {
        preamble: Preamble { format: FORMAT.into(), version: VERSION },
        trial,
        terms: &trial.terms,
        locks: &history.locks,
    };
    out.write_all(line(&header).as_bytes())?;
    let mut put = |record: Record| out.write_all(line(&record).as_bytes());
    history.events.iter().try_for_each(|event| put(event.into()))?;
    history.writes.iter().try_for_each(|write| put(write.into()))?;
    history.troubles.iter().try_for_each(|trouble| put(trouble.into()))?;
    let deaths: BTreeMap<_, _> = history.deaths.iter().collect();
    deaths
        .iter()
        .try_for_each(|(worker, at)| put(Record::Killed { worker: **worker, at: **at }))?;
    let (crashes, residue) = (history.crashes.iter(), history.residue.iter());
    crashes.cloned().try_for_each(|what| put(Record::Crashed { what }))?;
    residue.cloned().try_for_each(|what| put(Record::Residue { what }))?;
    for (lock, (plain, fenced)) in history.finals.iter().enumerate() {
        for (resource, end) in [(Resource::Plain, plain), (Resource::Fenced, fenced)] {
            let set = end.set.iter().map(|op| (op.worker, op.n)).collect();
            put(Record::Final { lock, resource, value: end.value, set })?;
        }
    }
    put(Record::End { at: history.ended })
}

/// Reads a history that this program or another program wrote.
///
/// # Errors
/// One line that names the first invalid line of the input and the reason.
pub(super) fn read(input: impl BufRead) -> Result<(Trial, History), String> {
    let mut reader: Option<Reader> = None;
    for (number, line) in (1_u64..).zip(input.split(b'\n')) {
        let line = line.map_err(|e| format!("cannot read the line: {e}"))?;
        let outcome = match &mut reader {
            None => Reader::begin(&line).map(|begun| reader = Some(begun)),
            Some(reader) => reader.receive(&line),
        };
        outcome.map_err(|why| clean(&format!("line {number}: {why}")))?;
    }
    let reader =
        reader.ok_or("is empty, not a history (`leasehold stress --history FILE` writes one)")?;
    reader.end().map_err(|why| clean(&why))
}

struct Reader {
    trial: Trial,
    history: History,
    finals: BTreeMap<(usize, bool), Final>,
    /// Resources that were written to, by lock and whether the resource is the fenced one.
    written: BTreeSet<(usize, bool)>,
    lock_of: HashMap<OpId, usize>,
    /// Whether any grant has no token.
    tokenless: bool,
    ended: bool,
}

impl Reader {
    fn begin(line: &[u8]) -> Result<Self, String> {
        let no_header = |e: serde_json::Error| {
            format!("not the header of a history ({e}): expected {{\"format\":\"{FORMAT}\",…")
        };
        let preamble: Preamble = serde_json::from_slice(line).map_err(no_header)?;
        if preamble.format != FORMAT {
            return Err(format!("unknown format {:?}: expected {FORMAT:?}", preamble.format));
        }
        if preamble.version != VERSION {
            let version = preamble.version;
            return Err(format!(
                "unsupported format version {version}: this program reads version {VERSION}"
            ));
        }
        let bad = |e: serde_json::Error| format!("invalid header: {e}");
        let mut trial: Trial = serde_json::from_slice(line).map_err(bad)?;
        trial.terms = serde_json::from_slice(line).map_err(bad)?;
        let Locks { mut locks } = serde_json::from_slice(line).map_err(bad)?;
        if locks.len() > MOST_LOCKS {
            return Err(format!("too many locks: {} (maximum: {MOST_LOCKS})", locks.len()));
        }
        for LockSpec { name, capacity, .. } in &mut locks {
            *name = clean(name);
            if *capacity == 0 {
                return Err(format!("the capacity of lock {name} is 0, so no worker can hold it"));
            }
        }
        if trial.terms.claimed.contains(&Property::Recovery) && trial.terms.recovery_ms.is_none() {
            return Err("the promise \"recovery\" needs recovery_ms".into());
        }
        trial.store = clean(&trial.store);
        trial.command.iter_mut().for_each(|word| *word = clean(word));
        let history = History { locks, ..History::default() };
        Ok(Self {
            trial,
            history,
            finals: BTreeMap::new(),
            written: BTreeSet::new(),
            lock_of: HashMap::new(),
            tokenless: false,
            ended: false,
        })
    }

    fn receive(&mut self, line: &[u8]) -> Result<(), String> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        if self.ended {
            return Err("unexpected line after {\"event\":\"end\",…".into());
        }
        let record: Record = serde_json::from_slice(line).map_err(|e| e.to_string())?;
        match record.into() {
            Content::Event(event) => self.event(event)?,
            Content::Write(write) => self.write(write)?,
            Content::Trouble(trouble) => self.trouble(trouble)?,
            Content::Killed(worker, at) => {
                if self.history.deaths.insert(worker, at).is_some() {
                    return Err(format!("worker {worker} was killed twice"));
                }
            }
            Content::Crashed(what) => self.history.crashes.push(what),
            Content::Residue(what) => self.history.residue.push(what),
            Content::Final(lock, resource, end) => {
                self.lock(lock)?;
                if self.finals.insert((lock, resource == Resource::Fenced), end).is_some() {
                    return Err(format!("duplicate final state for this resource of lock {lock}"));
                }
            }
            Content::End(at) => (self.history.ended, self.ended) = (at, true),
        }
        Ok(())
    }

    fn lock(&self, lock: usize) -> Result<&LockSpec, String> {
        let locks = self.history.locks.len();
        let spec = self.history.locks.get(lock);
        spec.ok_or_else(|| {
            format!("no lock {lock}: the header lists {locks} locks, numbered from 0")
        })
    }

    fn event(&mut self, event: Event) -> Result<(), String> {
        let op = event.op;
        if let What::Invoked { lock, weight, .. } = event.what {
            let capacity = self.lock(lock)?.capacity;
            if weight == 0 || weight > capacity {
                return Err(format!("invalid weight {weight}: must be between 1 and {capacity}"));
            }
            if self.lock_of.insert(op, lock).is_some() {
                return Err(format!("operation {op} was invoked twice"));
            }
        }
        let Some(&lock) = self.lock_of.get(&op) else {
            return Err(format!("operation {op} was never invoked"));
        };
        match event.what {
            What::Acquired { token: 0 } => self.tokenless = true,
            What::Wrote { plain, fenced } => {
                self.written.extend(plain.then_some((lock, false)));
                self.written.extend((fenced == Some(true)).then_some((lock, true)));
            }
            _ => {}
        }
        self.history.events.push(event);
        Ok(())
    }

    fn write(&mut self, write: Write) -> Result<(), String> {
        self.lock(write.lock)?;
        self.tokenless |= write.token == 0;
        self.written.insert((write.lock, write.resource == Resource::Fenced));
        self.history.writes.push(write);
        Ok(())
    }

    fn trouble(&mut self, trouble: Trouble) -> Result<(), String> {
        if trouble.to < trouble.from || trouble.excuses_until < trouble.to {
            return Err("the fault ends before it begins".into());
        }
        if trouble.fault == Some(Fault::Kill) {
            return Err("report a kill as {\"event\":\"killed\",…".into());
        }
        self.history.troubles.push(trouble);
        Ok(())
    }

    fn end(mut self) -> Result<(Trial, History), String> {
        if !self.ended {
            return Err(
                "the history is incomplete: its last line is not {\"event\":\"end\",…".into()
            );
        }
        self.promises_can_be_judged(&self.trial.terms)?;
        let finals = &mut self.finals;
        for lock in 0..self.history.locks.len() {
            let mut end = |fenced| match finals.remove(&(lock, fenced)) {
                // A resource that was never written to is unchanged.
                None if !self.written.contains(&(lock, fenced)) => Ok(Final::default()),
                None => {
                    let which = if fenced { "fenced" } else { "plain" };
                    Err(format!(
                        "the {which} resource of lock {lock} was written to but has no final state"
                    ))
                }
                Some(end) => Ok(end),
            };
            let ends = (end(false)?, end(true)?);
            self.history.finals.push(ends);
        }
        Ok((self.trial, self.history))
    }

    fn promises_can_be_judged(&self, terms: &Terms) -> Result<(), String> {
        let by_token = [Property::TokenOrder, Property::TokenUnique, Property::Effect];
        match by_token.into_iter().find(|property| terms.claimed.contains(property)) {
            Some(property) if self.tokenless => Err(format!(
                "cannot check the promise \"{property}\": some grants or writes have no token"
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
