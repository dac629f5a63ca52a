//! Nothing but its tests: `tests/model.rs`, the clients, the store and the fenced resource in all
//! interleavings, and `tests/redlock_model.rs`, Redlock's tokens.
