//! The `redlock:` store.

pub mod round;
