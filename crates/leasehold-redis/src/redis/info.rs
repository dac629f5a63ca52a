//! The replies to INFO and TIME.

use redis::Value;

/// Reply to INFO.
pub(super) struct Info(String);

impl Info {
    pub(super) fn of(value: Value) -> Self {
        Self(match value {
            Value::BulkString(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Value::VerbatimString { text, .. } => text,
            _ => String::new(),
        })
    }

    pub(super) fn figure(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

/// Returns the time of a reply to TIME, in microseconds since 1970.
pub(super) fn micros(value: &Value) -> Option<u64> {
    let Value::Array(parts) = value else { return None };
    let number = |i: usize| match parts.get(i) {
        Some(Value::BulkString(text)) => std::str::from_utf8(text).ok()?.parse::<u64>().ok(),
        _ => None,
    };
    number(0)?.checked_mul(1_000_000)?.checked_add(number(1)?)
}
