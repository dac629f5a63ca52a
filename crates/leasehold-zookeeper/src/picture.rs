//! A lock's queue as the server has it, kept up by its news: begun by a listing, and changed by each child
//! that comes or goes. Pure: no I/O, no clock.
//!
//! # Why it is to be believed
//! - *Nobody is missed.* Every child takes the next number of the lock's node, whoever makes it and
//!   whatever it is called, and the listing tells which is next (its `cversion` counts what came and what
//!   went). So one that came unheard leaves a gap before the next: be it closed to us, of which servers
//!   tell nothing since 3.8.4, or lost for whatever reason. With a gap nothing is believed any more.
//! - *A claim is judged when its own number has come.* Each one before it was seen to come, or had gone
//!   before the listing; nobody is ever put before it. So what is before it can only become less, and a
//!   departure that is heard of late, or never, lets nobody in.
//! - *Old news changes nothing.* What the watch tells of the time before the listing is in the listing: a
//!   number that is past, or the departure of a name that is not there. A name does not come back as long as
//!   the lock's node lives; when that goes, so does the picture, since numbers begin anew.

use super::node::{Children, LATE_SEQUENCE, Naming, Node};

/// The queue, as far as we were told.
#[derive(Debug)]
pub(super) struct Picture {
    naming: Naming,
    pub(super) children: Children,
    /// The number that the next child gets.
    next: i64,
    /// How many of the front hold, as was told last.
    holding: usize,
}

/// What the server tells of one child.
#[derive(Clone, Copy, Debug)]
pub(super) enum News<'a> {
    Came(&'a str),
    Went(&'a str),
}

/// The picture is not to be believed any more: the queue must be listed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unclear;

impl Picture {
    /// Of a listing, and the number that is next. One whose numbers may run out, or that has gaps to come,
    /// is looked at by those who can say so.
    pub(super) fn new(naming: Naming, children: Children, next: i64) -> Result<Self, Unclear> {
        let fits = children.last_sequence() < next && next < LATE_SEQUENCE;
        if !fits || children.is_disordered() {
            return Err(Unclear);
        }
        Ok(Self { naming, children, next, holding: 0 })
    }

    /// Whether everybody up to this number is known.
    pub(super) fn knows(&self, sequence: i64) -> bool {
        sequence < self.next
    }

    /// Takes in what the server told.
    pub(super) fn hear(&mut self, news: News<'_>) -> Result<(), Unclear> {
        match news {
            News::Came(name) => {
                let node = Node::parse(self.naming, name.to_owned()).map_err(|_| Unclear)?;
                let sequence = node.sequence();
                if sequence < self.next {
                    return Ok(());
                }
                if sequence > self.next || sequence >= LATE_SEQUENCE {
                    return Err(Unclear);
                }
                self.next += 1;
                self.children.push(node);
            }
            News::Went(name) => {
                let place = self.children.remove(name);
                self.holding -= usize::from(place.is_some_and(|place| place < self.holding));
            }
        }
        Ok(())
    }

    /// Those who hold by now and were not told before.
    pub(super) fn newly_granted(&mut self) -> &[Node] {
        let before = self.holding;
        self.holding = self.children.holding();
        self.children.nodes().get(before..self.holding).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::node::prefix;
    use super::*;
    use leasehold_core::{Claim, Kind, Name};

    const NAMING: Naming = Naming::Curator;

    fn name(weight: u32, sequence: i64) -> String {
        let claim = Claim::new(Name::new("n").unwrap(), Kind::Semaphore, weight, 6).unwrap();
        format!("{}{sequence:010}", prefix(NAMING, &claim))
    }

    fn listed(names: &[String], next: i64) -> Result<Picture, Unclear> {
        Picture::new(NAMING, Children::order(NAMING, names.to_vec()).unwrap(), next)
    }

    fn names(children: &Children) -> Vec<String> {
        children.nodes().iter().map(|node| node.name.clone()).collect()
    }

    proptest! {
        /// Whoever comes and goes, and wherever in it the listing is made: the picture is the queue, and
        /// everybody is told of the grant once, when it holds.
        #[test]
        fn what_is_told_is_what_is_there(
            steps in proptest::collection::vec((1_u32..=6, any::<proptest::sample::Index>(), any::<bool>()), 1..60),
            watched in 0_usize..20,
            list in 0_usize..20,
        ) {
            let (mut there, mut next, mut history) = (Vec::new(), 0_i64, Vec::new());
            let mut picture: Option<Picture> = None;
            let mut told = Vec::new();
            for (step, (weight, which, comes)) in steps.into_iter().enumerate() {
                if comes || there.is_empty() {
                    let name = name(weight, next);
                    there.push(name.clone());
                    history.push((true, name));
                    next += 1;
                } else {
                    history.push((false, there.remove(which.index(there.len()))));
                }
                // The watch may have begun before the listing was made.
                let from = match picture.is_some() {
                    true => step,
                    false if step == watched + list => {
                        picture = Some(listed(&there, next).unwrap());
                        watched
                    }
                    false => continue,
                };
                let picture = picture.as_mut().unwrap();
                for (came, name) in &history[from..] {
                    let news = if *came { News::Came(name) } else { News::Went(name) };
                    picture.hear(news).unwrap();
                }
                told.extend(picture.newly_granted().iter().map(|node| node.name.clone()));
                prop_assert_eq!(names(&picture.children), there.clone());
                let holding = picture.children.holding();
                for (place, name) in there.iter().enumerate() {
                    let times = told.iter().filter(|told| *told == name).count();
                    prop_assert_eq!(times, usize::from(place < holding), "{}", name);
                }
            }
        }
    }

    #[test]
    fn who_came_unheard_is_found_out_before_anybody_behind_is_judged() {
        let mut picture = listed(&[name(6, 3)], 5).unwrap();
        // From before the listing: it has come and gone.
        assert_eq!(picture.hear(News::Came(&name(6, 4))), Ok(()));
        assert_eq!(picture.hear(News::Came(&name(6, 5))), Ok(()));
        assert!(picture.knows(5) && !picture.knows(6));
        // Number 6 is closed to us.
        assert_eq!(picture.hear(News::Came(&name(6, 7))), Err(Unclear));
    }

    #[test]
    fn what_is_no_claim_or_late_is_for_those_who_list() {
        let mut picture = listed(&[], 0).unwrap();
        assert_eq!(picture.hear(News::Came("leases")), Err(Unclear));
        assert_eq!(listed(&[], LATE_SEQUENCE).unwrap_err(), Unclear);
        assert_eq!(listed(&[name(1, 7)], 7).unwrap_err(), Unclear);
        let mut picture = listed(&[], LATE_SEQUENCE - 1).unwrap();
        assert_eq!(picture.hear(News::Came(&name(1, LATE_SEQUENCE - 1))), Ok(()));
        assert_eq!(picture.hear(News::Came(&name(1, LATE_SEQUENCE))), Err(Unclear));
    }
}
