//! A played story as data: lanes, steps, and what each client believed after each step.

/// A story that was played.
#[derive(Clone, Debug)]
pub struct Played {
    /// With the common recipe.
    pub naive: Half,
    /// With leasehold.
    pub ours: Half,
}

impl Played {
    /// Returns whether the story ended as described: the recipe failed and leasehold worked.
    pub fn is_as_told(&self) -> bool {
        !self.naive.is_kept && self.ours.is_kept
    }
}

/// One of the two halves of a story.
#[derive(Clone, Debug)]
pub struct Half {
    /// Whether this half shows the broken recipe.
    pub is_naive: bool,
    /// How the lock is taken.
    pub recipe: &'static str,
    /// The clients and the contents that are shown.
    pub lanes: Vec<Lane>,
    /// The steps.
    pub steps: Vec<Step>,
    /// Whether the data or the lock is correct at the end.
    pub is_kept: bool,
    /// The result in one sentence.
    pub verdict: String,
}

/// A client, or something whose contents are shown.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// The name of the lane.
    pub name: &'static str,
    /// Whether the lane is a client.
    pub is_client: bool,
}

/// One step.
#[derive(Clone, Debug)]
pub struct Step {
    /// Index of the lane that acts.
    pub lane: usize,
    /// The request and the reply.
    pub says: String,
    /// Whether something goes wrong here.
    pub mark: Mark,
    /// The state of each lane after the step.
    pub cells: Vec<Cell>,
}

impl Step {
    /// Returns how many clients believe that they hold the lock.
    pub fn holders(&self) -> usize {
        let holds =
            |cell: &&Cell| matches!(cell, Cell::Client(Belief::Holds | Belief::StandsStill));
        self.cells.iter().filter(holds).count()
    }

    /// Returns whether more than one client believes that it holds the lock.
    pub fn is_shared(&self) -> bool {
        self.holders() > 1
    }
}

/// Whether something goes wrong in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Nothing unusual.
    Plain,
    /// The recipe fails here.
    Bad,
    /// The recipe would fail here, but leasehold does not.
    Good,
}

/// The state of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// What a client believes.
    Client(Belief),
    /// The contents of a lane that is not a client.
    Thing(String),
}

/// What a client believes about the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belief {
    /// The client does not use the lock.
    Nothing,
    /// The client waits for the lock.
    Waits,
    /// The client believes that it holds the lock.
    Holds,
    /// The client holds a different lock, which does not conflict with other holders.
    HoldsAnother,
    /// The client was paused while it held the lock, and will still believe that it holds the lock
    /// when it resumes.
    StandsStill,
    /// The client has crashed.
    Dead,
}
