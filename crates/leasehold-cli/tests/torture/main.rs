//! `leasehold torture`, of which most runs wait for most of their time. One program, so that they wait together.

mod common;

mod campaign;
mod history;
mod others;
mod own;
mod page;
mod picture;
mod sabotage;
mod servers;
