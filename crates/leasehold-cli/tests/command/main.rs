//! The command, as people run it. It is one program, so that its waits overlap.

#[path = "../common/mod.rs"]
mod common;

#[macro_use]
mod on_stores;

mod check;
mod clients;
mod database;
mod descendants;
mod describe;
mod disk;
mod doctor;
mod each_store;
mod elect;
mod every_store;
mod file_store;
mod follow;
mod hand_over_cost;
mod hold;
#[cfg(feature = "lab")]
mod lab;
mod leases;
mod loss;
mod run;
mod run_real_use;
mod script;
mod secrets;
mod several;
mod terminal;
mod top;
mod watchdog;
mod words;
mod zookeeper;
