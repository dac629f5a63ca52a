//! Taking a lock as the command line says.

use std::time::{Duration, Instant};

use leasehold::{Error, ErrorKind, Guard, Leasehold, MIN_LEASE};

use crate::args::{StoreArgs, TakeArgs};
use crate::exit::{Failure, NOT_ACQUIRED, UNAVAILABLE};
use crate::table::short;

/// Connects to the store for one thing, and says goodbye to it.
pub(crate) async fn with_store<T>(
    store: &StoreArgs,
    work: impl AsyncFnOnce(&Leasehold) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let locks = Leasehold::connect(store.url()).await?;
    let done = work(&locks).await;
    // Nothing is held; there is only the goodbye that can fail.
    let _ = locks.close().await;
    done
}

/// For how long a store that is away is asked again, whatever the lease: the library's patience
/// with one that goes away while we wait.
const PATIENCE: Duration = Duration::from_secs(15);
/// The pauses between tries to connect, from the first to the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// Connects to the store as patiently as the lock is waited for: one that cannot be reached is
/// tried again for as long as the library would if it went away while we wait (a lease, at least
/// 15 s), and no longer than `--wait` since `started`; with `--try`, once.
pub(crate) async fn connect_to_take(
    args: &TakeArgs,
    started: Instant,
) -> Result<Leasehold, Failure> {
    let patience = match args.wait {
        _ if args.tries_only() => Duration::ZERO,
        Some(wait) => wait.min(PATIENCE.max(args.lease)),
        None => PATIENCE.max(args.lease),
    };
    let [mut pause, longest] = PAUSES;
    loop {
        let error = match Leasehold::connect(args.store.url()).await {
            Ok(locks) => return Ok(locks),
            Err(error) => error,
        };
        let left = patience.saturating_sub(started.elapsed());
        if error.kind() != ErrorKind::Unreachable || left.is_zero() {
            let tried = short(started.elapsed());
            let Failure { code, message } = Failure::from(error);
            let message = match code {
                UNAVAILABLE if !patience.is_zero() => format!("{message} (tried for {tried})"),
                _ => message,
            };
            return Err(Failure { code, message });
        }
        tokio::time::sleep(pause.min(left)).await;
        pause = (pause * 2).min(longest);
    }
}

/// The lease to ask for: no longer than the lock is to be held, so that the fractions of it at
/// which a command is ended are fractions of that.
pub(crate) fn lease(args: &TakeArgs) -> Duration {
    args.max_hold.map_or(args.lease, |longest| args.lease.min(longest.max(MIN_LEASE)))
}

/// Takes the lock. What `--wait` allows counts from `started`. `label` is what it says of itself
/// unless the caller said; `on_waiting` is told how many are before us. Dropping the future gives
/// the place in the queue up.
pub(crate) async fn take(
    locks: &Leasehold,
    args: &TakeArgs,
    started: Instant,
    label: String,
    on_waiting: impl Fn(usize) + Send + Sync + 'static,
) -> Result<Guard, Failure> {
    /// Every kind of lock has these.
    macro_rules! with_options {
        ($lock:expr) => {{
            let mut lock = $lock
                .lease(lease(args))
                .label(args.label.clone().unwrap_or(label))
                .on_waiting(move |place| on_waiting(place.ahead));
            if let Some(longest) = args.max_hold {
                lock = lock.max_hold(longest);
            }
            if let Some(period) = args.at_least {
                lock = lock.at_least(period);
            }
            if let Some(delay) = args.lock_delay {
                lock = lock.lock_delay(delay);
            }
            lock
        }};
    }

    let try_only = args.tries_only();
    let wait = args.wait.map(|wait| wait.saturating_sub(started.elapsed()));
    let taken = if let Some(capacity) = args.of {
        let permits = args.permits.unwrap_or(1);
        let lock = with_options!(locks.semaphore(&args.name, capacity));
        match wait {
            _ if try_only => lock.try_acquire_many(permits).await,
            Some(limit) => lock.acquire_many_timeout(permits, limit).await,
            None => lock.acquire_many(permits).await,
        }
    } else if args.shared {
        let lock = with_options!(locks.rwlock(&args.name));
        match wait {
            _ if try_only => lock.try_read().await,
            Some(limit) => lock.read_timeout(limit).await,
            None => lock.read().await,
        }
    } else if args.exclusive {
        let lock = with_options!(locks.rwlock(&args.name));
        match wait {
            _ if try_only => lock.try_write().await,
            Some(limit) => lock.write_timeout(limit).await,
            None => lock.write().await,
        }
    } else {
        let lock = with_options!(locks.mutex(&args.name));
        match wait {
            _ if try_only => lock.try_lock().await,
            Some(limit) => lock.lock_timeout(limit).await,
            None => lock.lock().await,
        }
    };
    taken.map_err(|error| match not_acquired(args, &error) {
        Some(message) => Failure::new(args.conflict_exit_code, message),
        None => {
            let failure = Failure::from(error);
            let code =
                if failure.code == NOT_ACQUIRED { args.conflict_exit_code } else { failure.code };
            Failure { code, ..failure }
        }
    })
}

/// What the library says to programmers, in the words of the command line.
fn not_acquired(args: &TakeArgs, error: &Error) -> Option<String> {
    let what = match error.kind() {
        ErrorKind::Contended => "is not free (wait with --wait)".to_owned(),
        ErrorKind::Timeout => {
            format!("did not become free within {}", short(args.wait.unwrap_or_default()))
        }
        _ => return None,
    };
    let mut text = format!("{:?} {what}", args.name);
    if let [first, others @ ..] = error.holders() {
        let held = format!(": held by {} for {}", first.holder, short(first.since));
        text.push_str(&held);
        if !others.is_empty() {
            text.push_str(&format!(", and by {} more", others.len()));
        }
    }
    Some(text)
}
