//! Little but its tests: `tests/model.rs`, the clients, the store and the fenced resource in all
//! interleavings; `tests/redlock_model.rs`, Redlock's tokens; `tests/cell_model.rs`, sessions and a lock
//! in cells.

/// Whether there is time for larger models: `./test.sh --long`.
pub fn is_long() -> bool {
    std::env::var("LEASEHOLD_TESTS").is_ok_and(|which| which == "long")
}
