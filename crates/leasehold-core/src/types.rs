//! The basic types: claims, names, tokens, the results of a store's calls, and the error.

pub(crate) mod answer;
pub(crate) mod claim;
pub mod doctor;
pub(crate) mod error;
pub(crate) mod holder;
pub(crate) mod limits;
pub(crate) mod name;
pub(crate) mod options;
mod outside;
pub mod sequencer;
pub(crate) mod token;
