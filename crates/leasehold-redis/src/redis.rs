//! The `redis:` store: lock queues in Redis or Valkey, with one script per call.
//!
//! # The keys
//! A held mutex is one string. Its key is the lock's name, byte for byte, after the URL's prefix.
//! The string is set by `SET … NX PX`, as in many other libraries, so their clients respect
//! leasehold's holders and vice versa.
//!
//! The value begins with the claim's id, the secret that renews and releases the lock. Token, time
//! and holder follow. They are in the value itself, so that a renewal touches only this key, and a
//! holder's record always belongs to that holder.
//!
//! The waiters of a mutex are in two sorted sets next to it. One is sorted by token (the queue),
//! the other by the time at which each waiter expires. For read-write locks and semaphores there is
//! no common format to be compatible with, so their claims are in a hash and in sets of the same
//! form.
//!
//! All locks share a *clock*, the highest token drawn so far. A cluster has one clock per slot, and
//! any other server has one in total. `redis/keys.rs` lists the keys, and `scripts/common.lua`
//! their contents.
//!
//! # One call
//! Each call is one script, which Redis runs alone, so it is atomic. The script first settles the
//! lock. It removes claims that have expired by the server's clock (`TIME`), and grants the lock to
//! the waiters that then fit. Renewals of holds (`renew.lua`) and the common cases below skip this,
//! because they concern claims that certainly have not expired.
//!
//! The scripts of mutexes handle the common cases first, before the code for all other cases
//! (`join_mutex.lua`, `leave_mutex.lua`). If none of these cases applies, the common part has at
//! most removed dead waiters, and the general code does all the work:
//! - *The lock is free and has no queue.* The claim acquires it.
//! - *A leasehold claim holds the lock, the new claim is not in the queue, and no waiter has
//!   expired.* The claim joins the queue. A try fails instead, and writes nothing.
//! - *The releasing claim holds the lock and has no lock delay.* The first waiter gets the lock if
//!   it is alive.
//!
//! Every script receives all keys that it may touch. A cluster node must see in the request whether
//! all keys are present while their slot moves, and some servers refuse to touch other keys.
//!
//! What happens if something fails:
//!
//! - *The reply to a join is lost.* The repeated call finds the claim's id in the value or the
//!   queue, and the answer is the same.
//! - *The reply to a release is lost.* The repeated call does not find the id, and changes nothing.
//! - *A caller's future is dropped.* The script ran completely or not at all.
//! - *The client crashes.* The lease is the key's own expiry, and each waiter's expiry is in the
//!   second set.
//! - *Redis loses its script cache.* It replies `NOSCRIPT`, and the client sends the script in
//!   full.
//!
//! # Notifications
//! A client that releases a lock, or finds that the holder is gone, grants it to the next waiter in
//! the same script. The script publishes the grant to the channel of the connection from which the
//! waiter joined. That is one command and one message per hand-over, however many clients wait. If
//! the message is lost, the waiter's heartbeat finds the grant.
//!
//! A client of another library that deletes its key sends no notification. The head of the queue
//! therefore polls ten times a second while a foreign client holds the lock. In between, any client
//! that arrives can acquire the key. While leasehold's waiters hand the lock over to each other,
//! foreign clients do not get it.
//!
//! In a cluster every node forwards every message. If the node of a waiter's connection is gone, a
//! connection to another node subscribes to its channel.
//!
//! An eviction publishes the claims' ids to one channel that all clients subscribe to. Evictions
//! are rare, and a holder's record does not contain its client's connection. Each client finds its
//! own ids in the message. The message is a hint that makes the client poll. If it is lost, the
//! next renewal finds the eviction. Subscribers to a queue are notified by the server itself
//! (`redis/follow.rs`).
//!
//! # Keys of other programs
//! A key with a lock's name that leasehold did not write is treated as another program's lock. It
//! may be a string that was set by `SET … NX PX`, or a hash like Redisson's locks. Clients wait for
//! it if it expires. If it never expires, or is neither of the two, they return an error. Only an
//! explicit eviction deletes it, and only if it is a string that looks like such a lock.
//!
//! # Long queues
//! The server serves no other request while a script runs. So no script reads a whole queue or
//! removes all dead waiters. Reads are paged, and one call removes at most a thousand dead waiters.
//!
//! If dead waiters may remain ahead of a live one, the lock is not granted past them. The reply
//! then makes a polling client poll again immediately. A client that releases the lock repeats its
//! call until a waiter has the lock or no waiters are left.
//!
//! # Versions
//! Clients of all versions use the same keys at the same time, so the format of their contents is
//! fixed. New data goes into the holder's JSON, which every version passes on unchanged. A version
//! treats a value that it cannot read as another library's lock.
//!
//! # Tokens
//! A token is `max(clock + 1, TIME in µs, seen + 1)`, drawn when a claim joins. The same script
//! writes the clock. So tokens rise while the server keeps its data, whatever its wall clock does.
//! A fail-over to a stale replica, or a restart without the last writes, can lose data. Even then,
//! tokens rise unless the server's wall clock is behind the last token. They are Lua numbers, exact
//! up to 2^53. From 2^52, which is the year 2112, neither TIME nor `seen` raises a token any more
//! (`scripts/clock.lua`).
//!
//! # Clock
//! All times are those of the server's wall clock, which also expires Redis's keys. If it is set
//! forward, leases expire early, and only the token distinguishes the two holders. If it is set
//! back, a dead holder's lock stays taken for that much longer.

mod answer;
mod cluster;
#[doc(hidden)]
pub mod connection;
mod doctor;
#[doc(hidden)]
pub mod fault;
mod follow;
mod identity;
mod info;
#[doc(hidden)]
pub mod keys;
mod probe;
mod replicas;
mod request;
mod sentinel;
mod servers;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod url;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use redis::{Cmd, RedisError, RedisWrite, Value};
use tokio::runtime::Handle;

use self::answer::{HolderCache, Page, Scripts, kind_word, micros, millis};
use self::connection::{PushListener, Script};
use self::fault::Refusal;
use self::keys::{Keys, Keyspace};
use self::replicas::ReplicaConfirmations;
use self::request::Request;
use self::servers::Servers;
use self::url::{Address, Deployment, RESERVED, RedisUrl};
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Waiters, redacted, request_timeout};
use leasehold_core::store::{
    Converted, Evict, EvictionListener, EvictionListeners, Follow, Joined, LockInfo, Mode, Queues,
    Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Kind, Name, Result, Token};

/// Approximate number of keys that each step of a listing scans.
const SCANNED: usize = 1_000;

/// Capacity reserved for a call on one lock. `ARGUMENTS` is the highest number of arguments. The
/// other two are the approximate size of the arguments in bytes, without texts of variable length.
const ARGUMENTS: usize = 11;
const ARGUMENTS_OF_JOIN: usize = 120;
const ARGUMENTS_OF_LEAVE: usize = 48;
/// Channel on which evictions are announced to all clients, and the word after the claim's id in
/// such a message. `evict.lua` also contains both.
const TO_ALL: &str = "leasehold:inbox:all";
const EVICTED: &str = "evicted";
/// Maximum number of times that a release or a change of weight is repeated to remove dead waiters.
/// Each call removes up to a thousand of them.
const BURIALS: u32 = 1_000;

/// Store that keeps locks in Redis. See the module's documentation.
pub struct RedisStore {
    info: StoreInfo,
    servers: Arc<Servers>,
    keyspace: Keyspace,
    scripts: Scripts,
    holder_cache: HolderCache,
    waiters: Arc<Inbox>,
    listeners: Arc<EvictionListeners>,
    runtime: Handle,
    confirm: Option<ReplicaConfirmations>,
    restart_delay: Duration,
    /// Whether the server has accepted writes. If so, a refusal to write is temporary.
    was_master: AtomicBool,
}

/// Waiters of this client, with their entries in the queues.
type Inbox = Waiters<Member>;

/// Entry of a waiter. Its `Display` format is the one in which Redis stores the queue of a mutex.
#[derive(Clone, Debug)]
struct Member {
    id: ClaimId,
    delay: u64,
    /// Channel on which the waiter is notified.
    inbox: Arc<str>,
    who: Arc<str>,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, delay, inbox, who } = self;
        write!(f, "{} {delay} {inbox} {who}", id.to_hex())
    }
}

/// Handler of the messages that other clients send when they grant a lock to this client's waiters,
/// or evict claims.
#[derive(Debug)]
struct PushHandler {
    waiters: Arc<Inbox>,
    listeners: Arc<EvictionListeners>,
}

impl PushListener for PushHandler {
    fn message(&self, text: &[u8]) {
        let Some((id, payload)) = std::str::from_utf8(text).ok().and_then(|t| t.split_once(' '))
        else {
            return;
        };
        let Some(id) = ClaimId::from_hex(id) else { return };
        match payload.parse().ok().and_then(Token::new) {
            Some(token) => self.waiters.notify(id, Signal::Granted(token)),
            None if payload == EVICTED => self.listeners.ask(id),
            None => {}
        }
    }

    fn interrupted(&self) {
        self.waiters.ask_all();
    }

    fn expected(&self) -> Vec<String> {
        self.waiters.all_kept().into_iter().map(|member| member.inbox.to_string()).collect()
    }

    fn common(&self) -> Option<&'static str> {
        Some(TO_ALL)
    }
}

/// Returns the store's identity: its addresses, database and prefix.
///
/// A server has no name that survives a restart. A client that uses other seeds or sentinels of the
/// same store must set an identity when it connects.
fn identity(url: &RedisUrl) -> String {
    let hosts = |all: &[Address]| {
        let mut all: Vec<String> = all.iter().map(ToString::to_string).collect();
        all.sort_unstable();
        all.join(",")
    };
    let (db, prefix) = (url.login.db, &url.prefix);
    match &url.deployment {
        Deployment::Single(address) => format!("redis:{address}/{db}#{prefix}"),
        Deployment::Sentinel { sentinels, master } => {
            format!("redis+sentinel:{}/{master}/{db}#{prefix}", hosts(sentinels))
        }
        Deployment::Cluster(seeds) => format!("redis+cluster:{}#{prefix}", hosts(seeds)),
    }
}

/// Guard that removes the client's records of a released claim when it is dropped.
struct Forgotten<'a> {
    store: &'a RedisStore,
    id: ClaimId,
}

impl Drop for Forgotten<'_> {
    fn drop(&mut self) {
        self.store.waiters.dismiss(self.id);
        if let Some(confirm) = &self.store.confirm {
            confirm.forget(self.id);
        }
    }
}

impl RedisStore {
    /// Connects to the store of this URL. Renewals and timers run on `runtime`.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`]: the URL is invalid, or does not fit the servers.
    /// - [`ErrorKind::Unreachable`]: the servers do not respond in time.
    /// - [`ErrorKind::Denied`]: the login was rejected, a permission is missing, or the server is a
    ///   replica.
    /// - [`ErrorKind::Unsupported`]: the server is too old.
    /// - Any other error that a server returns.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let parsed = RedisUrl::parse(url)?;
        let channel = format!("{RESERVED}inbox:{}", ClaimId::random()?.to_hex());
        let waiters = Arc::<Inbox>::default();
        let listeners = Arc::<EvictionListeners>::default();
        let handler = PushHandler { waiters: waiters.clone(), listeners: listeners.clone() };
        let listener: Arc<dyn PushListener> = Arc::new(handler);
        let servers = Arc::new(Servers::new(&parsed, runtime, &channel, &listener)?);
        let (guarantees, is_master) = probe::found(&servers, &parsed, runtime).await?;
        servers.watch(runtime);
        let cluster = matches!(parsed.deployment, Deployment::Cluster(_));
        let begin = |wanted| ReplicaConfirmations::new(wanted, &parsed.login, &servers, runtime);
        let confirm = parsed.replicas.map(begin);
        let info = StoreInfo::new(redacted(url), guarantees)
            .identified(identity(&parsed))
            .confirming(confirm.as_ref().map_or(Duration::ZERO, ReplicaConfirmations::within));
        Ok(Arc::new(Self {
            info,
            confirm,
            servers,
            keyspace: Keyspace::new(&parsed.prefix, cluster),
            scripts: Scripts::new(parsed.restart_delay),
            holder_cache: HolderCache::default(),
            waiters,
            listeners,
            runtime: runtime.clone(),
            restart_delay: parsed.restart_delay,
            was_master: AtomicBool::new(is_master),
        }))
    }

    fn fault(&self, error: &RedisError) -> Error {
        let demoted = fault::refusal(error) == Some(Refusal::ReadOnly)
            && self.was_master.load(Ordering::Relaxed);
        let explained = if demoted { fault::demoted(error) } else { fault::explain(error) };
        explained.with_store(&self.info.url)
    }

    /// Builds a request with the keys of one lock, and reserves `bytes` for its arguments.
    fn request(script: &Arc<Script>, keys: &Keys, bytes: usize) -> Request {
        let (count, size) = keys.size();
        let mut call = script.sized_call(count, ARGUMENTS, size + bytes);
        keys.write(&mut call);
        Request { slot: keys.slot, script: script.clone(), call, divisible: false, once: false }
    }

    async fn send(&self, request: &Request) -> Result<Value> {
        self.servers.send(request).await.map_err(|error| self.fault(&error))
    }

    async fn try_join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.check(claim)?;
        let keys = self.keyspace.keys(&claim.name)?;
        let node = self.servers.node(keys.slot).await.map_err(|e| self.fault(&e))?;
        let who = self.holder_cache.text(&claim.holder);
        let (id, delay) = (claim.id, millis(claim.lock_delay));
        let member = || Member { id, delay, inbox: node.channel().unwrap_or_default(), who };
        // The waiter is registered before the claim is sent, so that every grant finds it.
        let member = self.waiters.enlist(id, member);
        let request = match is_mutex(claim) {
            true => join_of_mutex(&self.scripts.join_mutex, claim, mode, &keys, &member),
            false => self.join_of_shared(claim, mode, &keys, &member),
        };
        let joined = answer::joined(claim, self.send(&request).await?)?;
        if !matches!(joined, Joined::Busy { .. }) {
            self.was_master.store(true, Ordering::Relaxed);
        }
        Ok(joined)
    }

    fn join_of_shared(&self, claim: &Claim, mode: Mode, keys: &Keys, member: &Member) -> Request {
        let Member { delay, inbox, who, .. } = member;
        let bytes = ARGUMENTS_OF_JOIN + who.len() + inbox.len();
        let mut request = Self::request(&self.scripts.join_shared, keys, bytes);
        let call = &mut request.call;
        call.arg(claim.id.to_hex()).arg(letter(mode));
        call.arg(millis(claim.lease)).arg(micros(claim.waiter_lease)).arg(claim.seen);
        call.arg(*delay).arg(&**inbox).arg(&**who);
        call.arg(kind_word(claim.kind)).arg(claim.capacity).arg(claim.weight);
        request
    }

    /// Rejects a lease longer than `restart_delay`. A restarted server could grant the lock to
    /// another client before such a lease has expired.
    fn check(&self, claim: &Claim) -> Result<()> {
        let delay = self.restart_delay;
        if delay.is_zero() || claim.lease <= delay {
            return Ok(());
        }
        let what = format!(
            "a lease of {:?} is longer than restart_delay_ms ({delay:?}), after which a restarted \
             server grants locks again",
            claim.lease
        );
        let hint = "use a shorter lease, or raise restart_delay_ms in every client's URL";
        Err(Error::new(ErrorKind::Config, what).with_hint(hint))
    }

    /// Returns the unknown result of a failed request for `some` claims.
    ///
    /// A permanent error may concern only one of several claims. In that case, this returns the
    /// error, and the renewer retries in smaller batches.
    fn unknown(&self, error: &RedisError, some: usize) -> Result<Renewal> {
        let error = self.fault(error);
        if some > 1 && !error.is_transient() { Err(error) } else { Ok(Renewal::unknown(&error)) }
    }

    /// Renews holders of mutexes by their main keys alone, with one script call per slot.
    async fn renew_holders(
        &self,
        renewals: &[Renew],
        holders: &[usize],
        answers: &mut [Renewal],
    ) -> Result<()> {
        let mut slots: BTreeMap<u16, Vec<(usize, Keys)>> = BTreeMap::new();
        for &i in holders {
            let keys = self.keyspace.keys(&renewals[i].claim.name)?;
            slots.entry(keys.slot).or_default().push((i, keys));
        }
        let slots: Vec<_> = slots.into_values().collect();
        let together = slots.iter().map(|some| self.renewal(renewals, some)).collect::<Vec<_>>();
        let mut apart = Vec::new();
        let replies = self.servers.send_all(&together).await;
        for (value, some) in replies.into_iter().zip(slots) {
            match value {
                Ok(value) => renewed(value, &some, answers)?,
                // Some keys of the slot are on this node, others on the next one. Each key alone is
                // on one of them.
                Err(error) if some.len() > 1 && is_half_moved(&error) => {
                    apart.extend(some.into_iter().map(|one| vec![one]));
                }
                Err(error) => {
                    let unknown = self.unknown(&error, some.len())?;
                    some.iter().for_each(|(i, _)| answers[*i] = unknown.clone());
                }
            }
        }
        let alone = apart.iter().map(|one| self.renewal(renewals, one)).collect::<Vec<_>>();
        for (value, one) in self.servers.send_all(&alone).await.into_iter().zip(&apart) {
            match value {
                Ok(value) => renewed(value, one, answers)?,
                Err(error) => {
                    let unknown = self.unknown(&error, one.len())?;
                    one.iter().for_each(|(i, _)| answers[*i] = unknown.clone());
                }
            }
        }
        Ok(())
    }

    /// Builds one script call that renews several holders of mutexes in one slot.
    fn renewal(&self, renewals: &[Renew], some: &[(usize, Keys)]) -> Request {
        let mut call = self.scripts.renew.call(some.len());
        for (_, keys) in some {
            call.arg(&keys.main);
        }
        for (i, _) in some {
            let Renew { claim, lease } = &renewals[*i];
            call.arg(claim.id.to_hex()).arg(millis(*lease));
        }
        let slot = some.first().map_or(0, |(_, keys)| keys.slot);
        let divisible = some.len() > 1;
        Request { slot, script: self.scripts.renew.clone(), call, divisible, once: false }
    }

    /// Renews all other claims, with one script call per slot. The calls receive all keys of the
    /// locks.
    async fn beat(
        &self,
        renewals: &[Renew],
        others: &[usize],
        answers: &mut [Renewal],
    ) -> Result<()> {
        // A batch can contain claims on one name both as a mutex and as another kind. The script
        // needs to know the kind of each claim.
        let mut slots: BTreeMap<u16, BTreeMap<(&Name, bool), Vec<usize>>> = BTreeMap::new();
        for &i in others {
            let claim = &renewals[i].claim;
            let (name, slot) = (&claim.name, self.keyspace.keys(&claim.name)?.slot);
            slots.entry(slot).or_default().entry((name, is_mutex(claim))).or_default().push(i);
        }
        let (mut requests, mut indices) = (Vec::new(), Vec::new());
        for (slot, locks) in slots {
            let mut call = self.scripts.beat.call(locks.len() * 6);
            for (name, _) in locks.keys() {
                self.keyspace.keys(name)?.write(&mut call);
            }
            let mut order = Vec::new();
            for (n, some) in locks.values().enumerate() {
                for &i in some {
                    let Renew { claim, lease } = &renewals[i];
                    let member = self.waiters.kept(claim.id);
                    call.arg(n + 1).arg(if is_mutex(claim) { "m" } else { "s" });
                    call.arg(claim.id.to_hex());
                    match member {
                        Some(member) => call.write_arg_fmt(member),
                        None => call.write_arg(b""),
                    }
                    call.arg(millis(*lease)).arg(micros(claim.waiter_lease));
                    order.push(i);
                }
            }
            let script = self.scripts.beat.clone();
            // Other claims must not wait for a slot that is being moved. The renewer retries the
            // claims of that slot.
            requests.push(Request {
                slot,
                script,
                call,
                divisible: renewals.len() > 1,
                once: false,
            });
            indices.push(order);
        }
        for (value, indices) in self.servers.send_all(&requests).await.into_iter().zip(indices) {
            let names: Vec<&Name> = indices.iter().map(|i| &renewals[*i].claim.name).collect();
            let beaten = match value {
                Ok(value) => answer::beaten(&names, value)?,
                Err(error) => vec![self.unknown(&error, names.len())?; names.len()],
            };
            for (i, renewal) in indices.into_iter().zip(beaten) {
                answers[i] = renewal;
            }
        }
        Ok(())
    }

    async fn try_renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut answers = vec![Renewal::Lost; renewals.len()];
        let waits = |i: &usize| self.waiters.waiting(renewals[*i].claim.id).is_some();
        // The grant of a claim that has waited is unconfirmed, whether or not the waiter was
        // notified.
        let waited = |i: &usize| self.waiters.kept(renewals[*i].claim.id).is_some();
        let unconfirmed: Vec<usize> = match self.confirm {
            Some(_) => (0..renewals.len()).filter(waited).collect(),
            None => Vec::new(),
        };
        let (holders, mut others): (Vec<usize>, Vec<usize>) =
            (0..renewals.len()).partition(|i| is_mutex(&renewals[*i].claim) && !waits(i));
        if !holders.is_empty() {
            self.renew_holders(renewals, &holders, &mut answers).await?;
            // The claim may still be in the queue, although this client has forgotten that.
            // Otherwise it is lost.
            let gone = |i: &usize| matches!(answers[*i], Renewal::Lost);
            others.extend(holders.into_iter().filter(gone));
        }
        if !others.is_empty() {
            self.beat(renewals, &others, &mut answers).await?;
        }
        if let Some(confirm) = &self.confirm {
            self.confirm_all(confirm, renewals, &unconfirmed, &mut answers).await;
        }
        for (renewal, answer) in renewals.iter().zip(&answers) {
            if matches!(answer, Renewal::Holding { .. } | Renewal::Lost) {
                self.waiters.dismiss(renewal.claim.id);
            }
            if matches!(answer, Renewal::Lost)
                && let Some(confirm) = &self.confirm
            {
                confirm.forget(renewal.claim.id);
            }
        }
        match answers.as_slice() {
            [alone] => alone.clone().known().map(|known| vec![known]),
            _ => Ok(answers),
        }
    }

    /// Has the replicas confirm, concurrently, the grants of those `unconfirmed` claims that hold
    /// their locks. Each claim gets its own result.
    async fn confirm_all(
        &self,
        confirm: &ReplicaConfirmations,
        renewals: &[Renew],
        unconfirmed: &[usize],
        answers: &mut [Renewal],
    ) {
        let (mut indices, mut grants) = (Vec::new(), Vec::new());
        for &i in unconfirmed {
            let claim = &renewals[i].claim;
            if let (Renewal::Holding { .. }, Ok(keys)) =
                (&answers[i], self.keyspace.keys(&claim.name))
            {
                indices.push(i);
                grants.push((claim, keys));
            }
        }
        let confirmed = confirm.all(&grants).await;
        for ((i, (claim, _)), outcome) in indices.into_iter().zip(grants).zip(confirmed) {
            // The caller of a refused join releases the claim. A renewal must not release it,
            // because other calls may use the same claim.
            if let Err(error) = outcome {
                answers[i] = Renewal::unknown(&error.with_lock(&claim.name));
            }
        }
    }

    /// Acquires the lock, then waits until enough replicas have the grant.
    ///
    /// If too few replicas confirm it, this releases the lock and returns an error. After a
    /// transient error, the claim is kept.
    async fn join_confirmed(
        &self,
        confirm: &ReplicaConfirmations,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Joined> {
        confirm.check(claim)?;
        // Only the confirmation may take longer than a join without replicas.
        let joined =
            confirm.limited(request_timeout(claim.lease), self.try_join(claim, mode)).await?;
        if !matches!(joined, Joined::Holding { .. }) {
            return Ok(joined);
        }
        let confirmed = confirm.grant(claim, &self.keyspace.keys(&claim.name)?).await;
        if let Err(error) = &confirmed
            && !error.is_transient()
        {
            // If this release fails, the caller releases the claim, or its lease expires.
            let _ = self.try_leave(claim, None).await;
        }
        confirmed.map(|()| joined)
    }

    async fn try_leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        // The client forgets the claim whatever the result is, even if this future is dropped.
        let _forgotten = Forgotten { store: self, id: claim.id };
        let keys = self.keyspace.keys(&claim.name)?;
        // A claim that was notified of its grant is no longer in the queue.
        let member = self.waiters.waiting(claim.id);
        let script = match is_mutex(claim) {
            true => &self.scripts.leave_mutex,
            false => &self.scripts.leave_shared,
        };
        let mut request = Self::request(script, &keys, ARGUMENTS_OF_LEAVE);
        let call = &mut request.call;
        call.arg(claim.id.to_hex());
        if keep.is_some() || member.is_some() || !is_mutex(claim) {
            call.arg(keep.map_or(0, millis));
        }
        if let Some(member) = member.filter(|_| is_mutex(claim)) {
            call.write_arg_fmt(member);
        }
        let mut doubt = false;
        let left = self.servers.send_noting(&request, &mut doubt).await;
        let (left, mut more) = answer::left(&left.map_err(|error| self.fault(&error))?)?;
        for _ in 0..BURIALS {
            if !more {
                break;
            }
            // The claim is already released. If this call fails, waiting clients continue to remove
            // dead waiters.
            let Ok(again) = Box::pin(self.send(&request)).await else { break };
            (_, more) = answer::left(&again)?;
        }
        // The request may have been sent again because no reply arrived. In that case, the first
        // copy may have removed the claim.
        Ok(left || doubt)
    }

    async fn try_convert(&self, claim: &Claim) -> Result<Converted> {
        let keys = self.keyspace.keys(&claim.name)?;
        let mut request = Self::request(&self.scripts.convert, &keys, ARGUMENTS_OF_LEAVE);
        request.call.arg(claim.id.to_hex()).arg(claim.weight);
        let (converted, mut more) = answer::converted(self.send(&request).await?)?;
        for _ in 0..BURIALS {
            if !more {
                break;
            }
            // The weight has already changed. If this call fails, waiting clients continue to
            // remove dead waiters.
            let Ok(again) = Box::pin(self.send(&request)).await else { break };
            (_, more) = answer::converted(again)?;
        }
        Ok(converted)
    }

    /// Builds a request for one part of a lock's queue.
    fn part(&self, name: &Name, part: &str, after: u64) -> Result<Request> {
        let mut request = Self::request(&self.scripts.read, &self.keyspace.keys(name)?, 0);
        request.call.arg(part).arg(after);
        Ok(request)
    }

    async fn page(&self, name: &Name, part: &str, after: u64) -> Result<Page> {
        let value = self.send(&self.part(name, part, after)?).await;
        Page::of(name, value.map_err(|e| e.with_lock(name))?)
    }

    /// Reads a long queue in pages. It reads the waiters first, so that a waiter that is granted
    /// the lock in between is not missed.
    async fn read_long(&self, name: &Name) -> Result<Option<LockInfo>> {
        let mut waiters = self.pages(name, "w").await?;
        let mut all = self.pages(name, "h").await?;
        waiters.without(&all);
        all.append(waiters);
        Ok(all.shown())
    }

    async fn pages(&self, name: &Name, part: &str) -> Result<Page> {
        let mut all = self.page(name, part, 0).await?;
        while let Some(after) = all.more.take() {
            let mut next = self.page(name, part, after).await?;
            all.more = next.more.take();
            all.append(next);
        }
        Ok(all)
    }

    async fn try_list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let mut found: BTreeSet<Name> = BTreeSet::new();
        for node in self.servers.masters().await.map_err(|e| self.fault(&e))? {
            for pattern in self.keyspace.patterns(prefix) {
                let mut cursor = "0".to_owned();
                loop {
                    let mut scan = redis::cmd("SCAN");
                    scan.arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCANNED);
                    let page = node.call(&scan).await.map_err(|e| self.fault(&e))?;
                    let (next, keys): (String, Vec<Vec<u8>>) =
                        redis::from_redis_value(page).map_err(|e| self.fault(&e.into()))?;
                    self.sift(&node, keys, &mut found).await?;
                    if next == "0" {
                        break;
                    }
                    cursor = next;
                }
            }
        }
        let mut requests = Vec::new();
        for name in &found {
            requests.push(self.part(name, "a", 0)?);
        }
        let mut listed = Vec::new();
        let answers = self.servers.send_all(&requests).await;
        for (name, value) in found.iter().zip(answers) {
            match value {
                Ok(value) => {
                    let page = Page::of(name, value)?;
                    listed.extend(match page.more {
                        None => page.shown(),
                        Some(_) => self.read_long(name).await?,
                    });
                }
                // Another program has replaced the key since the scan, or this user may not read
                // it.
                Err(error)
                    if fault::refusal(&error) == Some(Refusal::WrongType)
                        || fault::is_about_keys(&error) => {}
                Err(error) => return Err(self.fault(&error)),
            }
        }
        Ok(listed)
    }

    /// Adds to `found` the locks of this store to which `keys` belong.
    async fn sift(
        &self,
        node: &connection::Node,
        keys: Vec<Vec<u8>>,
        found: &mut BTreeSet<Name>,
    ) -> Result<()> {
        let mut mains = Vec::new();
        let mut peek = redis::Pipeline::new();
        for key in keys {
            let Ok(key) = String::from_utf8(key) else { continue };
            match self.keyspace.lock_of(&key) {
                Some((name, false)) => drop(found.insert(name)),
                Some((name, true)) => {
                    peek.add_command(range(&key));
                    mains.push(name);
                }
                None => {}
            }
        }
        if mains.is_empty() {
            return Ok(());
        }
        let starts = node.pipeline(&peek).await.map_err(|e| self.fault(&e))?;
        for (name, start) in mains.into_iter().zip(starts) {
            // Keys of other types return an error. They are not leasehold's locks.
            if let Value::BulkString(start) = start
                && answer::is_ours(&start)
            {
                found.insert(name);
            }
        }
        Ok(())
    }
}

/// Returns whether the claim's lock has a main key.
///
/// A mutex with a capacity other than 1 is a mistake of the caller, which the general scripts
/// report.
fn is_mutex(claim: &Claim) -> bool {
    claim.kind == Kind::Mutex && claim.capacity == 1 && claim.weight == 1
}

/// Builds the request for a claim on a mutex. The arguments that every claim needs come first. The
/// rarely needed ones share a single argument.
fn join_of_mutex(
    script: &Arc<Script>,
    claim: &Claim,
    mode: Mode,
    keys: &Keys,
    member: &Member,
) -> Request {
    let Member { delay, inbox, who, .. } = member;
    let lease = millis(claim.lease);
    let bytes = ARGUMENTS_OF_JOIN + who.len() + inbox.len();
    let mut request = RedisStore::request(script, keys, bytes);
    let call = &mut request.call;
    call.arg(claim.id.to_hex()).arg(lease + delay).arg(claim.seen);
    call.write_arg_fmt(format_args!("{delay} {who}"));
    let waiter_lease = micros(claim.waiter_lease);
    call.write_arg_fmt(format_args!("{} {lease} {waiter_lease} {inbox}", letter(mode)));
    request
}

/// Returns the letter for a mode in the scripts.
fn letter(mode: Mode) -> &'static str {
    if mode == Mode::Try { "t" } else { "w" }
}

/// Stores the replies about several holders of mutexes in `answers`.
fn renewed(value: Value, some: &[(usize, Keys)], answers: &mut [Renewal]) -> Result<()> {
    for ((i, _), renewal) in some.iter().zip(answer::renewed(value)?) {
        answers[*i] = renewal.unwrap_or(Renewal::Lost);
    }
    Ok(())
}

fn is_half_moved(error: &RedisError) -> bool {
    fault::refusal(error) == Some(Refusal::TryAgain)
}

fn range(key: &str) -> Cmd {
    let mut cmd = redis::cmd("GETRANGE");
    cmd.arg(key).arg(0).arg(33);
    cmd
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("url", &self.info.url).finish_non_exhaustive()
    }
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(RedisStore::open(&url, &runtime).await? as Arc<dyn Store>) })
}

#[async_trait]
impl Store for RedisStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        self.confirm.as_ref()?.reached(claim.id)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        doctor::diagnose(&self.servers, self.confirm.is_some(), self.restart_delay).await
    }

    fn shard(&self, name: &Name) -> u64 {
        self.keyspace.keys(name).map_or(0, |keys| self.servers.member(keys.slot))
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let joined = match &self.confirm {
            Some(confirm) => Box::pin(self.join_confirmed(confirm, claim, mode)).await,
            None => self.try_join(claim, mode).await,
        };
        match joined {
            Ok(Joined::Waiting(_)) => {}
            // If the result is unknown, the claim may be in the queue.
            Err(ref error) if error.is_transient() => {}
            _ => self.waiters.dismiss(claim.id),
        }
        joined.map_err(|error| error.with_lock(&claim.name))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.try_renew(renewals).await
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.try_leave(claim, keep).await.map_err(|error| error.with_lock(&claim.name))
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let converted =
            self.try_convert(claim).await.map_err(|error| error.with_lock(&claim.name))?;
        // After a fail-over, a replica that does not know the larger weight would admit other
        // holders.
        if let (Some(confirm), Converted::Done { .. }) = (&self.confirm, converted)
            && claim.weight > 1
        {
            confirm.forget(claim.id);
            let confirmed = confirm.grant(claim, &self.keyspace.keys(&claim.name)?).await;
            confirmed.map_err(|error| error.with_lock(&claim.name))?;
        }
        Ok(converted)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        match self.waiters.news(claim.id).await {
            // The replicas have not confirmed the grant yet. A poll makes them confirm it.
            Signal::Granted(_) if self.confirm.is_some() => Ok(Signal::Ask),
            signal => Ok(signal),
        }
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let page = self.page(name, "a", 0).await?;
        if page.more.is_some() {
            return self.read_long(name).await;
        }
        Ok(page.shown())
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        Ok(self.page(name, "1", token.map_or(0, Token::get)).await?.shown())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.try_list(prefix).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut request = Self::request(&self.scripts.evict, &self.keyspace.keys(name)?, 0);
        request.once = which == Evict::Holders;
        request.call.arg(match which {
            Evict::Token(token) => token.get(),
            Evict::Holders => 0,
        });
        if request.once {
            // This call, which can be repeated, finds out whether an idle connection was closed.
            self.holders(name, None).await?;
        }
        answer::evicted(name, self.send(&request).await.map_err(|e| e.with_lock(name))?)
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.listeners.add(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        let followed = follow::follow(&self.servers, &self.keyspace, queues, &self.runtime).await;
        followed.map_err(|error| self.fault(&error))
    }
}
