//! `leasehold torture`: is my set-up safe?
mod checker;
mod history;
