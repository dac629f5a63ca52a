//! **Broken on purpose: do not copy anything from here.**
//!
//! Lock recipes as found in articles, answers and code bases. Each of them fails, and the story
//! that uses it shows how. They exist only for that, and code outside the lab cannot call them.

pub(crate) mod fence;
pub(crate) mod redis;
pub(crate) mod redlock;
pub(crate) mod sql;
pub(crate) mod zookeeper;
