//! What this run has shown: told at its end, and kept in a folder if that is wanted.
//!
//! `--keep crates/leasehold-bench/benches/results` writes there, of each part that was run, its tables (`redis.md`), the figures of
//! all parts (`figures.tsv`), and the picture that is made of these (`hand-over.svg`). The page about benchmarks
//! begins with a table of the same figures; a test holds it, and the picture, to them.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::figures::{Figures, Kind};
use crate::glance;
use crate::measure::{Effort, Result};

struct Shown {
    figures: Option<Figures>,
    tables: String,
}

static SHOWN: Mutex<Shown> = Mutex::new(Shown { figures: None, tables: String::new() });

fn shown() -> MutexGuard<'static, Shown> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn keep(kind: Kind, table: &str, subject: &str, rounds: Vec<f64>) {
    shown().figures.get_or_insert_default().note(kind, table, subject, rounds);
}

pub(crate) fn keep_table(table: &str) {
    shown().tables.push_str(table);
}

/// One part has ended: its tables are written, and by which command.
pub(crate) fn end_part(
    part: &str,
    command: &str,
    effort: Effort,
    folder: Option<&Path>,
) -> Result<()> {
    let tables = std::mem::take(&mut shown().tables);
    let Some(folder) = folder else { return Ok(()) };
    std::fs::create_dir_all(folder)?;
    let cores = std::thread::available_parallelism()?;
    let head = format!(
        "# {part}\n\nPrinted by `cargo bench {command} --keep crates/leasehold-bench/benches/results`: {cores} cores, {} rounds of {:?} each.\n",
        effort.rounds, effort.time
    );
    Ok(std::fs::write(folder.join(format!("{part}.md")), head + &tables)?)
}

/// All parts have ended.
pub(crate) fn end(folder: Option<&Path>) -> Result<()> {
    let mut figures = shown().figures.take().unwrap_or_default();
    if let Some(folder) = folder {
        let file = folder.join("figures.tsv");
        if file.exists() {
            figures = figures.or(Figures::parse(&std::fs::read_to_string(&file)?)?);
        }
        std::fs::write(&file, figures.to_string())?;
        std::fs::write(folder.join("hand-over.svg"), glance::picture(&figures))?;
    }
    let table = glance::table(&figures);
    // More than its head.
    if table.lines().count() > 2 {
        println!("\n### At a glance\n\n{table}");
    }
    Ok(())
}
