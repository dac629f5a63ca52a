//! What knows nothing of locks: clocks, the world that the client lives in, and how things are written.

pub(crate) mod clock;
pub(crate) mod duration;
pub(crate) mod ends;
pub(crate) mod locked;
pub(crate) mod park;
pub(crate) mod percent;
pub(crate) mod similar;
pub(crate) mod world;
