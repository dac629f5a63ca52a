//! A lock's name as the name of one node, and back.
//!
//! Two names never meet in one node, and no name is ever a path of its own: printable ASCII but
//! `/` and `%` stands for itself, every other byte is `%` and two lowercase hexadecimal digits. So
//! most names are what they are to other clients on the same path. `.` and `..`, which a path may
//! not have, and `zookeeper`, which the server keeps for itself at the top, begin with an encoded
//! byte.

use leasehold_core::Name;
use leasehold_core::kit::decoded;

/// The name of the node that this lock's claims are children of.
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

/// The name of which this is the node; `None` for a node that no lock of ours has.
pub(super) fn decode(node: &str) -> Option<Name> {
    let name = Name::new(decoded(node, |_| true)?).ok()?;
    // Only what we would have written ourselves: `%61` is not the node of `a`.
    (encode(&name) == node).then_some(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn s90_plain_names_are_what_they_are_and_odd_ones_never_a_path() {
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

        #[test]
        fn s90_every_name_has_a_node_of_its_own(text in "\\PC{1,80}") {
            let name = Name::new(&text).unwrap();
            let node = encode(&name);
            prop_assert!(node.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'/'));
            prop_assert!(node != "." && node != "..");
            prop_assert_eq!(decode(&node), Some(name));
        }
    }
}
