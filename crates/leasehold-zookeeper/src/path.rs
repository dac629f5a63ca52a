//! Conversion of a lock's name to the name of one node, and back.
//!
//! Two names never share a node, and a name never becomes a path of several nodes. Printable ASCII
//! except `/` and `%` is unchanged. Every other byte becomes `%` and two lowercase hexadecimal
//! digits. So most names are the same for other clients on the same path. `.` and `..` are not
//! allowed in a path, and the server reserves `zookeeper` at the top, so these names begin with an
//! encoded byte.

use leasehold_core::Name;
use leasehold_core::kit::decoded;

/// Returns the name of the node whose children are this lock's claims.
pub(super) fn encode(name: &Name) -> String {
    let text = name.as_str();
    let reserved = matches!(text, "." | ".." | "zookeeper");
    let mut node = String::with_capacity(text.len() + 16);
    for (i, byte) in text.bytes().enumerate() {
        match byte {
            b'/' | b'%' => escape(&mut node, byte),
            b' '..=b'~' if i > 0 || !reserved => node.push(char::from(byte)),
            _ => escape(&mut node, byte),
        }
    }
    node
}

fn escape(node: &mut String, byte: u8) {
    let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n)]);
    node.extend(['%', digit(byte >> 4), digit(byte & 15)]);
}

/// Returns the name of the lock with this node. Returns `None` for a node that no lock can have.
pub(super) fn decode(node: &str) -> Option<Name> {
    let name = Name::new(decoded(node, |_| true)?).ok()?;
    // Only the encoding that leasehold writes is accepted, so `%61` is not the node of `a`.
    (encode(&name) == node).then_some(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // S90
    #[test]
    fn plain_names_are_unchanged_and_special_ones_are_escaped() {
        for (name, node) in [
            ("order:42", "order:42"),
            ("Nightly report (2)", "Nightly report (2)"),
            ("a/../b", "a%2f..%2fb"),
            ("..", "%2e."),
            (".", "%2e"),
            (".a", ".a"),
            ("zookeeper", "%7aookeeper"),
            ("100%", "100%25"),
            ("é", "%c3%a9"),
        ] {
            assert_eq!(encode(&Name::new(name).unwrap()), node);
            assert_eq!(decode(node).unwrap().as_str(), name);
        }
        for foreign in ["%61", "%zz", "%2", "a%2F", "é", "zookeeper", ""] {
            assert_eq!(decode(foreign), None, "{foreign}");
        }
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        // S90
        #[test]
        fn each_name_maps_to_its_own_node(text in "\\PC{1,80}") {
            let name = Name::new(&text).unwrap();
            let node = encode(&name);
            prop_assert!(node.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'/'));
            prop_assert!(node != "." && node != "..");
            prop_assert_eq!(decode(&node), Some(name));
        }
    }
}
