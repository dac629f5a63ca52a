//! Records a half of a story while it is played.
//!
//! A step begins with the state after the last one. The calls after it change that state:
//! `stage.step(A, …).holds().shows(LOCK, "A")`.

use leasehold::FencingToken;

use crate::scene::{Belief, Cell, Half, Lane, Mark, Step};
use crate::trouble::{Result, Trouble};

/// The text that is shown for empty contents.
pub(crate) const NOTHING: &str = "–";

pub(crate) const fn client(name: &'static str) -> Lane {
    Lane { name, is_client: true }
}

pub(crate) const fn thing(name: &'static str) -> Lane {
    Lane { name, is_client: false }
}

pub(crate) struct Stage {
    half: Half,
    now: Vec<Cell>,
    /// Tokens in the order in which they were granted.
    tokens: Vec<FencingToken>,
}

impl Stage {
    /// Begins the half with the well-known recipe.
    pub(crate) fn naive(recipe: &'static str, lanes: &[Lane]) -> Self {
        Self::new(true, recipe, lanes)
    }

    /// Begins the half with leasehold.
    pub(crate) fn ours(recipe: &'static str, lanes: &[Lane]) -> Self {
        Self::new(false, recipe, lanes)
    }

    fn new(is_naive: bool, recipe: &'static str, lanes: &[Lane]) -> Self {
        let empty = |lane: &Lane| match lane.is_client {
            true => Cell::Client(Belief::Nothing),
            false => Cell::Thing(NOTHING.into()),
        };
        let now = lanes.iter().map(empty).collect();
        let (steps, verdict, is_kept) = (Vec::new(), String::new(), false);
        let half = Half { is_naive, recipe, lanes: lanes.to_vec(), steps, is_kept, verdict };
        Self { half, now, tokens: Vec::new() }
    }

    /// Sets what a lane shows from the beginning.
    pub(crate) fn begins(&mut self, thing: usize, shows: impl Into<String>) {
        self.now[thing] = Cell::Thing(shows.into());
    }

    /// Adds the next step.
    pub(crate) fn step(&mut self, lane: usize, says: impl Into<String>) -> AddedStep<'_> {
        let (says, cells) = (says.into(), self.now.clone());
        self.half.steps.push(Step { lane, says, mark: Mark::Plain, cells });
        AddedStep { stage: self, lane }
    }

    /// Returns the display name of a token: t1, t2, … in the order in which the tokens were
    /// granted. Fails if a token is lower than the last one.
    pub(crate) fn token(&mut self, token: FencingToken) -> Result<String> {
        if self.tokens.last().is_some_and(|last| *last > token) {
            return Err(Trouble::new(format!("token {token} was granted after a higher one")));
        }
        if self.tokens.last() != Some(&token) {
            self.tokens.push(token);
        }
        Ok(format!("t{}", self.tokens.len()))
    }

    /// Ends the half. `is_kept` is whether the lock did its job.
    pub(crate) fn ends(mut self, is_kept: bool, verdict: impl Into<String>) -> Half {
        (self.half.is_kept, self.half.verdict) = (is_kept, verdict.into());
        self.half
    }
}

/// A step that was just added.
pub(crate) struct AddedStep<'a> {
    stage: &'a mut Stage,
    lane: usize,
}

impl AddedStep<'_> {
    pub(crate) fn holds(self) -> Self {
        self.believes(Belief::Holds)
    }

    pub(crate) fn holds_another(self) -> Self {
        self.believes(Belief::HoldsAnother)
    }

    pub(crate) fn waits(self) -> Self {
        self.believes(Belief::Waits)
    }

    pub(crate) fn stands_still(self) -> Self {
        self.believes(Belief::StandsStill)
    }

    pub(crate) fn dies(self) -> Self {
        self.believes(Belief::Dead)
    }

    pub(crate) fn has_nothing(self) -> Self {
        self.believes(Belief::Nothing)
    }

    fn believes(self, belief: Belief) -> Self {
        let lane = self.lane;
        self.puts(lane, Cell::Client(belief))
    }

    /// Sets what a lane shows from this step on.
    pub(crate) fn shows(self, thing: usize, what: impl Into<String>) -> Self {
        let what = what.into();
        let what = if what.is_empty() || what == "nil" { NOTHING.to_owned() } else { what };
        self.puts(thing, Cell::Thing(what))
    }

    pub(crate) fn bad(self) -> Self {
        self.marked(Mark::Bad)
    }

    pub(crate) fn good(self) -> Self {
        self.marked(Mark::Good)
    }

    fn marked(self, mark: Mark) -> Self {
        if let Some(step) = self.stage.half.steps.last_mut() {
            step.mark = mark;
        }
        self
    }

    fn puts(self, lane: usize, cell: Cell) -> Self {
        self.stage.now[lane] = cell;
        if let Some(step) = self.stage.half.steps.last_mut() {
            step.cells.clone_from(&self.stage.now);
        }
        self
    }
}
