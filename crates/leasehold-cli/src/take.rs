//! Taking a lock as the command line says.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use leasehold::store::{LockInfo, Standing};
use leasehold::{Error, ErrorKind, Guard, Holder, Leasehold, MIN_LEASE};

use crate::args::{StoreArgs, TakeArgs};
use crate::exit::{Failure, NOT_ACQUIRED, UNAVAILABLE, USAGE};
use crate::nested;
use crate::table::short;

/// Refuses a store that no other process sees.
fn check_shared(url: &str) -> Result<(), Failure> {
    if url.split(':').next() != Some("memory") {
        return Ok(());
    }
    let what = "memory: is seen by one process alone, which is over with this command, so that \
                nobody is excluded: use file: (this machine) or a server's store";
    Err(Failure::new(USAGE, what))
}

/// Refuses to make a store by looking into it: the file or directory that the URL names must be
/// there. (The user's own, `file:`, may be made.)
fn check_there(url: &str) -> Result<(), Failure> {
    let Some((scheme @ ("file" | "sqlite"), rest)) = url.split_once(':') else { return Ok(()) };
    let path = rest.strip_prefix("//").unwrap_or(rest);
    let path = path.strip_prefix("localhost").unwrap_or(path);
    let path = path.split(['?', '#']).next().unwrap_or_default();
    // What is no path that could be there is for the store to refuse.
    let Some(path) = leasehold::kit::decoded_bytes(path) else { return Ok(()) };
    let path = PathBuf::from(OsString::from_vec(path));
    if !path.is_absolute() || !matches!(path.try_exists(), Ok(false)) {
        return Ok(());
    }
    let what =
        format!("there is no store at {scheme}:{}: nothing was ever locked there", path.display());
    Err(Failure::new(UNAVAILABLE, what))
}

/// Connects to the store for one thing, and says goodbye to it.
pub(crate) async fn with_store<T>(
    store: &StoreArgs,
    work: impl AsyncFnOnce(&Leasehold) -> Result<T, Failure>,
) -> Result<T, Failure> {
    check_shared(store.url())?;
    check_there(store.url())?;
    let locks = store.connect().await?;
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
    check_shared(args.store.url())?;
    let patience = match args.wait {
        _ if args.tries_only() => Duration::ZERO,
        Some(wait) => wait.min(PATIENCE.max(args.lease)),
        None => PATIENCE.max(args.lease),
    };
    let [mut pause, longest] = PAUSES;
    loop {
        let error = match args.store.connect().await {
            Ok(locks) => return Ok(locks),
            Err(error) => error,
        };
        let left = patience.saturating_sub(started.elapsed());
        if error.kind() != ErrorKind::Unreachable || left.is_zero() {
            let tried = short(started.elapsed());
            let mut failure = Failure::from(error);
            if failure.code == UNAVAILABLE && !patience.is_zero() {
                failure.message.push_str(&format!(" (tried for {tried})"));
            }
            return Err(failure);
        }
        tokio::time::sleep(pause.min(left)).await;
        pause = (pause * 2).min(longest);
    }
}

/// The lease to ask for: no longer than the lock is to be held, so that the fractions of it at
/// which a command is ended are fractions of that.
fn wanted(args: &TakeArgs) -> Duration {
    args.max_hold.map_or(args.lease, |longest| args.lease.min(longest.max(MIN_LEASE)))
}

/// What the store can make of it at most.
pub(crate) fn lease(locks: &Leasehold, args: &TakeArgs) -> Duration {
    wanted(args).min(locks.store().longest_lease())
}

/// What must be left of this lease when the lock is ours: more than a grant that was pushed to a
/// waiter is worth where the lease is long, so that such a one is renewed first.
fn least(lease: Duration, args: &TakeArgs) -> Duration {
    args.max_hold.unwrap_or(lease).min(lease / 2)
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
                .lease(wanted(args))
                .min_validity(least(lease(locks, args), args))
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

    nested::refuse_what_is_held_above(locks, args).await?;
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
    match taken {
        Ok(guard) => Ok(guard),
        Err(error) => Err(not_taken(locks, args, error).await),
    }
}

/// What the library says to programmers, in the words of the command line.
async fn not_taken(locks: &Leasehold, args: &TakeArgs, error: Error) -> Failure {
    let what = match error.kind() {
        ErrorKind::Contended if args.quiet => "is not free".to_owned(),
        ErrorKind::Contended => "is not free (wait with --wait)".to_owned(),
        ErrorKind::Timeout => {
            format!("did not become free within {}", short(args.wait.unwrap_or_default()))
        }
        _ => {
            let failure = Failure::from(error);
            let busy = failure.code == NOT_ACQUIRED;
            let code = if busy { args.conflict_code() } else { failure.code };
            return Failure { code, silent: busy && args.quiet, ..failure };
        }
    };
    let reading = tokio::time::timeout(ASK, locks.read(&args.name)).await;
    let info = reading.ok().and_then(Result::ok).flatten();
    let by = info.as_ref().and_then(held_by).or_else(|| {
        let [first, others @ ..] = error.holders() else { return None };
        Some(held_by_these(&first.holder, first.since, others.len()))
    });
    let message = match by {
        Some(by) => format!("{:?} {what}: {by}", args.name),
        None => format!("{:?} {what}", args.name),
    };
    Failure { silent: args.quiet, ..Failure::new(args.conflict_code(), message) }
}

/// How long we ask who it was that we did not get the lock for.
const ASK: Duration = Duration::from_secs(1);

/// Who holds the lock, or is gone and keeps it closed.
pub(crate) fn held_by(info: &LockInfo) -> Option<String> {
    if let Some(first) = info.holders().next() {
        let others = info.holders().count() - 1;
        return Some(held_by_these(&first.holder, first.since, others));
    }
    let departed = info.claims.iter().find(|c| c.standing == Standing::Departed)?;
    let left =
        departed.remaining.map_or(String::new(), |left| format!(" for {} more", short(left)));
    Some(format!("kept closed{left} after {} had it", departed.holder))
}

fn held_by_these(first: &Holder, since: Duration, others: usize) -> String {
    let mut text = match first.pid {
        // Of other programs' clients nothing more is known than that.
        0 => format!("held by {}", first.host.escape_debug()),
        _ => format!("held by {first} for {}", short(since)),
    };
    if others > 0 {
        text.push_str(&format!(", and by {others} more"));
    }
    text
}
