//! A program in another language that measures its own lock library. It reads one line per task and
//! prints the figures.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::contention::Outcome;
use crate::measure::{Effort, Result};

pub(crate) struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("no input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        Ok(Self { child, input, output })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err("the other program has ended; it says above why".into()),
            _ => Ok(line),
        }
    }

    /// Returns the nanoseconds of one acquire and release.
    pub(crate) fn pair(&mut self, effort: Effort) -> Result<f64> {
        writeln!(self.input, "pair {}", effort.time.as_secs_f64() / 2.0)?;
        Ok(self.line()?.trim().parse()?)
    }

    /// Runs this many contenders and returns the outcome.
    pub(crate) fn contend(&mut self, n: usize, effort: Effort) -> Result<Outcome> {
        writeln!(self.input, "contend {} {n}", effort.time.as_secs_f64())?;
        let mut notes = Vec::new();
        for _ in 0..n {
            let mine: Result<Vec<u64>, _> =
                self.line()?.split_whitespace().map(str::parse).collect();
            notes.push(mine?);
        }
        Ok(Outcome::of(&notes, effort.time))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
