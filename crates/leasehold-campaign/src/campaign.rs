//! Runs one piece after another, until there are enough results or the time is over.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use testbed::Disk;

use crate::asked::Asked;
use crate::faults::Faults;
use crate::piece::{Piece, next, pieces};
use crate::run::{Outcome, Run};
use crate::state::State;
use crate::store::Store;
use crate::table::{ENOUGH_FAULTS, ENOUGH_OPERATIONS};

/// Maximum time that torture may take in addition to its run. It ends its workers, waits until the
/// store is empty, and checks the history.
const PATIENCE: Duration = Duration::from_secs(240);

/// The parameters of a campaign.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The `leasehold` program that runs torture.
    pub program: PathBuf,
    /// The stores.
    pub stores: Vec<Store>,
    /// Time limit. A piece that would not end within it is not begun.
    pub time: Duration,
    /// Duration of a piece. Pieces on fast stores take four times that, up to two minutes.
    pub piece: Duration,
    /// Directory for the histories of runs that broke a promise.
    pub keep: PathBuf,
    /// Whether each piece and its result is printed on standard error.
    pub is_told: bool,
}

/// Why a campaign has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// There are enough operations and faults, and each piece has run.
    Enough,
    /// The time is over.
    Time,
}

impl Campaign {
    /// Continues from where the state says that the campaign stopped.
    ///
    /// # Errors
    /// - The state cannot be written.
    /// - The directory for histories cannot be created.
    pub fn go_on(&self, state: &mut State) -> Result<Ended, String> {
        let end = Instant::now() + self.time;
        let pieces = pieces(&self.stores);
        std::fs::create_dir_all(&self.keep).map_err(|e| format!("{}: {e}", self.keep.display()))?;
        loop {
            if is_enough(&pieces, state.runs()) {
                return Ok(Ended::Enough);
            }
            let piece = next(&pieces, state.runs());
            let fits = |piece: &Piece| Instant::now() + self.time_of(*piece) <= end;
            let Some(piece) = piece.filter(fits) else {
                return Ok(Ended::Time);
            };
            let number = state.runs().len() + 1;
            self.print(&format!("run {number}: {piece} …"));
            let run = state.add(self.run(piece, number))?;
            let came = format!(
                "    {:?}: {} operations, {} faults {}",
                run.outcome,
                run.operations,
                run.faults_injected(),
                run.notes.join("; ")
            );
            self.print(&came);
        }
    }

    fn time_of(&self, piece: Piece) -> Duration {
        piece.store.time(piece.faults, self.piece)
    }

    fn print(&self, what: &str) {
        if self.is_told {
            eprintln!("{what}");
        }
    }

    /// Runs one piece. Any error becomes part of the result.
    fn run(&self, piece: Piece, number: usize) -> Run {
        let (_, locks) = piece.store.size();
        let mut run = Run {
            run: number,
            at: String::new(),
            store: piece.store.name().into(),
            version: piece.end().into(),
            server: String::new(),
            faults: piece.faults.to_string(),
            outcome: Outcome::Failed,
            notes: Vec::new(),
            seconds: 0,
            clients: 0,
            locks: locks.into(),
            lease_ms: 0,
            seed: 0,
            operations: 0,
            grants: 0,
            lost_holds: 0,
            injected: Default::default(),
            unanswered: 0,
            late_refused: 0,
            unfenced_spoilt: 0,
            promises: Default::default(),
        };
        // Servers that do not start panic with their log. A thread of its own catches the panic.
        let (server, report) = std::thread::scope(|scope| {
            let server = scope.spawn(|| piece.store.server_name(piece.version)).join();
            let report = scope.spawn(|| self.torture(piece, number)).join();
            (server, report.unwrap_or_else(|panic| Err(panic_message(panic.as_ref()))))
        });
        run.server = server.unwrap_or_default();
        let learnt = report.and_then(|report| run.learn(&report));
        if let Err(why) = learnt {
            run.outcome = Outcome::Failed;
            run.notes = vec![why.lines().next().unwrap_or_default().to_owned()];
        }
        run.at = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        run
    }

    /// Runs torture for a piece and returns its report. The history is kept if a promise was
    /// broken.
    fn torture(&self, piece: Piece, number: usize) -> Result<Value, String> {
        let directory = tempfile::tempdir().map_err(|e| e.to_string())?;
        let history = self.keep.join(format!("run-{number}.jsonl"));
        let (store, faults) = (piece.store, piece.faults);
        let report = if matches!(faults, Faults::Servers | Faults::Outage) {
            let disk = (faults == Faults::Outage).then(Disk::new);
            let mut servers =
                store.breakable(piece.version, disk, &self.program).ok_or("it has no servers")?;
            let asked = Asked::new();
            let mut words = self.words(piece, servers.url(), &history);
            words.extend(asked.words());
            asked.serve(&mut servers, || self.report(&words, self.time_of(piece), directory.path()))
        } else {
            let calm = store.calm(piece.version, directory.path(), &self.program);
            let words = self.words(piece, &calm.url, &history);
            self.report(&words, self.time_of(piece), directory.path())
        };
        if !report.as_ref().is_ok_and(|report| report["verdict"] == "violated") {
            let _ = std::fs::remove_file(&history);
        }
        report
    }

    /// Returns the arguments for torture.
    fn words(&self, piece: Piece, url: &str, history: &Path) -> Vec<String> {
        let Piece { store, faults, .. } = piece;
        let fault = match faults {
            Faults::All | Faults::Clocks => None,
            Faults::Servers | Faults::Outage => Some(store.beside_servers()),
            Faults::Pause => Some("pause"),
            Faults::Kill => Some("kill"),
            Faults::Cut => Some("cut"),
            Faults::Stale => Some("stale"),
        };
        let (clients, locks) = store.size();
        let always = [
            ("--store", url.to_owned()),
            ("--seconds", self.time_of(piece).as_secs().max(1).to_string()),
            ("--clients", clients.to_string()),
            ("--locks", locks.to_string()),
            // As many faults as possible, while at most half of the processes have one.
            ("--fault-every", "10ms".into()),
            ("--history", history.display().to_string()),
        ];
        let fault = fault.map(|fault| ("--fault", fault.to_owned()));
        let lease = store.lease(faults).map(|lease| ("--lease", lease.to_owned()));
        let skew = (faults == Faults::Clocks).then(|| ("--clock-skew", "1h".to_owned()));
        let options = always.into_iter().chain(fault).chain(lease).chain(skew);
        let words = options.flat_map(|(name, value)| [name.to_owned(), value]);
        ["torture", "--json"].map(String::from).into_iter().chain(words).collect()
    }

    /// Runs torture to its end, or kills it when it is overdue.
    fn report(&self, words: &[String], time: Duration, directory: &Path) -> Result<Value, String> {
        let (out, err) = (directory.join("report"), directory.join("errors"));
        let file = |path: &Path| File::create(path).map_err(|e| e.to_string());
        let mut command = Command::new(&self.program);
        command.args(words).env_remove("LEASEHOLD_STORE").stdin(Stdio::null());
        command.stdout(file(&out)?).stderr(file(&err)?);
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", self.program.display()))?;
        let end = Instant::now() + time + PATIENCE;
        let status = loop {
            match child.try_wait().map_err(|e| e.to_string())? {
                Some(status) => break status,
                None if Instant::now() >= end => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("torture did not end within {:?}", time + PATIENCE));
                }
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        serde_json::from_str(&read(&out))
            .map_err(|_| format!("torture ended without a report, {status}: {}", read(&err).trim()))
    }
}

fn is_enough(pieces: &[Piece], runs: &[Run]) -> bool {
    let shows = |run: &Run| matches!(run.outcome, Outcome::Fine | Outcome::Violated);
    let has_run = |piece: &Piece| runs.iter().any(|run| piece.is_of(run) && shows(run));
    let operations: u64 = runs.iter().map(|run| run.operations).sum();
    let faults: u64 = runs.iter().map(Run::faults_injected).sum();
    operations >= ENOUGH_OPERATIONS && faults >= ENOUGH_FAULTS && pieces.iter().all(has_run)
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}
