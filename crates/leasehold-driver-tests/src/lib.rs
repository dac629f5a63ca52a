//! Tests of `lock_in`, `once`, `versioned` and `fence::sql` in the transactions of other drivers.
//!
//! They are in `tests`, in a package of their own, so that the tests of the SQL stores do not build
//! these drivers.
