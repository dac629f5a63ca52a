//! The `redis:` store: queues in Redis or Valkey, each call one script.
//!
//! # The keys
//! A mutex that is held is one string: its key is the lock's name, byte for byte (after the URL's
//! prefix), set by `SET … NX PX`. That is the recipe of other libraries' locks, so they respect our
//! holders and we theirs. The value begins with the claim's id, the secret that releases and renews;
//! then come token, time and holder. They are *in* the value, and not beside it, so that a renewal
//! touches this key alone, and nothing can be said of a holder by a record that is not its own.
//!
//! Who waits for a mutex stands in two sorted sets beside it: by token (the queue), and by the time
//! at which the place expires. Read-write locks and semaphores have no recipe to be compatible with:
//! their claims are in a hash and such sets. Beside all of them is one *clock* for each slot of a
//! cluster, and one in all where there is no cluster: the highest token drawn there. Keys are listed
//! in `redis/keys.rs`, their contents in `scripts/common.lua`.
//!
//! # One call
//! Each call is one script, which Redis runs alone: so it is atomic. It settles first: whom the
//! server's clock (`TIME`) says to be over goes, and who then fits is granted.
//!
//! What is usual is settled as it is, and comes first in the scripts of mutexes, before all that the
//! rest needs (`join_mutex.lua`, `leave_mutex.lua`). Where something else is found, nothing was changed
//! yet but dead waiters removed, and the rest does the whole of it:
//! - *a free main key without a queue*, to take;
//! - *one of ours in it, the claim not in the queue and no place there over*, to wait, or to try: that
//!   reads and does no more;
//! - *our own claim in it, without a lock-delay*, to release: the first in the queue has it if it lives.
//!
//! A script is told all keys that it may touch: a node of a cluster must see in the request whether
//! all are there, when their slot moves, and some servers refuse to touch others.
//!
//! *A reply is lost*: the claim's id is found again in the value or the queue, and answered the same.
//! *A caller is dropped*: the script ran or did not. *We die*: the lease is the key's own expiry; a
//! place in the queue has its time in the second set. *Redis forgets its scripts*: `NOSCRIPT` makes us
//! send the script in full.
//!
//! # Who wakes whom
//! Whoever releases, or finds a holder gone, grants in the same script, and publishes to the channel
//! of the connection from which the waiter joined: one command and one message for each hand-over,
//! however many wait. Messages can be lost; the heartbeat finds the grant then. A foreign client that
//! deletes its key tells us nothing: the head of the queue asks ten times a second behind one, and who
//! comes from elsewhere meanwhile takes the key (while we hand over to each other, foreign clients
//! get no turn). In a cluster every node passes every message on, so when the node of that connection
//! is gone, a connection to another listens to its channel.
//!
//! Whoever evicts publishes the claims' ids to one channel that all clients listen to: it is rare, a holder's record
//! does not say which connection is its client's, and a client finds its own among the ids. It is a hint: the client
//! asks, and an eviction that goes unheard is found by the next renewal. Whoever follows a queue is told by the
//! server itself (`redis/follow.rs`).
//!
//! # Keys of others
//! What is under a lock's name and none of ours is somebody else's hold: a string by the recipe, or a
//! hash as Redisson's locks are. It is waited for while it expires, and an error where it never does or
//! is something else. It is deleted only by a person's order, and then only if it certainly is a lock.
//!
//! # Long queues
//! While a script runs, the server serves nobody else. So none reads a whole queue or removes all that
//! died: people read in pages, and a call removes a thousand dead ones. What is free is then not granted
//! past those that are left, who may live; whoever asked is told to ask again at once, and whoever
//! releases goes on until somebody has it.
//!
//! # Versions
//! Clients of all versions use the same keys at once, so what is in them stays as it is; what is new goes
//! into the holder's JSON, which is handed on as it was found. A value that a version cannot read is
//! to it the lock of another library.
//!
//! # Tokens
//! `max(clock + 1, TIME in µs, seen + 1)`, drawn as a claim joins; the clock is written in the same
//! script. So tokens rise while state survives, whatever the server's clock does; and after lost state
//! (a failover to a stale replica, a restart without the last writes) as long as the new clock is not
//! behind the last token. They are numbers of Lua, exact to 2^53, which is the year 2255.
//!
//! # Whose clock
//! The server's wall clock, which also expires Redis's keys. Stepped ahead it ends leases early, and
//! only the token tells; stepped back it keeps a dead holder's lock for so much longer.

mod answer;
mod cluster;
pub(crate) mod connection;
mod doctor;
pub(crate) mod fault;
mod follow;
mod identity;
mod info;
pub(crate) mod keys;
mod probe;
mod replicas;
mod request;
mod sentinel;
mod servers;
#[cfg(test)]
mod tests;
pub(crate) mod url;

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
use self::replicas::Confirm;
use self::request::Request;
use self::servers::Servers;
use self::url::{Address, Deployment, RESERVED, RedisUrl};
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Waiters, redacted, request_timeout};
use leasehold_core::store::{
    Ear, Ears, Evict, Follow, Joined, LockInfo, Mode, Queues, Renew, Renewal, Reweighed, Signal,
    Store, StoreInfo,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Kind, Name, Result, Token};

/// How many keys one step of a listing looks at.
const SCANNED: usize = 1_000;

/// Room in a call of one lock: how many arguments there are at most, and about how many bytes are in them
/// besides texts of any length.
const ARGUMENTS: usize = 11;
const ARGUMENTS_OF_JOIN: usize = 120;
const ARGUMENTS_OF_LEAVE: usize = 48;
/// The channel on which all clients are told who was evicted, and what is said there behind the claim's id. They
/// stand in `evict.lua`, too.
const TO_ALL: &str = "leasehold:inbox:all";
const EVICTED: &str = "evicted";
/// How often a release is repeated that meets dead waiters, a thousand each time.
const BURIALS: u32 = 1_000;

/// Locks in Redis. See the module's documentation.
pub struct RedisStore {
    info: StoreInfo,
    servers: Arc<Servers>,
    keyspace: Keyspace,
    scripts: Scripts,
    holder_cache: HolderCache,
    waiters: Arc<Inbox>,
    ears: Arc<Ears>,
    runtime: Handle,
    confirm: Option<Confirm>,
    restart_delay: Duration,
    /// It has taken writes: if it does not any more, that will pass.
    was_master: AtomicBool,
}

/// The waiters of this client, each with its place.
type Inbox = Waiters<Member>;

/// A place in a mutex's queue; shown as it is called there.
#[derive(Clone, Debug)]
struct Member {
    id: ClaimId,
    delay: u64,
    /// The channel on which it is told.
    inbox: Arc<str>,
    who: Arc<str>,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, delay, inbox, who } = self;
        write!(f, "{} {delay} {inbox} {who}", id.to_hex())
    }
}

/// What is said to this client, by those who grant and by those who evict.
#[derive(Debug)]
struct Heard {
    waiters: Arc<Inbox>,
    ears: Arc<Ears>,
}

impl PushListener for Heard {
    fn message(&self, text: &[u8]) {
        let Some((id, said)) = std::str::from_utf8(text).ok().and_then(|t| t.split_once(' '))
        else {
            return;
        };
        let Some(id) = ClaimId::from_hex(id) else { return };
        match said.parse().ok().and_then(Token::new) {
            Some(token) => self.waiters.tell(id, Signal::Granted(token)),
            None if said == EVICTED => self.ears.ask(id),
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

/// By address: a server has no name of its own that outlives a restart. Whoever names other seeds or
/// sentinels of the same store gives it an identity when connecting.
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

/// A claim that is left: dropped, nothing is kept for it any more.
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
    /// An error with a hint if the servers cannot be used.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let parsed = RedisUrl::parse(url)?;
        let channel = format!("{RESERVED}inbox:{}", ClaimId::random()?.to_hex());
        let waiters = Arc::<Inbox>::default();
        let ears = Arc::<Ears>::default();
        let heard = Heard { waiters: waiters.clone(), ears: ears.clone() };
        let hears: Arc<dyn PushListener> = Arc::new(heard);
        let servers = Arc::new(Servers::new(&parsed, runtime, &channel, &hears)?);
        let (guarantees, is_master) = probe::found(&servers, &parsed, runtime).await?;
        servers.watch(runtime);
        let cluster = matches!(parsed.deployment, Deployment::Cluster(_));
        let confirm =
            parsed.replicas.map(|wanted| Confirm::new(wanted, &parsed.login, &servers, runtime));
        let info = StoreInfo::new(redacted(url), guarantees)
            .identified(identity(&parsed))
            .confirming(confirm.as_ref().map_or(Duration::ZERO, Confirm::within));
        Ok(Arc::new(Self {
            info,
            confirm,
            servers,
            keyspace: Keyspace::new(&parsed.prefix, cluster),
            scripts: Scripts::new(parsed.restart_delay),
            holder_cache: HolderCache::default(),
            waiters,
            ears,
            runtime: runtime.clone(),
            restart_delay: parsed.restart_delay,
            was_master: AtomicBool::new(is_master),
        }))
    }

    fn fault(&self, error: &RedisError) -> Error {
        let demoted = fault::refusal(error) == Some(Refusal::ReadOnly)
            && self.was_master.load(Ordering::Relaxed);
        let told = if demoted { fault::demoted(error) } else { fault::explain(error) };
        told.at(&self.info.url)
    }

    /// A request with the keys of one lock, and room for arguments of so many bytes.
    fn request(script: &Arc<Script>, keys: &Keys, bytes: usize) -> Request {
        let (count, size) = keys.size();
        let mut call = script.sized_call(count, ARGUMENTS, size + bytes);
        keys.write(&mut call);
        Request { slot: keys.slot, script: script.clone(), call, divisible: false }
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
        // Before the claim goes out: no grant shall find nobody.
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

    /// Refuses a lease of which a server that restarted may let in the next before it is over.
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

    /// What nobody could be asked about. A refusal that no other try can mend may be about one of them
    /// only: then nothing is said of any, and the keeper asks in smaller batches.
    fn unknown(&self, error: &RedisError, some: usize) -> Result<Renewal> {
        let error = self.fault(error);
        if some > 1 && !error.is_transient() { Err(error) } else { Ok(Renewal::unknown(&error)) }
    }

    /// Renews holders of mutexes by their main keys alone, one script for each slot.
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
        let told = self.servers.send_all(&together).await;
        for (value, some) in told.into_iter().zip(slots) {
            match value {
                Ok(value) => renewed(value, &some, answers)?,
                // Some keys of the slot are here and some there: each by itself is somewhere.
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

    /// One script for some holders of mutexes in one slot.
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
        Request { slot, script: self.scripts.renew.clone(), call, divisible }
    }

    /// Asks for all others, with all their locks' keys, one script for each slot.
    async fn beat(
        &self,
        renewals: &[Renew],
        others: &[usize],
        answers: &mut [Renewal],
    ) -> Result<()> {
        // What a name was, and what it is now, may be asked for at once: each by its own rules.
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
            // Others must not wait for a slot that is half moved: the keeper asks again.
            requests.push(Request { slot, script, call, divisible: renewals.len() > 1 });
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
        // Told of a grant or not, it has not been confirmed.
        let waited = |i: &usize| self.waiters.kept(renewals[*i].claim.id).is_some();
        let unconfirmed: Vec<usize> = match self.confirm {
            Some(_) => (0..renewals.len()).filter(waited).collect(),
            None => Vec::new(),
        };
        let (holders, mut others): (Vec<usize>, Vec<usize>) =
            (0..renewals.len()).partition(|i| is_mutex(&renewals[*i].claim) && !waits(i));
        if !holders.is_empty() {
            self.renew_holders(renewals, &holders, &mut answers).await?;
            // It may wait, under a place that we have forgotten of; or it is lost.
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

    /// Has all these claims confirmed at once, those of them that hold; each is told for itself.
    async fn confirm_all(
        &self,
        confirm: &Confirm,
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
        let told = confirm.all(&grants).await;
        for ((i, (claim, _)), told) in indices.into_iter().zip(grants).zip(told) {
            // Whoever is refused gives it back: there may be others who ask for the same claim.
            if let Err(error) = told {
                answers[i] = Renewal::unknown(&error.on(&claim.name));
            }
        }
    }

    /// Joins; and returns when enough replicas have the grant, or gives it back if they do not.
    async fn join_confirmed(&self, confirm: &Confirm, claim: &Claim, mode: Mode) -> Result<Joined> {
        confirm.check(claim)?;
        // What waits longer than any join is the confirming.
        let joined =
            confirm.limited(request_timeout(claim.lease), self.try_join(claim, mode)).await?;
        if !matches!(joined, Joined::Holding { .. }) {
            return Ok(joined);
        }
        let confirmed = confirm.grant(claim, &self.keyspace.keys(&claim.name)?).await;
        if let Err(error) = &confirmed
            && !error.is_transient()
        {
            // What is not given back now is left by the caller, or ends with its lease.
            let _ = self.try_leave(claim, None).await;
        }
        confirmed.map(|()| joined)
    }

    async fn try_leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        // Whatever comes of it, also if it is dropped: nobody asks for this claim any more.
        let _forgotten = Forgotten { store: self, id: claim.id };
        let keys = self.keyspace.keys(&claim.name)?;
        // Who was told of a grant stands in no queue any more.
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
            // It is left, whatever comes of this; whoever waits goes on with it.
            let Ok(again) = Box::pin(self.send(&request)).await else { break };
            (_, more) = answer::left(&again)?;
        }
        // Sent again because no answer came, it may find gone what it removed the first time.
        Ok(left || doubt)
    }

    async fn try_reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        let keys = self.keyspace.keys(&claim.name)?;
        let mut request = Self::request(&self.scripts.reweigh, &keys, ARGUMENTS_OF_LEAVE);
        request.call.arg(claim.id.to_hex()).arg(claim.weight);
        let (reweighed, mut more) = answer::reweighed(self.send(&request).await?)?;
        for _ in 0..BURIALS {
            if !more {
                break;
            }
            // It is done, whatever comes of this; whoever waits goes on with it.
            let Ok(again) = Box::pin(self.send(&request)).await else { break };
            (_, more) = answer::reweighed(again)?;
        }
        Ok(reweighed)
    }

    /// One part of a lock's queue.
    fn part(&self, name: &Name, part: &str, after: u64) -> Result<Request> {
        let mut request = Self::request(&self.scripts.read, &self.keyspace.keys(name)?, 0);
        request.call.arg(part).arg(after);
        Ok(request)
    }

    async fn page(&self, name: &Name, part: &str, after: u64) -> Result<Page> {
        let value = self.send(&self.part(name, part, after)?).await;
        Page::of(name, value.map_err(|e| e.on(name))?)
    }

    /// A long queue, in pages: those that wait first, so that nobody is missed who is granted meanwhile.
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
                // Something else took the key since; or this user may not look at it.
                Err(error)
                    if fault::refusal(&error) == Some(Refusal::WrongType)
                        || fault::is_about_keys(&error) => {}
                Err(error) => return Err(self.fault(&error)),
            }
        }
        Ok(listed)
    }

    /// Which of the keys found belong to locks of ours.
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
            // Keys of other types answer with an error, and are no locks.
            if let Value::BulkString(start) = start
                && answer::is_ours(&start)
            {
                found.insert(name);
            }
        }
        Ok(())
    }
}

/// Whether a claim is of a lock that has a main key. (A mutex of another capacity than 1 is a mistake
/// of whoever asks for it; the general scripts know how to tell.)
fn is_mutex(claim: &Claim) -> bool {
    claim.kind == Kind::Mutex && claim.capacity == 1 && claim.weight == 1
}

/// A claim on a mutex: what each needs first, and what few need in one.
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

/// A mode as the scripts read it.
fn letter(mode: Mode) -> &'static str {
    if mode == Mode::Try { "t" } else { "w" }
}

/// Takes in the answers about some holders of mutexes.
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
            // What is not known may be a place in the queue.
            Err(ref error) if error.is_transient() => {}
            _ => self.waiters.dismiss(claim.id),
        }
        joined.map_err(|error| error.on(&claim.name))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.try_renew(renewals).await
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.try_leave(claim, keep).await.map_err(|error| error.on(&claim.name))
    }

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        let reweighed = self.try_reweigh(claim).await.map_err(|error| error.on(&claim.name))?;
        // A fail-over to a replica that does not know of a heavier hold lets others in beside it.
        if let (Some(confirm), Reweighed::Done { .. }) = (&self.confirm, reweighed)
            && claim.weight > 1
        {
            confirm.forget(claim.id);
            let confirmed = confirm.grant(claim, &self.keyspace.keys(&claim.name)?).await;
            confirmed.map_err(|error| error.on(&claim.name))?;
        }
        Ok(reweighed)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        match self.waiters.news(claim.id).await {
            // Nobody has confirmed it yet: asking does.
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
        request.call.arg(match which {
            Evict::Token(token) => token.get(),
            Evict::Holders => 0,
        });
        answer::evicted(name, self.send(&request).await.map_err(|e| e.on(name))?)
    }

    fn hear(&self, ear: Weak<dyn Ear>) {
        self.ears.add(ear);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        let followed = follow::follow(&self.servers, &self.keyspace, queues, &self.runtime).await;
        followed.map_err(|error| self.fault(&error))
    }
}
