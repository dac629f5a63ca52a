//! Tests of `leasehold stress`. Most runs spend most of their time waiting. They are one program,
//! so that they wait at the same time.

mod common;

mod campaign;
mod history;
mod others;
mod own;
mod page;
mod picture;
mod sabotage;
mod servers;
