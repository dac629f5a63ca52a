//! The slots of a semaphore: the locks NAME/slot/1 to NAME/slot/N that number its permits.
//!
//! They belong to `run --max`, and overviews do not list them as locks of their own.

use std::collections::HashMap;

use leasehold::Kind;
use leasehold::store::LockInfo;

/// What the names of a semaphore's slots begin with.
pub(crate) fn prefix(semaphore: &str) -> String {
    format!("{semaphore}/slot/")
}

/// These locks without the slots of semaphores that are among them.
pub(crate) fn hidden(mut locks: Vec<LockInfo>) -> Vec<LockInfo> {
    let is_semaphore = |lock: &&LockInfo| lock.kind == Kind::Semaphore && lock.unreadable.is_none();
    let semaphores: HashMap<String, u32> = locks
        .iter()
        .filter(is_semaphore)
        .map(|lock| (lock.name.as_str().to_owned(), lock.capacity))
        .collect();
    locks.retain(|lock| {
        let slot = lock.name.as_str().rsplit_once("/slot/");
        let number = slot.and_then(|(_, number)| number.parse::<u32>().ok());
        let capacity = slot.and_then(|(semaphore, _)| semaphores.get(semaphore));
        let is_slot = match (number, capacity) {
            (Some(number), Some(capacity)) => (1..=*capacity).contains(&number),
            _ => false,
        };
        !is_slot || lock.kind != Kind::Mutex
    });
    locks
}

#[cfg(test)]
mod tests {
    use leasehold::Name;

    use super::*;

    #[test]
    fn only_slots_of_a_semaphore_in_the_list_are_hidden() {
        let lock = |name: &str, kind, capacity| {
            LockInfo::new(Name::new(name).unwrap(), kind, capacity, Vec::new())
        };
        let mutex = |name: &str| lock(name, Kind::Mutex, 1);
        let all = vec![
            lock("gpu", Kind::Semaphore, 2),
            mutex("gpu/slot/1"),
            mutex("gpu/slot/2"),
            mutex("gpu/slot/3"),
            mutex("gpu/slot/x"),
            mutex("parking"),
            mutex("parking/slot/1"),
            lock("gpu/slot/4", Kind::Semaphore, 9),
        ];
        let left: Vec<String> =
            hidden(all).iter().map(|lock| lock.name.as_str().to_owned()).collect();
        assert_eq!(
            left,
            ["gpu", "gpu/slot/3", "gpu/slot/x", "parking", "parking/slot/1", "gpu/slot/4"]
        );
    }
}
