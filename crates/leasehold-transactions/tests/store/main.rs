//! All tests of the functions for transactions, in one program, so that their waits overlap.

mod transactions;
mod transactions_levels;
