//! **Broken on purpose: do not copy.** Locks in a database, made by hand.

/// A row that says whether the lock is free.
pub(crate) const STATUS_ROW: [&str; 2] = [
    "CREATE TABLE job (id INT PRIMARY KEY, status TEXT NOT NULL, holder TEXT)",
    "INSERT INTO job VALUES (1, 'free', NULL)",
];

/// Takes it, if one row is changed. `$1` is who takes it.
pub(crate) const TAKE_STATUS: &str =
    "UPDATE job SET status = 'locked', holder = $1 WHERE id = 1 AND status = 'free'";

/// Orders whose number has no index.
pub(crate) const WITHOUT_INDEX: &str =
    "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, nr INT NOT NULL) ENGINE = InnoDB";

/// Takes the lock of one order; or so it seems.
pub(crate) fn for_update(nr: u32) -> String {
    format!("SELECT nr FROM orders WHERE nr = {nr} FOR UPDATE")
}

/// A stock of one thing.
pub(crate) const STOCK: [&str; 2] = [
    "CREATE TABLE stock (id INT PRIMARY KEY, left_over INT NOT NULL)",
    "INSERT INTO stock VALUES (1, 10)",
];

/// Locks it for as long as the transaction lasts, however long that is.
pub(crate) const LOCK_STOCK: &str = "SELECT left_over FROM stock WHERE id = 1 FOR UPDATE";
