//! **Broken on purpose: do not copy anything from here.**
//!
//! Recipes for locks as they stand in articles, answers and code bases. Each of them fails, and the
//! story that uses it shows how. They are here for that, and nothing outside the lab can call them.

pub(crate) mod fence;
pub(crate) mod redis;
pub(crate) mod redlock;
pub(crate) mod sql;
pub(crate) mod zookeeper;
