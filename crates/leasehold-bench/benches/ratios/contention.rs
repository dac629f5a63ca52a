//! Measures contention: many contenders want one lock and do nothing with it. The results are how
//! fast it is handed over, and how fairly.
//!
//! Each contender acquires the lock, records the time, releases it and requests it again
//! immediately, while the window is open. All results are derived from these times, merged in
//! order. A *hand-over* is the time from one record to the next, if that is another contender's. It
//! covers the release, the wake-up and the acquisition. Without a queue, the lock is mostly
//! acquired again by the contender that just released it. The share of turns that changed hands
//! shows how often it was not.

use std::future::Future;
use std::io::{Read, Write};
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use leasehold::{Mutex, blocking};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::figures::Kind;
use crate::measure::{
    Effort, Measured, Result, Subject, alternate, digits, duration, jain, keep, now, percentile,
    rate, table,
};
use crate::raw::{Flock, Ring};
use crate::scratch::Scratch;

const CONTENDERS: [usize; 3] = [2, 8, 32];

/// Measures tasks on two threads, compared with tokio's mutex, which is also first come, first
/// served.
pub(crate) fn memory(effort: Effort) -> Result<()> {
    let runtime = two_threads()?;
    let locks = runtime.block_on(leasehold::connect("memory:contention"))?;
    let lock = Arc::new(locks.mutex("contention"));
    let raw = Arc::new(tokio::sync::Mutex::new(()));
    let turn = |raw: Arc<tokio::sync::Mutex<()>>| async move {
        let _held = raw.lock().await;
        Ok(now())
    };
    for n in CONTENDERS {
        let bare = || runtime.block_on(tasks(n, effort, &raw, turn));
        let ours = || runtime.block_on(tasks(n, effort, &lock, one_turn));
        let subjects =
            vec![Subject::new("tokio::sync::Mutex", bare), Subject::new("leasehold", ours)];
        show(&format!("memory:, {n} tasks on two threads"), &alternate(effort, subjects)?, 1);
    }
    Ok(())
}

/// Measures tasks on two threads, compared with as many threads that flock a descriptor each.
pub(crate) fn file_in_one_process(effort: Effort) -> Result<()> {
    let runtime = two_threads()?;
    let scratch = Scratch::new()?;
    let locks = runtime.block_on(leasehold::connect(scratch.url()))?;
    let lock = Arc::new(locks.mutex("contention"));
    for n in CONTENDERS {
        let bare = || threads(n, effort, scratch.path());
        let ours = || runtime.block_on(tasks(n, effort, &lock, one_turn));
        let subjects = vec![Subject::new("flock, threads", bare), Subject::new("leasehold", ours)];
        show(&format!("file:, {n} contenders in one process"), &alternate(effort, subjects)?, 1);
    }
    Ok(())
}

/// Measures processes, compared with as many that flock, and as many that pass a byte around.
pub(crate) fn file_in_processes(effort: Effort) -> Result<()> {
    let scratch = Scratch::new()?;
    for n in CONTENDERS {
        // Each round has its own directory, so that bytes left in the FIFOs of the last round do
        // not circulate in this one.
        let ring = || processes(n, effort, "ring", Scratch::new()?.path());
        let bare = || processes(n, effort, "flock", scratch.path());
        let ours = || processes(n, effort, "leasehold", scratch.path());
        let subjects = vec![
            Subject::new("flock", bare),
            Subject::new("ring", ring),
            Subject::new("leasehold", ours),
        ];
        show(&format!("file:, {n} processes"), &alternate(effort, subjects)?, 2);
    }
    Ok(())
}

/// The time during which all contenders take part.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    pub(crate) from: u64,
    pub(crate) until: u64,
}

impl Window {
    /// Returns a window that opens when all contenders have had time to start.
    pub(crate) fn next(effort: Effort) -> Self {
        let nanos = |d: Duration| d.as_nanos() as u64;
        let from = now() + nanos(Duration::from_millis(20));
        Self { from, until: from + nanos(effort.time) }
    }

    pub(crate) fn opens_in(self) -> Duration {
        Duration::from_nanos(self.from.saturating_sub(now()))
    }
}

pub(crate) async fn one_turn(lock: Arc<Mutex>) -> Result<u64> {
    let guard = lock.lock().await?;
    let note = now();
    guard.release().await?;
    Ok(note)
}

async fn tasks<L, F>(
    n: usize,
    effort: Effort,
    lock: &Arc<L>,
    turn: fn(Arc<L>) -> F,
) -> Result<Outcome>
where
    L: Send + Sync + 'static,
    F: Future<Output = Result<u64>> + Send + 'static,
{
    let window = Window::next(effort);
    let mut running = JoinSet::new();
    for _ in 0..n {
        running.spawn(contend(window, lock.clone(), turn));
    }
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    Ok(Outcome::of(&notes?, effort.time))
}

pub(crate) async fn contend<L, F>(
    window: Window,
    lock: Arc<L>,
    turn: fn(Arc<L>) -> F,
) -> Result<Vec<u64>>
where
    F: Future<Output = Result<u64>>,
{
    tokio::time::sleep(window.opens_in()).await;
    let mut notes = Vec::new();
    loop {
        match turn(lock.clone()).await? {
            note if note < window.until => notes.push(note),
            _ => return Ok(notes),
        }
    }
}

type Turning = Pin<Box<dyn Future<Output = Result<u64>> + Send>>;
/// Acquires the lock, records the time and releases it.
pub(crate) type Turn = Box<dyn Fn() -> Turning + Send>;

/// Runs all contenders while the window is open.
pub(crate) async fn each(effort: Effort, turns: Vec<Turn>) -> Result<Outcome> {
    let window = Window::next(effort);
    let mut running = JoinSet::new();
    for turn in turns {
        running.spawn(async move {
            tokio::time::sleep(window.opens_in()).await;
            let mut notes = Vec::new();
            loop {
                match turn().await? {
                    note if note < window.until => notes.push(note),
                    _ => return Ok(notes),
                }
            }
        });
    }
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    Ok(Outcome::of(&notes?, effort.time))
}

fn threads(n: usize, effort: Effort, dir: &Path) -> Result<Outcome> {
    let window = Window::next(effort);
    let contend = || -> Result<Vec<u64>> {
        let lock = Flock::open(dir)?;
        turns(window, || Ok(lock.with(now)?))
    };
    let notes: Result<Vec<_>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..n).map(|_| scope.spawn(contend)).collect();
        running.into_iter().map(|t| t.join().map_err(|_| "a contender panicked")?).collect()
    });
    Ok(Outcome::of(&notes?, effort.time))
}

/// Takes turns on a blocking lock while the window is open.
fn turns(window: Window, turn: impl Fn() -> Result<u64>) -> Result<Vec<u64>> {
    std::thread::sleep(window.opens_in());
    let mut notes = Vec::new();
    loop {
        match turn()? {
            note if note < window.until => notes.push(note),
            _ => return Ok(notes),
        }
    }
}

/// Starts this program `n` times, opens the window when all are ready, and collects their records.
fn processes(n: usize, effort: Effort, subject: &str, dir: &Path) -> Result<Outcome> {
    let start = |me: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["contend", subject, &me.to_string(), &n.to_string()]).arg(dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
    };
    let mut children: Vec<Child> = (0..n).map(start).collect::<std::io::Result<_>>()?;
    for child in &mut children {
        child.stdout.as_mut().ok_or("no pipe")?.read_exact(&mut [0])?;
    }
    let window = Window::next(effort);
    for child in &mut children {
        let mut pipe = child.stdin.take().ok_or("no pipe")?;
        pipe.write_all(&[window.from.to_le_bytes(), window.until.to_le_bytes()].concat())?;
    }
    let mut notes = Vec::new();
    for mut child in children {
        let mut bytes = Vec::new();
        child.stdout.take().ok_or("no pipe")?.read_to_end(&mut bytes)?;
        notes.push(bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect());
        if !child.wait()?.success() {
            return Err("a contender failed; it says above why".into());
        }
    }
    Ok(Outcome::of(&notes, effort.time))
}

/// Runs a contender in a process of its own.
pub(crate) fn child(subject: &str, me: &str, of: &str, dir: &Path) -> Result<()> {
    let take: Box<dyn Fn() -> Result<u64>> = match subject {
        "ring" => {
            let ring = Ring::open(dir, me.parse()?, of.parse()?)?;
            if me == "0" {
                ring.start()?;
            }
            Box::new(move || Ok(ring.with(now)?))
        }
        "flock" => {
            let lock = Flock::open(dir)?;
            Box::new(move || Ok(lock.with(now)?))
        }
        _ => {
            let lock = blocking::connect(Scratch::url_in(dir))?.mutex("contention");
            Box::new(move || {
                let guard = lock.lock()?;
                let note = now();
                guard.release()?;
                Ok(note)
            })
        }
    };
    let (mut from, mut until) = ([0; 8], [0; 8]);
    std::io::stdout().write_all(b"r")?;
    std::io::stdout().flush()?;
    std::io::stdin().read_exact(&mut from)?;
    std::io::stdin().read_exact(&mut until)?;
    let window = Window { from: u64::from_le_bytes(from), until: u64::from_le_bytes(until) };
    let notes: Vec<u8> = turns(window, take)?.into_iter().flat_map(u64::to_le_bytes).collect();
    Ok(std::io::stdout().write_all(&notes)?)
}

/// The result of one window.
pub(crate) struct Outcome {
    pub(crate) turns_per_second: f64,
    pub(crate) handover_p50: f64,
    pub(crate) handover_p99: f64,
    changed_hands: f64,
    pub(crate) jain: f64,
    /// Turns in the last sixtieth of the time, relative to those in the first.
    #[allow(dead_code, reason = "read where a database is measured for a minute")]
    pub(crate) kept_up: f64,
    /// Statements that a server received per turn, if they were counted.
    pub(crate) statements_per_turn: f64,
}

impl Outcome {
    pub(crate) fn of(notes: &[Vec<u64>], time: Duration) -> Self {
        let shares: Vec<f64> = notes.iter().map(|n| n.len() as f64).collect();
        let tagged = |(who, notes): (usize, &Vec<u64>)| {
            notes.iter().map(|note| (*note, who)).collect::<Vec<_>>()
        };
        let mut all: Vec<(u64, usize)> = notes.iter().enumerate().flat_map(tagged).collect();
        all.sort_unstable();
        let changed = all.windows(2).filter(|pair| pair[0].1 != pair[1].1);
        let handovers: Vec<f64> = changed.map(|pair| (pair[1].0 - pair[0].0) as f64).collect();
        Self {
            turns_per_second: all.len() as f64 / time.as_secs_f64(),
            changed_hands: handovers.len() as f64 / all.len().saturating_sub(1) as f64,
            jain: jain(&shares),
            kept_up: kept_up(&all),
            handover_p50: percentile(handovers.clone(), 0.50),
            handover_p99: percentile(handovers, 0.99),
            statements_per_turn: 0.0,
        }
    }
}

fn kept_up(all: &[(u64, usize)]) -> f64 {
    let (Some((first, _)), Some((last, _))) = (all.first(), all.last()) else { return f64::NAN };
    let part = (last - first) / 60;
    let early = all.iter().filter(|(note, _)| *note <= first + part).count();
    let late = all.iter().filter(|(note, _)| *note >= last - part).count();
    late as f64 / early as f64
}

/// Prints the results. The first `raws` subjects are the references for the others.
pub(crate) fn show(title: &str, measured: &[Measured<'_, Outcome>], raws: usize) {
    keep(Kind::HandOver, title, measured, |outcome| outcome.handover_p50);
    show_only(title, measured, raws);
}

/// Prints the results, but does not keep them for the overview of all stores.
pub(crate) fn show_only(title: &str, measured: &[Measured<'_, Outcome>], raws: usize) {
    let raws = &measured[..raws];
    let against: Vec<String> = raws.iter().map(|raw| format!("of {}", raw.name)).collect();
    let against = || against.iter().map(String::as_str);
    let mut head = vec!["", "turns/s"];
    head.extend(against());
    head.extend(["changed hands", "Jain", "hand-over p50"]);
    head.extend(against());
    head.push("p99");
    let counted = measured.iter().any(|m| m.median(|o| o.statements_per_turn) > 0.0);
    head.extend(counted.then_some("statements/turn"));
    let row = |m: &Measured<'_, Outcome>| {
        let of =
            |figure: fn(&Outcome) -> f64| raws.iter().map(move |raw| digits(m.ratio(raw, figure)));
        let mut row = vec![m.name.to_owned(), rate(m.median(|o| o.turns_per_second))];
        row.extend(of(|o| o.turns_per_second));
        row.push(format!("{:.0} %", 100.0 * m.median(|o| o.changed_hands)));
        row.push(format!("{:.3}", m.median(|o| o.jain)));
        row.push(duration(m.median(|o| o.handover_p50)));
        row.extend(of(|o| o.handover_p50));
        row.push(duration(m.median(|o| o.handover_p99)));
        let statements = m.median(|o| o.statements_per_turn);
        let shown = if statements > 0.0 { digits(statements) } else { "–".into() };
        row.extend(counted.then_some(shown));
        row
    };
    table(title, &head, measured.iter().map(row).collect());
}

fn two_threads() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}
