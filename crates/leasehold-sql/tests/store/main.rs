//! All tests of the stores on SQLite, PostgreSQL, MySQL and MariaDB, in one program, so that their waits overlap.
//!
//! A test that breaks a server starts its own. The others share one of each kind (`testbed`).

mod conformance;
mod doctor;
mod power;
mod sql_access;
mod sql_common;
mod sql_connections;
mod sql_faults;
mod sql_hand_over;
mod sql_hosts;
mod sql_leases;
mod sql_passwords;
mod sql_pool;
mod sql_postgres;
mod sql_queue;
mod sql_requests;
mod sql_sqlite;
mod sql_statements;
mod sql_tables;
mod sql_transactions_servers;
mod sql_trust;
mod texts;
