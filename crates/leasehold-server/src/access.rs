//! Access control: identities, their tokens, rights and quotas.
//!
//! **Tokens are not stored.** The file has their SHA-256 hashes. A presented token is hashed, and
//! the hash is compared with all hashes of the file, each in constant time. So the response time
//! does not reveal how much of a token was right.
//!
//! **An invalid file changes nothing.** The file is read as a whole before it replaces the current
//! identities. If a token is removed, its open streams end at their next ping.
//!
//! **Claim IDs of two identities never collide.** The ID under which a claim is stored is a hash of
//! the identity and of the client's ID. So an identity that learns the claim ID of another identity
//! cannot release or renew that claim, and the server needs no table of claims for this.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime};

use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use leasehold_core::kit::locked;
use leasehold_core::{ClaimId, Error, ErrorKind, Name, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::problem::Failure;

/// The longest file of identities, in bytes.
const MAX_FILE: u64 = 4 << 20;
/// The longest token, in bytes.
const MAX_TOKEN: usize = 512;

/// The format of the file of identities.
const FORMAT: &str = r#"expected {"identities": [{"name": "ci", "token_sha256": ["<64 hexadecimal digits>"], "prefixes": ["ci:"], "rights": ["hold", "inspect"]}]}"#;

/// What an identity may do with the locks of its prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Right {
    /// Acquire, renew and release locks.
    Hold,
    /// See locks, holders and waiters.
    Inspect,
    /// Evict holders.
    Evict,
    /// Freeze and unfreeze locks.
    Freeze,
}

impl Right {
    const ALL: [Self; 4] = [Self::Hold, Self::Inspect, Self::Evict, Self::Freeze];

    fn word(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Inspect => "inspect",
            Self::Evict => "evict",
            Self::Freeze => "freeze",
        }
    }
}

/// Limits of what an identity may use of one server at the same time.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Quota {
    /// The number of holders and waiters together.
    claims: usize,
    /// The number of open streams and long polls.
    streams: usize,
    /// The number of requests per second, on average.
    requests_per_second: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self { claims: 10_000, streams: 10_000, requests_per_second: 50_000 }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    identities: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    token_sha256: Vec<String>,
    prefixes: Vec<String>,
    rights: Vec<Right>,
    #[serde(default)]
    quota: Quota,
}

type Hash = [u8; 32];

/// An identity of the file, or one of the two that need no token.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) prefixes: Vec<String>,
    rights: Vec<Right>,
    quota: Quota,
    usage: Arc<Usage>,
}

/// What an identity currently uses of this server.
#[derive(Debug, Default)]
struct Usage {
    streams: AtomicUsize,
    /// How many requests the quota still allowed, and when that was computed. `None` before the
    /// first request.
    requests: Mutex<Option<(f64, Instant)>>,
    /// For each claim, the latest time at which it expires.
    claims: Mutex<HashMap<ClaimId, Instant>>,
}

/// The sender of one request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) identity: Arc<Identity>,
    /// The hash of the token in the request, if it had one.
    shown: Option<Hash>,
}

/// How a request reached the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Through a Unix socket, from a process of the server's own user.
    SameUser,
    /// In any other way.
    Other,
}

/// The rules by which the service accepts requests.
#[derive(Debug)]
pub struct Access {
    file: Option<PathBuf>,
    is_open: bool,
    table: RwLock<Arc<Table>>,
    local: Arc<Identity>,
    anonymous: Arc<Identity>,
}

#[derive(Debug, Default)]
struct Table {
    identities: Vec<(Vec<Hash>, Arc<Identity>)>,
    /// The modification time and the size of the file when it was read.
    read: Option<(SystemTime, u64)>,
}

impl Access {
    /// Accepts requests only from processes of the same user, through a Unix socket.
    pub fn same_user() -> Self {
        Self {
            file: None,
            is_open: false,
            table: RwLock::default(),
            local: Identity::unlimited("local"),
            anonymous: Identity::unlimited("anonymous"),
        }
    }

    /// Accepts the tokens whose hashes are in this file, as well as what
    /// [`same_user`](Self::same_user) accepts.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the file cannot be read, or it is invalid.
    pub fn tokens(file: impl Into<PathBuf>) -> Result<Self> {
        let access = Self { file: Some(file.into()), ..Self::same_user() };
        access.reload()?;
        Ok(access)
    }

    /// Accepts every request. Only for addresses that no other machine can reach.
    pub fn open() -> Self {
        Self { is_open: true, ..Self::same_user() }
    }

    /// Reads the file again. If it is invalid, the current identities stay.
    ///
    /// # Errors
    /// The same as [`tokens`](Self::tokens).
    pub fn reload(&self) -> Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let before = self.table();
        let table = read(path, &before).map_err(|what| {
            let shown = path.display();
            Error::new(ErrorKind::Config, format!("invalid token file {shown}: {what}"))
                .with_hint(FORMAT)
        });
        match table {
            Ok(table) => {
                *self.table.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(table);
                Ok(())
            }
            Err(error) => {
                // The same error is not reported again until the file changes.
                let table = Table { identities: before.identities.clone(), read: stamp(path) };
                *self.table.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(table);
                Err(error)
            }
        }
    }

    /// Returns whether the file has changed since it was read.
    pub(crate) fn has_changed(&self) -> bool {
        self.file.as_deref().is_some_and(|path| {
            let now = stamp(path);
            now.is_some() && now != self.table().read
        })
    }

    fn table(&self) -> Arc<Table> {
        self.table.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Identifies the sender of a request.
    pub(crate) fn caller(
        &self,
        peer: Option<Peer>,
        headers: &HeaderMap,
    ) -> Result<Caller, Failure> {
        let unidentified = || {
            let error = Error::new(ErrorKind::Denied, "this request has no valid token")
                .with_hint("send the header \"Authorization: Bearer TOKEN\"");
            Failure::from(error).with_status(axum::http::StatusCode::UNAUTHORIZED)
        };
        if let Some(value) = headers.get(AUTHORIZATION) {
            let value = value.to_str().ok().filter(|value| value.len() <= MAX_TOKEN);
            let (scheme, token) =
                value.and_then(|value| value.split_once(' ')).ok_or_else(unidentified)?;
            if !scheme.eq_ignore_ascii_case("bearer") {
                return Err(unidentified());
            }
            let shown = hash(token.trim().as_bytes());
            let identity = self.table().find(&shown).ok_or_else(unidentified)?;
            return Ok(Caller { identity, shown: Some(shown) });
        }
        let identity = match peer {
            Some(Peer::SameUser) => &self.local,
            _ if self.is_open => &self.anonymous,
            _ => return Err(unidentified()),
        };
        // A page of another site must not send requests through a browser on this machine. Such a
        // page cannot set these headers. Even if its host name resolves to this machine, that name
        // is not a local one.
        let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let origin = headers.get(ORIGIN).map(|o| o.to_str().unwrap_or_default());
        let is_ours = |origin: &str| origin.split_once("://").is_some_and(|(_, of)| of == host);
        if origin.is_some_and(|origin| !is_ours(origin)) || !is_loopback(host) {
            let what = "this request came from a page of another site";
            return Err(Error::new(ErrorKind::Denied, what)
                .with_hint("address the server as localhost, 127.0.0.1 or [::1]")
                .into());
        }
        Ok(Caller { identity: identity.clone(), shown: None })
    }

    /// Returns whether the caller's token is still valid.
    pub(crate) fn still_accepts(&self, caller: &Caller) -> bool {
        let found = |shown| self.table().find(shown);
        caller.shown.as_ref().is_none_or(|shown| {
            found(shown).is_some_and(|identity| identity.name == caller.identity.name)
        })
    }

    /// Returns all identities, including the two that need no token, for metrics.
    pub(crate) fn identities(&self) -> Vec<Arc<Identity>> {
        let table = self.table();
        let named = table.identities.iter().map(|(_, identity)| identity.clone());
        [self.local.clone(), self.anonymous.clone()].into_iter().chain(named).collect()
    }
}

/// Returns whether this is the `Host` of a request to this machine itself.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let address = name.parse::<std::net::IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

fn stamp(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

fn read(path: &Path, before: &Table) -> Result<Table, String> {
    // Read before the content, so that a change in between is found by the next check.
    let read = stamp(path);
    if read.is_some_and(|(_, size)| size > MAX_FILE) {
        return Err(format!("it is larger than {MAX_FILE} bytes"));
    }
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    let file: File = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let mut table = Table { identities: Vec::new(), read };
    for entry in file.identities {
        let Entry { name, token_sha256, prefixes, rights, quota } = entry;
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_word) {
            return Err(format!(
                "invalid name {name:?}: expected 1 to 64 letters, digits or any of -_.@"
            ));
        }
        let is_taken = |name: &str| ["local", "anonymous"].contains(&name);
        if is_taken(&name) || table.identities.iter().any(|(_, other)| other.name == name) {
            return Err(format!("the name {name:?} is taken"));
        }
        if prefixes.is_empty() {
            return Err(format!(r#"{name:?} has no prefixes; use "" for all locks"#));
        }
        let hashes: Option<Vec<Hash>> = token_sha256.iter().map(|hex| from_hex(hex)).collect();
        let Some(hashes) = hashes.filter(|hashes| !hashes.is_empty()) else {
            return Err(format!(
                "{name:?} needs token_sha256: a list of SHA-256 hashes of 64 hexadecimal digits each"
            ));
        };
        if hashes.iter().any(|hash| table.find(hash).is_some()) {
            return Err(format!("{name:?} has a token of another identity"));
        }
        let same = before.identities.iter().find(|(_, old)| old.name == name);
        let usage = same.map(|(_, old)| old.usage.clone()).unwrap_or_default();
        let identity = Identity { name, prefixes, rights, quota, usage };
        table.identities.push((hashes, Arc::new(identity)));
    }
    Ok(table)
}

fn from_hex(hex: &str) -> Option<Hash> {
    let mut hash = Hash::default();
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, n) in hash.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&hex[n..n + 2], 16).ok()?;
    }
    Some(hash)
}

impl Table {
    /// Finds the identity of the token with this hash. Always compares all hashes, so that the
    /// duration is constant.
    fn find(&self, shown: &Hash) -> Option<Arc<Identity>> {
        let mut found = None;
        for (hashes, identity) in &self.identities {
            for hash in hashes {
                if bool::from(hash.ct_eq(shown)) {
                    found = Some(identity);
                }
            }
        }
        found.cloned()
    }
}

impl Identity {
    fn unlimited(name: &str) -> Arc<Self> {
        let quota =
            Quota { claims: usize::MAX, streams: usize::MAX, requests_per_second: u32::MAX };
        Arc::new(Self {
            name: name.to_owned(),
            prefixes: vec![String::new()],
            rights: Right::ALL.to_vec(),
            quota,
            usage: Arc::default(),
        })
    }

    /// Returns how many streams and claims the identity has at this server.
    pub(crate) fn usage(&self) -> (usize, usize) {
        let mut claims = locked(&self.usage.claims);
        let now = Instant::now();
        claims.retain(|_, until| *until > now);
        (self.usage.streams.load(Ordering::Relaxed), claims.len())
    }
}

impl Caller {
    /// Fails unless the identity has this right for this lock.
    pub(crate) fn check(&self, right: Right, name: &Name) -> Result<(), Failure> {
        self.check_right(right)?;
        if self.identity.prefixes.iter().any(|p| name.as_str().starts_with(p.as_str())) {
            return Ok(());
        }
        Err(self.denied(format!("may not use the lock {name}")))
    }

    /// Fails unless the identity has this right for all locks with this prefix.
    pub(crate) fn check_all(&self, right: Right, prefix: &str) -> Result<(), Failure> {
        self.check_right(right)?;
        if self.identity.prefixes.iter().any(|p| prefix.starts_with(p.as_str())) {
            return Ok(());
        }
        Err(self.denied(format!("lacks access to some or all locks with the prefix {prefix:?}")))
    }

    pub(crate) fn check_right(&self, right: Right) -> Result<(), Failure> {
        if self.identity.rights.contains(&right) {
            return Ok(());
        }
        Err(self.denied(format!("does not have the right \"{}\"", right.word())))
    }

    fn denied(&self, what: String) -> Failure {
        let what = format!("the identity {:?} {what}", self.identity.name);
        let hint = "ask the operator of the service for the right or the prefix";
        Error::new(ErrorKind::Denied, what).with_hint(hint).into()
    }

    /// Returns whether the identity may see this lock.
    pub(crate) fn sees(&self, name: &Name) -> bool {
        self.check(Right::Inspect, name).is_ok()
    }

    /// Returns the prefixes to list, which together contain all locks of the identity that have
    /// this prefix. None of them begins with another one.
    pub(crate) fn prefixes_of(&self, prefix: &str) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for own in &self.identity.prefixes {
            if prefix.starts_with(own.as_str()) {
                return vec![prefix.to_owned()];
            }
            if own.starts_with(prefix) {
                all.push(own.clone());
            }
        }
        let outer = all.clone();
        let is_inner = |p: &String| outer.iter().any(|o| o != p && p.starts_with(o.as_str()));
        all.retain(|p| !is_inner(p));
        all.sort();
        all.dedup();
        all
    }

    /// Counts one request, and fails if it exceeds the quota.
    pub(crate) fn count_request(&self) -> Result<(), Failure> {
        let per_second = self.identity.quota.requests_per_second;
        if per_second == u32::MAX {
            return Ok(());
        }
        let (now, most) = (Instant::now(), f64::from(per_second).max(1.0));
        let mut requests = locked(&self.identity.usage.requests);
        let (left, since) = requests.unwrap_or((most, now));
        let left = (left + now.duration_since(since).as_secs_f64() * most).min(most);
        if left >= 1.0 {
            *requests = Some((left - 1.0, now));
            return Ok(());
        }
        *requests = Some((left, now));
        let wait = Duration::from_secs_f64(((1.0 - left) / most).max(0.001));
        Err(over_quota(format!("more than {per_second} requests per second"), wait))
    }

    /// Counts a stream for as long as the result exists. Fails if it exceeds the quota.
    pub(crate) fn open_stream(&self) -> Result<Streaming, Failure> {
        let usage = &self.identity.usage;
        let streaming = Streaming(usage.clone());
        if usage.streams.fetch_add(1, Ordering::Relaxed) >= self.identity.quota.streams {
            let what = format!("more than {} open streams", self.identity.quota.streams);
            return Err(over_quota(what, Duration::from_secs(1)));
        }
        Ok(streaming)
    }

    /// Counts a claim before it is sent to the store, until it is known to be gone or has expired.
    /// Fails if it exceeds the quota.
    pub(crate) fn count_claim(&self, id: ClaimId, lease: Duration) -> Result<(), Failure> {
        let most = self.identity.quota.claims;
        let now = Instant::now();
        let mut claims = locked(&self.identity.usage.claims);
        if !claims.contains_key(&id) && claims.len() >= most {
            claims.retain(|_, until| *until > now);
            if claims.len() >= most {
                return Err(over_quota(format!("more than {most} claims"), Duration::from_secs(1)));
            }
        }
        claims.insert(id, now + lease);
        Ok(())
    }

    /// Removes a claim that is not in its queue any more from the count.
    pub(crate) fn forget_claim(&self, id: ClaimId) {
        locked(&self.identity.usage.claims).remove(&id);
    }

    /// Returns the ID under which the store has the claim to which the client gave this ID.
    pub(crate) fn stored(&self, id: ClaimId) -> ClaimId {
        let name = self.identity.name.as_bytes();
        let digest = digest(&[b"leasehold claim", name, &id.as_u128().to_be_bytes()]);
        ClaimId::from_u128(u128::from_be_bytes(std::array::from_fn(|n| digest[n])))
    }
}

/// Returns the name of a stored claim in events, from which its ID cannot be computed.
pub(crate) fn handle(stored: ClaimId) -> String {
    let digest = digest(&[b"leasehold handle", &stored.as_u128().to_be_bytes()]);
    let first = u64::from_be_bytes(std::array::from_fn(|n| digest[n]));
    format!("{first:016x}")
}

fn digest(parts: &[&[u8]]) -> Hash {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// An open stream of an identity.
#[derive(Debug)]
pub(crate) struct Streaming(Arc<Usage>);

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

fn over_quota(what: String, wait: Duration) -> Failure {
    let error = Error::new(ErrorKind::Full, format!("over quota: {what}"))
        .with_hint("retry later, or ask the operator of the service for a larger quota")
        .with_retry_after(wait);
    Failure::from(error).with_status(axum::http::StatusCode::TOO_MANY_REQUESTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_listed_once_and_within_the_identity() {
        let caller = |prefixes: &[&str]| {
            let mut identity = Arc::into_inner(Identity::unlimited("x")).unwrap();
            identity.prefixes = prefixes.iter().map(ToString::to_string).collect();
            Caller { identity: Arc::new(identity), shown: None }
        };
        let all = caller(&[""]);
        assert_eq!(all.prefixes_of(""), [""]);
        assert_eq!(all.prefixes_of("a"), ["a"]);
        let some = caller(&["b:", "a:", "a:x"]);
        assert_eq!(some.prefixes_of(""), ["a:", "b:"]);
        assert_eq!(some.prefixes_of("a:x"), ["a:x"]);
        assert_eq!(some.prefixes_of("c"), [""; 0]);
    }

    #[test]
    fn only_local_addresses_are_loopback() {
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "127.9.9.9", "[::1]:80", "[::1]"]
        {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example", "10.0.0.1:80", "[::2]", "::1"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
