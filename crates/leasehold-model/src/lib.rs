//! Helpers for the models in the tests. `tests/model.rs` explores the clients, the store and the
//! fenced resource in all interleavings. `tests/redlock_model.rs` explores Redlock's tokens.
//! `tests/cell_model.rs` explores sessions and a lock in cells.

/// Returns whether larger models are to be explored, as in `./test.sh --long`.
pub fn is_long() -> bool {
    std::env::var("LEASEHOLD_TESTS").is_ok_and(|which| which == "long")
}
