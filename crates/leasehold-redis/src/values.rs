//! Random replies, as a server or a proxy in front of it may send them. Tests pass them to every
//! parser of replies.

use proptest::prelude::*;
use redis::Value;

/// Returns a strategy for replies whose texts are nearly correct.
pub(crate) fn values(right: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let words = testbed::texts(right);
    let numbers = [-1, 0, 1, 2, 3, 4, 5, 6, 7, i64::MAX, i64::MIN, 1 << 40];
    let leaf = prop_oneof![
        proptest::sample::select(numbers.to_vec()).prop_map(Value::Int),
        words.clone().prop_map(|text| Value::BulkString(text.into_bytes())),
        words.prop_map(Value::SimpleString),
        Just(Value::Nil),
        Just(Value::BulkString(vec![0xff])),
    ];
    leaf.prop_recursive(2, 24, 6, |inner| {
        let pairs = proptest::collection::vec((inner.clone(), inner.clone()), 0..4);
        let list = proptest::collection::vec(inner, 0..6);
        prop_oneof![4 => list.prop_map(Value::Array), 1 => pairs.prop_map(Value::Map)]
    })
}
