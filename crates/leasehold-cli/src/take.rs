//! Acquires locks with the options of the command line.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::store::kit::{decoded_bytes, is_no_store, no_store};
use leasehold::store::{ClaimState, LockInfo, Place};
use leasehold::{Client, Error, ErrorKind, Hold, Holder, LockRequest, MIN_LEASE, MultiGuard};

use crate::args::{StoreArgs, TakeArgs};
use crate::exit::{Failure, NOT_ACQUIRED, UNAVAILABLE, USAGE};
use crate::table::short;
use crate::{events, frozen, nested};

/// Time limit for a store that does not answer a release. After it, the lease frees the lock.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Fails for a store that no other process can use.
fn check_shared(url: &str) -> Result<(), Failure> {
    if url.split(':').next() != Some("memory") {
        return Ok(());
    }
    let what = "memory: locks exist only inside one process, so they cannot protect a command";
    Err(Failure::new(USAGE, what)
        .hint("use file: (this machine), or a store with a server, such as postgres:"))
}

/// The hint for a command that takes no lock and finds no store.
const NO_STORE: &str = "check the store's URL; `leasehold run` creates a store when it takes the \
                        first lock";

/// Fails if the directory of a `file:` URL is not a store, because a command that takes no lock
/// must not create one. (The user's own store, `file:`, may be created.)
fn check_directory(url: &str) -> leasehold::Result<()> {
    let Some(("file", rest)) = url.split_once(':') else { return Ok(()) };
    let path = rest.strip_prefix("//").unwrap_or(rest);
    let path = path.strip_prefix("localhost").unwrap_or(path);
    let path = path.split(['?', '#']).next().unwrap_or_default();
    // The store rejects an invalid path.
    let Some(path) = decoded_bytes(path) else { return Ok(()) };
    let path = PathBuf::from(OsString::from_vec(path));
    // A directory that cannot be read is reported by the store.
    let lacks = |part| matches!(path.join(part).try_exists(), Ok(false));
    if !path.is_absolute() || !["locks", "clients", "tokens"].into_iter().all(lacks) {
        return Ok(());
    }
    let what = match path.try_exists() {
        Ok(false) => "does not exist",
        _ => "contains no locks",
    };
    Err(no_store(format!("the directory {} {what}", path.display())))
}

/// Connects to a store that must exist.
pub(crate) async fn connect_to_existing(store: &StoreArgs) -> leasehold::Result<Client> {
    check_directory(store.url())?;
    store.connect_to_existing().await
}

/// Returns the failure of a command that connects to an existing store.
fn not_connected(error: Error) -> Failure {
    match is_no_store(&error) {
        true => Failure { code: UNAVAILABLE, ..Failure::from(error) }.hint(NO_STORE),
        false => error.into(),
    }
}

/// Connects to the store, does this work, and closes the connection.
pub(crate) async fn with_store<T>(
    store: &StoreArgs,
    work: impl AsyncFnOnce(&Client) -> Result<T, Failure>,
) -> Result<T, Failure> {
    check_shared(store.url())?;
    let locks = connect_to_existing(store).await.map_err(not_connected)?;
    events::note_store(locks.url());
    let done = work(&locks).await;
    // Nothing is held, so a failure to close has no effect.
    let _ = locks.close().await;
    done
}

/// Minimum time to keep retrying while the store is unreachable. It is also the library's limit
/// during a wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// Returns how long to keep retrying with this lease.
pub(crate) fn patience(args: &TakeArgs) -> Duration {
    PATIENCE.max(args.lease)
}

/// The first and the longest pause between attempts to connect.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// Connects to the store, and retries while it is unreachable. The limit is `--connect-timeout`, or
/// as long as the library retries during a wait (a lease, at least 15 s). It does not exceed
/// `--wait`, measured from `started`. With `--try` there is one attempt.
pub(crate) async fn connect_to_take(args: &TakeArgs, started: Instant) -> Result<Client, Failure> {
    check_shared(args.store.url())?;
    let patience = match (args.connect_timeout, args.wait) {
        (None, _) if args.tries_only() => Duration::ZERO,
        (longest, Some(wait)) if !args.tries_only() => {
            wait.min(longest.unwrap_or_else(|| patience(args)))
        }
        (longest, _) => longest.unwrap_or_else(|| patience(args)),
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
                // Before the kind, which is last.
                let end = failure.message.rfind(" [").unwrap_or(failure.message.len());
                failure.message.insert_str(end, &format!(", tried for {tried}"));
            }
            return Err(failure);
        }
        tokio::time::sleep(pause.min(left)).await;
        pause = (pause * 2).min(longest);
    }
}

/// Returns the lease to request. It is no longer than `--max-hold`, because a command is stopped at
/// fractions of the lease.
fn wanted_lease(args: &TakeArgs) -> Duration {
    args.max_hold.map_or(args.lease, |longest| args.lease.min(longest.max(MIN_LEASE)))
}

/// Returns the lease to request, limited to the longest that the store supports.
pub(crate) fn lease(locks: &Client, args: &TakeArgs) -> Duration {
    wanted_lease(args).min(locks.store().longest_lease())
}

/// Returns how much must be left of this lease when the lock has been acquired. A grant that was
/// pushed to a waiter has less left if the lease is long, and is then renewed first.
fn least(lease: Duration, args: &TakeArgs) -> Duration {
    args.max_hold.unwrap_or(lease).min(lease / 2)
}

/// An acquisition of locks with the options of the command line.
///
/// Dropping a future of its methods leaves the queues and releases the locks that the future has
/// acquired.
#[derive(Clone)]
pub(crate) struct Taking<'a> {
    pub(crate) locks: &'a Client,
    pub(crate) args: &'a TakeArgs,
    /// The moment at which the time limit of `--wait` begins.
    pub(crate) started: Instant,
    /// The label to use if `--label` was not given.
    pub(crate) label: String,
    /// The callback for a new queue position. Its arguments are the name of the lock and the
    /// position.
    pub(crate) on_waiting: OnWaiting,
}

pub(crate) type OnWaiting = Arc<dyn Fn(&str, Place) + Send + Sync>;

impl Taking<'_> {
    /// Acquires the lock of this name.
    pub(crate) async fn one(&self, name: &str) -> Result<Hold, Failure> {
        let mut guards = self.all(&[name.to_owned()]).await?.into_iter();
        guards.next().ok_or_else(|| Failure::new(USAGE, "no lock name was given"))
    }

    /// Acquires all of these locks, or none.
    pub(crate) async fn all(&self, names: &[String]) -> Result<MultiGuard, Failure> {
        for name in names {
            nested::refuse_what_is_held_above(self.locks, self.args, name).await?;
        }
        let taken = self.patiently(async || self.take(names, self.args.tries_only()).await).await;
        match taken {
            Ok(guards) => Ok(guards),
            Err(error) => Err(self.not_taken(names, error).await),
        }
    }

    /// Acquires the first of these locks that is free, in this order. If none is free, waits for
    /// the first that becomes free.
    pub(crate) async fn any(&self, names: &[String]) -> Result<MultiGuard, Failure> {
        if !self.args.tries_only() {
            for name in names {
                nested::refuse_what_is_held_above(self.locks, self.args, name).await?;
            }
        }
        let taken = self.patiently(async || {
            let mut busy = None;
            for name in names {
                match self.take(std::slice::from_ref(name), true).await {
                    Err(error) if error.kind() == ErrorKind::Contended => busy = Some(error),
                    taken => return taken,
                }
            }
            match busy {
                Some(busy) if self.args.tries_only() => Err(busy),
                _ => self.first(names).await,
            }
        });
        match taken.await {
            Ok(guards) => Ok(guards),
            Err(error) => {
                let is_busy = matches!(error.kind(), ErrorKind::Contended | ErrorKind::Timeout);
                let mut failure = self.not_taken(names, error).await;
                if is_busy && names.len() > 1 {
                    let none = format!("none of the {} locks is free: ", names.len());
                    failure.message.insert_str(0, &none);
                }
                Err(failure)
            }
        }
    }

    /// Waits in all of these queues until one lock is acquired.
    async fn first(&self, names: &[String]) -> leasehold::Result<MultiGuard> {
        let takes = names.iter().map(|name| self.take(std::slice::from_ref(name), false));
        let mut takes: Vec<_> = takes.map(Box::pin).collect();
        std::future::poll_fn(|cx| {
            let ready = takes.iter_mut().map(|take| take.as_mut().poll(cx)).find(Poll::is_ready);
            ready.unwrap_or(Poll::Pending)
        })
        .await
    }

    async fn take(&self, names: &[String], tries_only: bool) -> leasehold::Result<MultiGuard> {
        let wanted: Vec<LockRequest> = names.iter().map(|name| self.wanted(name)).collect();
        match self.args.wait {
            _ if tries_only => self.locks.try_lock_all(wanted).await,
            Some(limit) => {
                let left = limit.saturating_sub(self.started.elapsed());
                self.locks.lock_all_timeout(wanted, left).await
            }
            None => self.locks.lock_all(wanted).await,
        }
    }

    /// Returns the request for one lock with its options.
    fn wanted(&self, name: &str) -> LockRequest {
        let Self { locks, args, label, .. } = self;
        let (tell, named) = (self.on_waiting.clone(), name.to_owned());
        /// Sets the options that all kinds of locks share.
        macro_rules! with_options {
            ($lock:expr) => {{
                let mut lock = $lock
                    .lease(wanted_lease(args))
                    .min_validity(least(lease(locks, args), args))
                    .label(args.label.as_ref().unwrap_or(label))
                    .on_waiting(move |place| tell(&named, place));
                if let Some(longest) = args.max_hold {
                    lock = lock.max_hold(longest);
                }
                if let Some(period) = args.min_hold {
                    lock = lock.min_hold(period);
                }
                if let Some(delay) = args.lock_delay {
                    lock = lock.lock_delay(delay);
                }
                lock
            }};
        }
        if let Some(capacity) = args.max {
            let permits = args.permits.unwrap_or(1);
            with_options!(locks.semaphore(name, capacity)).permit_request(permits)
        } else if args.shared {
            with_options!(locks.rwlock(name)).read_request()
        } else if args.exclusive {
            with_options!(locks.rwlock(name)).write_request()
        } else {
            with_options!(locks.mutex(name)).into()
        }
    }

    /// Retries for `--connect-timeout` while the store is unreachable. The library reports an error
    /// only after it has retried on its own. So the outage began that much earlier than the first
    /// error.
    async fn patiently<T>(
        &self,
        take: impl AsyncFn() -> leasehold::Result<T>,
    ) -> leasehold::Result<T> {
        let longest = self.args.connect_timeout.unwrap_or_default();
        let mut away_since = None;
        loop {
            let asked = Instant::now();
            let error = match take().await {
                Err(error) if error.kind() == ErrorKind::Unreachable => error,
                taken => return taken,
            };
            // If the store answered in between, this is another outage.
            let since = match away_since {
                Some(since) if asked.elapsed() < 2 * patience(self.args) => since,
                _ => asked.max(Instant::now().checked_sub(patience(self.args)).unwrap_or(asked)),
            };
            away_since = Some(since);
            let is_late = self.args.wait.is_some_and(|limit| self.started.elapsed() >= limit);
            if since.elapsed() >= longest || is_late {
                return Err(error);
            }
            tokio::time::sleep(PAUSES[1]).await;
        }
    }

    /// Describes a failed acquisition in terms of the command line.
    async fn not_taken(&self, names: &[String], error: Error) -> Failure {
        let args = self.args;
        if !matches!(error.kind(), ErrorKind::Contended | ErrorKind::Timeout) {
            let failure = Failure::from(error);
            let busy = failure.code == NOT_ACQUIRED;
            let code = if busy { args.conflict_code() } else { failure.code };
            return Failure { code, silent: busy && args.quiet, ..failure };
        }
        let name = error.name().map(leasehold::Name::as_str).or(names.first().map(String::as_str));
        let name = name.unwrap_or_default();
        let reading = tokio::time::timeout(READ_LIMIT, self.locks.holders(name)).await;
        let info = reading.ok().and_then(Result::ok).flatten();
        let by = info.as_ref().and_then(held_by).or_else(|| {
            let [first, others @ ..] = error.holders() else { return None };
            Some(held_by_these(&first.holder, first.since, others.len()))
        });
        let state = match &by {
            Some(by) => format!("{name:?} is {by}"),
            None => format!("{name:?} is not free"),
        };
        let message = match error.kind() {
            ErrorKind::Timeout => {
                format!("timed out after {}: {state}", short(args.wait.unwrap_or_default()))
            }
            _ => state,
        };
        let command = |subcommand| args.store.command(subcommand, Some(name));
        let is_held = info.as_ref().is_none_or(|info| info.holders().next().is_some());
        let hint = match &info {
            Some(info) if frozen::is_frozen(info) => {
                format!("wait, or end the freeze: {}", command("unfreeze"))
            }
            Some(_) if !is_held && by.is_some() => {
                format!("to end the cooldown: {}", command("evict"))
            }
            // `--once-per` does not wait, so the hint must not suggest `--wait`.
            _ if args.quiet => format!("to see the queue: {}", command("show")),
            _ if args.try_only => {
                format!("drop --try to wait, or see the queue: {}", command("show"))
            }
            _ => format!("wait longer (--wait), or see the queue: {}", command("show")),
        };
        let failure = Failure::new(args.conflict_code(), message).hint(hint);
        Failure { silent: args.quiet, ..failure }
    }
}

/// Time limit for polling the holders of a lock that was not acquired.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// Describes how the lock is taken, in words that follow "is". It names the holder, or the reason
/// why the lock is unavailable.
pub(crate) fn held_by(info: &LockInfo) -> Option<String> {
    if let Some(first) = info.holders().next() {
        let others = info.holders().count() - 1;
        return Some(held_by_these(&first.holder, first.since, others));
    }
    let departed = info.claims.iter().find(|c| c.state == ClaimState::Cooldown)?;
    let left =
        departed.remaining.map_or(String::new(), |left| format!(" for {} more", short(left)));
    Some(match frozen::reason(departed) {
        Some("") => format!("frozen{left} by {}", departed.holder.host.escape_debug()),
        Some(reason) => {
            let by = departed.holder.host.escape_debug();
            format!("frozen{left} by {by}: {}", reason.escape_debug())
        }
        None => format!("in cooldown{left}; last held by {}", departed.holder),
    })
}

pub(crate) fn held_by_these(first: &Holder, since: Duration, others: usize) -> String {
    let mut text = match first.pid {
        // This is the lock of another program, of which nothing more is known.
        0 => format!("held by {}", first.host.escape_debug()),
        _ => format!("held by {first} for {}", short(since)),
    };
    if others > 0 {
        text.push_str(&format!(", and by {others} more"));
    }
    text
}
