//! Measures how soon the next waiter holds after `kill -9` of a holding process. This waits only
//! for the kernel's own work, which ends the process, closes its files and wakes the waiter.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::measure::{
    Effort, Measured, Result, Subject, alternate, digits, duration, now, percentile, table,
};
use crate::raw::Flock;
use crate::scratch::Scratch;

pub(crate) fn file(effort: Effort) -> Result<()> {
    let scratch = Scratch::new()?;
    let locks = leasehold::blocking::connect(scratch.url())?;
    let bare = || {
        let wait = || Ok(Flock::open(scratch.path())?.with(now)?);
        kills(effort, "flock", scratch.path(), wait, || Ok(()))
    };
    let ours = || {
        let wait = || {
            let guard = locks.mutex("kill").lock()?;
            let held = now();
            guard.release()?;
            Ok(held)
        };
        let queued = || {
            while locks.inspect("kill")?.is_none_or(|info| info.waiters().count() == 0) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        kills(effort, "leasehold", scratch.path(), wait, queued)
    };
    let subjects = vec![Subject::new("flock", bare), Subject::new("leasehold", ours)];
    show(&alternate(effort, subjects)?);
    Ok(())
}

/// Measures the nanoseconds from each kill to the next hold.
fn kills(
    effort: Effort,
    subject: &str,
    dir: &Path,
    wait: impl Fn() -> Result<u64> + Sync,
    queued: impl Fn() -> Result<()>,
) -> Result<Vec<f64>> {
    let one = |_| {
        let mut holder = holder(subject, dir)?;
        let handover = std::thread::scope(|scope| -> Result<f64> {
            let waiter = scope.spawn(&wait);
            queued()?;
            // This lets the waiter fall asleep. Its place in the queue does not show whether it
            // sleeps yet.
            std::thread::sleep(Duration::from_millis(5));
            let killed = now();
            holder.kill()?;
            let held = waiter.join().map_err(|_| "the waiter panicked")??;
            Ok(held.saturating_sub(killed) as f64)
        });
        holder.wait()?;
        handover
    };
    (0..effort.kills).map(one).collect()
}

/// Starts this program as a holder, and returns when it holds the lock.
fn holder(subject: &str, dir: &Path) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["hold", subject]).arg(dir);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    child.stdout.as_mut().ok_or("no pipe")?.read_exact(&mut [0])?;
    Ok(child)
}

/// Runs a holder in a process of its own, until it is killed or its parent is gone.
pub(crate) fn child(subject: &str, dir: &Path) -> Result<()> {
    let until_killed = || -> Result<()> {
        std::io::stdout().write_all(b"h")?;
        std::io::stdout().flush()?;
        std::io::stdin().read_to_end(&mut Vec::new())?;
        Ok(())
    };
    if subject == "flock" {
        return Flock::open(dir)?.with(until_killed)?;
    }
    let guard = leasehold::blocking::connect(Scratch::url_in(dir))?.mutex("kill").lock()?;
    until_killed()?;
    Ok(guard.release().map(drop)?)
}

fn show(measured: &[Measured<'_, Vec<f64>>]) {
    let raw = &measured[0];
    let p50 = |kills: &Vec<f64>| percentile(kills.clone(), 0.5);
    let row = |m: &Measured<'_, Vec<f64>>| {
        let all = m.rounds.concat();
        let at = |share| duration(percentile(all.clone(), share));
        vec![
            m.name.to_owned(),
            all.len().to_string(),
            at(0.5),
            digits(m.ratio(raw, p50)),
            at(0.99),
            at(1.0),
        ]
    };
    let head = ["", "kills", "hand-over p50", "of raw", "p99", "longest"];
    table("file:, kill -9 of the holding process", &head, measured.iter().map(row).collect());
}
