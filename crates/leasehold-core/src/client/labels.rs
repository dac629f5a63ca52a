//! The labels of a lock's metrics (feature `metrics`): its kind and, if configured, its name.
//!
//! The number of names is unlimited, and each is a time series in the metrics database. So only the
//! configured number of names get series of their own, in the order of first use. All others share
//! one.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics::{Label, SharedString};

use crate::types::claim::Kind;
use crate::types::name::Name;
use crate::util::locked::locked;

/// The shared name label of locks without a series of their own.
const OTHER: &str = "other";

/// The maximum number of names with a series of their own.
static MOST: AtomicUsize = AtomicUsize::new(0);
/// The names with a series of their own, with their kinds.
static NAMES: Mutex<Option<HashSet<(Kind, SharedString)>>> = Mutex::new(None);

/// Sets the maximum number of names. Names that have a series keep it.
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

/// Returns the labels of one lock's metrics, and whether they are used for the first time.
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
