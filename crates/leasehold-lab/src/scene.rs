//! What was played, as data: lanes, steps, and what each client believed after each step.

/// A story, played.
#[derive(Clone, Debug)]
pub struct Played {
    /// With the recipe that people know.
    pub naive: Half,
    /// With leasehold.
    pub ours: Half,
}

impl Played {
    /// Whether it ended as it is told: the recipe broke its promise, and leasehold kept it.
    pub fn is_as_told(&self) -> bool {
        !self.naive.is_kept && self.ours.is_kept
    }
}

/// One of the two ways in which a story goes.
#[derive(Clone, Debug)]
pub struct Half {
    /// Whether it is the recipe that must not be copied.
    pub is_naive: bool,
    /// What locks are taken with.
    pub recipe: &'static str,
    /// Who takes part.
    pub lanes: Vec<Lane>,
    /// What happened.
    pub steps: Vec<Step>,
    /// Whether what a lock is for was kept.
    pub is_kept: bool,
    /// How it ended.
    pub verdict: String,
}

/// Somebody or something that takes part.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// What it is called.
    pub name: &'static str,
    /// A client, which believes things; else something that is looked at.
    pub is_client: bool,
}

/// One step of one of them.
#[derive(Clone, Debug)]
pub struct Step {
    /// Whose step it is.
    pub lane: usize,
    /// What was done, and what was answered.
    pub says: String,
    /// How it is to be taken.
    pub mark: Mark,
    /// How things are behind it, for each lane.
    pub cells: Vec<Cell>,
}

impl Step {
    /// How many clients believe that they hold the lock.
    pub fn holders(&self) -> usize {
        let holds =
            |cell: &&Cell| matches!(cell, Cell::Client(Belief::Holds | Belief::StandsStill));
        self.cells.iter().filter(holds).count()
    }

    /// Whether more than one client believes that it holds the lock.
    pub fn is_shared(&self) -> bool {
        self.holders() > 1
    }
}

/// How a step is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It is what anybody would expect.
    Plain,
    /// Here it goes wrong.
    Bad,
    /// Here it would have gone wrong, and does not.
    Good,
}

/// How things are in one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// What a client believes.
    Client(Belief),
    /// What something shows that is looked at.
    Thing(String),
}

/// What a client believes of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belief {
    /// It has nothing to do with it.
    Nothing,
    /// It waits for it.
    Waits,
    /// It holds it.
    Holds,
    /// It holds another one, beside which others may hold theirs.
    HoldsAnother,
    /// It was stopped while it held, and will believe that it holds when it goes on.
    StandsStill,
    /// It is dead.
    Dead,
}
