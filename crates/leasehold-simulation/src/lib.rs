//! The package consists of tests: `tests/simulation` plays the worlds, and `tests/controls.rs` checks that the
//! simulation detects errors.
