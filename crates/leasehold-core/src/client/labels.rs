//! The labels of a lock's metrics (feature `metrics`): what kind it is and, if people ask for it, its name.
//!
//! There is no end to names, and each is a series in somebody's database. So only as many as were asked for get
//! a series of their own, those that are used first, and all others share one.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics::{Label, SharedString};

use crate::base::locked::locked;
use crate::words::claim::Kind;
use crate::words::name::Name;

/// What those share that have no series of their own.
const OTHER: &str = "other";

/// How many names have one.
static MOST: AtomicUsize = AtomicUsize::new(0);
/// Which, and of which kinds.
static NAMES: Mutex<Option<HashSet<(Kind, SharedString)>>> = Mutex::new(None);

/// As many as this from now on. Those that have one keep it.
pub(super) fn most(names: usize) {
    MOST.store(names, Ordering::Relaxed);
}

pub(super) fn kind_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Mutex => "mutex",
        Kind::RwLock => "rwlock",
        Kind::Semaphore => "semaphore",
    }
}

/// The labels of one lock's metrics, and whether nobody has been given these before.
pub(super) fn of(kind: Kind, name: Option<&Name>) -> (Vec<Label>, bool) {
    let most = MOST.load(Ordering::Relaxed);
    let label = Label::from_static_parts("kind", kind_of(kind));
    let Some(name) = name.filter(|_| most > 0) else { return (vec![label], false) };
    let (name, is_new) = among(most, kind, name);
    (vec![label, Label::new("name", name)], is_new)
}

fn among(most: usize, kind: Kind, name: &Name) -> (SharedString, bool) {
    let mut names = locked(&NAMES);
    let names = names.get_or_insert_default();
    let one = (kind, SharedString::from(name.as_str().to_owned()));
    if names.contains(&one) {
        return (one.1, false);
    }
    let shared = (kind, SharedString::const_str(OTHER));
    let others = names.iter().filter(|(_, name)| &**name == OTHER).count();
    let one = if names.len() - others < most { one } else { shared };
    (one.1.clone(), names.insert(one))
}
