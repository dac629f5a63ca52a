//! **Broken on purpose: do not copy.** Handmade locks in a database.

/// The table whose row contains the status of the lock.
pub(crate) const STATUS_ROW: [&str; 2] = [
    "CREATE TABLE job (id INT PRIMARY KEY, status TEXT NOT NULL, holder TEXT)",
    "INSERT INTO job VALUES (1, 'free', NULL)",
];

/// Takes the lock, if one row is changed. `$1` is the client that takes it.
pub(crate) const TAKE_STATUS: &str =
    "UPDATE job SET status = 'locked', holder = $1 WHERE id = 1 AND status = 'free'";

/// A table of orders, without an index on their number.
pub(crate) const WITHOUT_INDEX: &str =
    "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, nr INT NOT NULL) ENGINE = InnoDB";

/// Returns a statement that seems to lock one order.
pub(crate) fn for_update(nr: u32) -> String {
    format!("SELECT nr FROM orders WHERE nr = {nr} FOR UPDATE")
}

/// The stock of one item.
pub(crate) const STOCK: [&str; 2] = [
    "CREATE TABLE stock (id INT PRIMARY KEY, left_over INT NOT NULL)",
    "INSERT INTO stock VALUES (1, 10)",
];

/// Locks the row until the transaction ends, however long that takes.
pub(crate) const LOCK_STOCK: &str = "SELECT left_over FROM stock WHERE id = 1 FOR UPDATE";
