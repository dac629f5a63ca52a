//! Utilities that are independent of locks: clocks, blocking, formatting and the simulated process.

pub(crate) mod clock;
pub(crate) mod duration;
pub(crate) mod ends;
pub(crate) mod locked;
pub(crate) mod park;
pub(crate) mod percent;
pub(crate) mod similar;
pub(crate) mod world;
