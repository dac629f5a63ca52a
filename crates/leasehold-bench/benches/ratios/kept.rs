//! The results of this run, which are printed at its end and optionally saved in a folder.
//!
//! `--keep crates/leasehold-bench/benches/results` writes three things there: the tables of each
//! part that was run (`redis.md`), the figures of all parts (`figures.tsv`), and the picture made
//! from them (`hand-over.svg`). The page about benchmarks begins with a table of the same figures.
//! A test compares the page and the picture with them.

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

/// Ends a part. Writes its tables, with the command that produced them.
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

/// Ends the run, after all parts.
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
    // The table has more than its head.
    if table.lines().count() > 2 {
        println!("\n### At a glance\n\n{table}");
    }
    Ok(())
}
