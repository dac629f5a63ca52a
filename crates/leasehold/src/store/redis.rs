//! The `redis:` store.

#![allow(dead_code, reason = "the store itself follows")]

pub(crate) mod connection;
pub(crate) mod fault;
pub(crate) mod url;
