//! The slots of a semaphore: the locks NAME/slot/1 to NAME/slot/N that number its permits.
//!
//! They belong to `run --max`, and overviews do not list them as separate locks.
//!
//! If the semaphore's name is valid for a store, so are the names of its slots. In a long NAME, a
//! hash replaces as many bytes as a slot adds.

use std::collections::HashMap;

use leasehold::store::LockInfo;
use leasehold::{Kind, MAX_NAME_BYTES};

/// Maximum length of a name that has room for a slot's number even in the longest namespace.
const SHORT: usize = MAX_NAME_BYTES / 2 - 16;
/// Bytes that a slot adds to a long name: `~`, the hash, `/slot/` and a number.
const ADDED: usize = 1 + 16 + 6 + 10;

/// Returns the common prefix of the names of a semaphore's slots.
pub(crate) fn prefix(semaphore: &str) -> String {
    if semaphore.len() <= SHORT {
        return format!("{semaphore}/slot/");
    }
    let mut end = semaphore.len() - ADDED;
    while !semaphore.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}~{:016x}/slot/", &semaphore[..end], hash(semaphore))
}

/// Computes FNV-1a, which is the same in every build.
fn hash(text: &str) -> u64 {
    let mix = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Removes the slots of the semaphores in the list.
pub(crate) fn hidden(mut locks: Vec<LockInfo>) -> Vec<LockInfo> {
    let is_semaphore = |lock: &&LockInfo| lock.kind == Kind::Semaphore && lock.unreadable.is_none();
    let semaphores: HashMap<String, u32> = locks
        .iter()
        .filter(is_semaphore)
        .map(|lock| (prefix(lock.name.as_str()), lock.capacity))
        .collect();
    locks.retain(|lock| {
        let name = lock.name.as_str();
        let slot = name.rsplit_once('/').map(|(before, _)| name.split_at(before.len() + 1));
        let number = slot.and_then(|(_, number)| number.parse::<u32>().ok());
        let capacity = slot.and_then(|(prefix, _)| semaphores.get(prefix));
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
    fn slot_names_are_valid_and_unique_for_any_semaphore_name() {
        let mut seen = std::collections::HashSet::new();
        for length in 1..=MAX_NAME_BYTES / 2 {
            for letter in ["n", "ü"] {
                let name = letter.repeat(length);
                let slot = format!("{}{}", prefix(&name), u32::MAX);
                assert!(slot.len() <= name.len() || name.len() <= SHORT, "{slot}");
                assert!(Name::new(&slot).is_ok() && seen.insert(slot));
            }
        }
        assert_eq!(prefix("gpu"), "gpu/slot/");
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
    }

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
