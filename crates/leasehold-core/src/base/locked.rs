//! A mutex whose holders leave what it guards whole, whatever happens to them.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex under which no code that can panic runs between two consistent states: then a
/// holder that panicked left nothing half done, and poison says nothing.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
