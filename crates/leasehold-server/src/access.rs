//! Access control: identities, their tokens, rights and quotas.
//!
//! **Tokens are not stored.** The file has their SHA-256 hashes. A presented token is hashed, and
//! the hash is compared with all hashes of the file, each in constant time. So the response time
//! does not reveal how much of a token was right.
//!
//! **Client certificates** are checked by [`Tls`](crate::Tls). The file states which DNS names of
//! certificates belong to which identity.
//!
//! **An invalid file changes nothing.** The file is read as a whole before it replaces the current
//! identities. If a token or a certificate name is removed, its open streams end at their next
//! ping.
//!
//! **Claim IDs of two identities never collide.** The ID under which a claim is stored is a hash of
//! the identity, of the lock's name and of the client's ID. So an identity that learns the claim ID
//! of another identity cannot release or renew that claim, and the server needs no table of claims
//! for this.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, StatusCode};
use leasehold_core::{ClaimId, Error, ErrorKind, Name, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::problem::Failure;
use crate::usage::{Quota, Streaming, Usage};

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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    identities: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    token_sha256: Vec<String>,
    #[serde(default)]
    certificate_names: Vec<String>,
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
    pub(crate) prefixes: Vec<Arc<str>>,
    rights: Vec<Right>,
    quota: Quota,
    pub(crate) usage: Arc<Usage>,
}

/// The sender of one request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) identity: Arc<Identity>,
    /// What proves the identity, unless it needs no proof.
    proof: Option<Proof>,
}

/// What a client presents to prove its identity.
#[derive(Clone, Debug)]
enum Proof {
    /// The hash of the token in the request.
    Token(Hash),
    /// The DNS names of the certificate of its connection.
    Certificate(Arc<[String]>),
}

/// The client of a connection. Behind a proxy, this is the proxy.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) peer: Peer,
    /// The network address, or the process ID on this machine.
    pub(crate) address: Option<String>,
}

/// How a request reached the server.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    /// Through a Unix socket, from a process of the server's own user.
    SameUser,
    /// Through TLS, from a client whose certificate has these DNS names.
    Certificate(Arc<[String]>),
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
    rows: Vec<Row>,
    /// The state of the file when it was read.
    read: Option<Stamp>,
}

/// An identity of the file, and its proofs.
#[derive(Clone, Debug)]
struct Row {
    tokens: Vec<Hash>,
    /// In lower case.
    certificate_names: Vec<String>,
    identity: Arc<Identity>,
}

/// The modification time and the size of a file.
pub(crate) type Stamp = (SystemTime, u64);

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

    /// Accepts the tokens and the client certificates of the identities in this file, as well as
    /// what [`same_user`](Self::same_user) accepts.
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
                let table = Table { rows: before.rows.clone(), read: stamp(path) };
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
        peer: Option<&Peer>,
        headers: &HeaderMap,
    ) -> Result<Caller, Failure> {
        let unidentified = || {
            unauthorized(
                "this request has no valid token".to_owned(),
                "send the header \"Authorization: Bearer TOKEN\", or add ?token_file=PATH to the \
                 store's URL",
            )
        };
        if let Some(value) = headers.get(AUTHORIZATION) {
            let value = value.to_str().ok().filter(|value| value.len() <= MAX_TOKEN);
            let (scheme, token) =
                value.and_then(|value| value.split_once(' ')).ok_or_else(unidentified)?;
            if !scheme.eq_ignore_ascii_case("bearer") {
                return Err(unidentified());
            }
            let proof = Proof::Token(hash(token.trim().as_bytes()));
            let identity = self.table().find(&proof).ok_or_else(unidentified)?;
            return Ok(Caller { identity, proof: Some(proof) });
        }
        let (identity, proof) = match peer {
            Some(Peer::SameUser) => (self.local.clone(), None),
            Some(Peer::Certificate(names)) if !self.is_open => {
                let proof = Proof::Certificate(names.clone());
                let found = self.table().find(&proof);
                let unknown = || {
                    unauthorized(
                        format!("no identity matches this client certificate's names: {names:?}"),
                        "add a DNS name of the certificate to certificate_names in the token file",
                    )
                };
                (found.ok_or_else(unknown)?, Some(proof))
            }
            _ if self.is_open => (self.anonymous.clone(), None),
            _ => return Err(unidentified()),
        };
        // A page of another site must not send requests through a browser that needs no token. Such
        // a page cannot set these headers. Even if its host name resolves to this machine, that
        // name is neither a local one nor in the server's certificate.
        let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let origin = headers.get(ORIGIN).map(|o| o.to_str().unwrap_or_default());
        // A page that was loaded without TLS may come from an attacker on the path.
        let needs_tls = proof.is_some();
        let is_ours = |origin: &str| match origin.split_once("://") {
            Some((scheme, of)) => of == host && (scheme == "https" || !needs_tls),
            None => false,
        };
        let is_elsewhere = proof.is_none() && !is_loopback(host);
        if origin.is_some_and(|origin| !is_ours(origin)) || is_elsewhere {
            let what = "this request came from a page of another site";
            let hint = match needs_tls {
                true => "open the page with https: and the host name of this server",
                false => "address the server as localhost, 127.0.0.1 or [::1]",
            };
            return Err(Error::new(ErrorKind::Denied, what).with_hint(hint).into());
        }
        Ok(Caller { identity, proof })
    }

    /// Returns whether the caller's token or certificate is still accepted.
    pub(crate) fn still_accepts(&self, caller: &Caller) -> bool {
        caller.proof.as_ref().is_none_or(|proof| {
            let found = self.table().find(proof);
            found.is_some_and(|identity| identity.name == caller.identity.name)
        })
    }

    /// Returns all identities, including the two that need no token, for metrics.
    pub(crate) fn identities(&self) -> Vec<Arc<Identity>> {
        let table = self.table();
        let named = table.rows.iter().map(|row| row.identity.clone());
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

fn unauthorized(what: String, hint: &str) -> Failure {
    let error = Error::new(ErrorKind::Denied, what).with_hint(hint.to_owned());
    Failure::from(error).with_status(StatusCode::UNAUTHORIZED)
}

/// Returns the state of a file, which differs after most changes.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
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
    let mut table = Table { rows: Vec::new(), read };
    for entry in file.identities {
        let Entry { name, token_sha256, certificate_names, prefixes, rights, quota } = entry;
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_word) {
            return Err(format!(
                "invalid name {name:?}: expected 1 to 64 letters, digits or any of -_.@"
            ));
        }
        let is_taken = |name: &str| ["local", "anonymous"].contains(&name);
        if is_taken(&name) || table.rows.iter().any(|other| other.identity.name == name) {
            return Err(format!("the name {name:?} is reserved or used twice"));
        }
        if prefixes.is_empty() {
            return Err(format!(r#"{name:?} has no prefixes; use "" for all locks"#));
        }
        let tokens: Option<Vec<Hash>> = token_sha256.iter().map(|hex| from_hex(hex)).collect();
        let Some(tokens) = tokens else {
            return Err(format!(
                "{name:?} has an invalid token_sha256: expected SHA-256 hashes of 64 hexadecimal digits"
            ));
        };
        if tokens.is_empty() && certificate_names.is_empty() {
            return Err(format!("{name:?} needs token_sha256 or certificate_names"));
        }
        if tokens.iter().any(|token| table.find(&Proof::Token(*token)).is_some()) {
            return Err(format!("{name:?} uses the same token as another identity"));
        }
        let certificate_names: Vec<String> =
            certificate_names.iter().map(|name| name.to_ascii_lowercase()).collect();
        let is_dns = |c: char| c.is_ascii_alphanumeric() || "-_.*".contains(c);
        let odd = |name: &&String| name.is_empty() || !name.chars().all(is_dns);
        if let Some(odd) = certificate_names.iter().find(odd) {
            return Err(format!(
                "{name:?} has the invalid certificate name {odd:?}: expected a DNS name"
            ));
        }
        if table.find(&Proof::Certificate(certificate_names.as_slice().into())).is_some() {
            return Err(format!("{name:?} has a certificate name of another identity"));
        }
        let same = before.rows.iter().find(|old| old.identity.name == name);
        let usage = same.map(|old| old.identity.usage.clone()).unwrap_or_default();
        let prefixes = prefixes.into_iter().map(Arc::from).collect();
        let identity = Arc::new(Identity { name, prefixes, rights, quota, usage });
        table.rows.push(Row { tokens, certificate_names, identity });
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
    /// Finds the identity that this proves: the first one in the file, if a certificate has names
    /// of several. Always compares all rows, so that the duration does not depend on a token.
    fn find(&self, proof: &Proof) -> Option<Arc<Identity>> {
        let mut found = None;
        for row in &self.rows {
            if row.has(proof) {
                found = found.or(Some(&row.identity));
            }
        }
        found.cloned()
    }
}

impl Row {
    fn has(&self, proof: &Proof) -> bool {
        match proof {
            Proof::Token(shown) => {
                let equal = self.tokens.iter().map(|token| token.ct_eq(shown));
                equal.fold(Choice::from(0), |any, this| any | this).into()
            }
            Proof::Certificate(names) => {
                names.iter().any(|name| self.certificate_names.contains(name))
            }
        }
    }
}

impl Identity {
    fn unlimited(name: &str) -> Arc<Self> {
        let quota =
            Quota { claims: usize::MAX, streams: usize::MAX, requests_per_second: u32::MAX };
        Arc::new(Self {
            name: name.to_owned(),
            prefixes: vec!["".into()],
            rights: Right::ALL.to_vec(),
            quota,
            usage: Arc::default(),
        })
    }

    /// Returns the prefix of the identity to which this lock belongs: the longest one, if there are
    /// several.
    fn prefix_of(&self, name: &Name) -> Option<&Arc<str>> {
        let of = self.prefixes.iter().filter(|prefix| name.as_str().starts_with(&***prefix));
        of.max_by_key(|prefix| prefix.len())
    }
}

impl Caller {
    /// Fails unless the identity has this right for this lock.
    pub(crate) fn check(&self, right: Right, name: &Name) -> Result<(), Failure> {
        self.check_right(right)?;
        if self.identity.prefix_of(name).is_some() {
            return Ok(());
        }
        Err(self.denied(format!("may not use the lock {name}")))
    }

    /// Fails unless the identity has this right for all locks with this prefix.
    pub(crate) fn check_all(&self, right: Right, prefix: &str) -> Result<(), Failure> {
        self.check_right(right)?;
        if self.identity.prefixes.iter().any(|p| prefix.starts_with(&**p)) {
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
            if prefix.starts_with(&**own) {
                return vec![prefix.to_owned()];
            }
            if own.starts_with(prefix) {
                all.push(own.to_string());
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
        self.identity.usage.count_request(&self.identity.quota)
    }

    /// Counts a stream until the result is dropped. Fails if the stream exceeds the quota.
    pub(crate) fn open_stream(&self) -> Result<Streaming, Failure> {
        self.identity.usage.open_stream(&self.identity.quota)
    }

    /// Counts a claim before it is sent to the store, until it is known to be gone or has expired.
    /// Returns whether it was not counted before. Fails if it exceeds the quota.
    pub(crate) fn count_claim(
        &self,
        id: ClaimId,
        name: &Name,
        lease: Duration,
    ) -> Result<bool, Failure> {
        let Some(prefix) = self.identity.prefix_of(name) else {
            return self.check(Right::Hold, name).map(|()| false);
        };
        self.identity.usage.count_claim(&self.identity.quota, id, prefix, lease)
    }

    /// Returns what the identity uses.
    pub(crate) fn usage(&self) -> &Usage {
        &self.identity.usage
    }

    /// Returns the ID under which the store has the claim to which the client gave this ID. If a
    /// client uses one ID for several locks, these are different claims, and each is counted.
    pub(crate) fn stored(&self, id: ClaimId, lock: &Name) -> ClaimId {
        let (identity, lock) = (self.identity.name.as_bytes(), lock.as_str().as_bytes());
        let digest = digest(&[b"leasehold claim", identity, lock, &id.as_u128().to_be_bytes()]);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(prefixes: &[&str]) -> Caller {
        let mut identity = Arc::into_inner(Identity::unlimited("x")).unwrap();
        identity.prefixes = prefixes.iter().map(|prefix| Arc::from(*prefix)).collect();
        Caller { identity: Arc::new(identity), proof: None }
    }

    #[test]
    fn prefixes_are_listed_once_and_within_the_identity() {
        let all = caller(&[""]);
        assert_eq!(all.prefixes_of(""), [""]);
        assert_eq!(all.prefixes_of("a"), ["a"]);
        let some = caller(&["b:", "a:", "a:x"]);
        assert_eq!(some.prefixes_of(""), ["a:", "b:"]);
        assert_eq!(some.prefixes_of("a:x"), ["a:x"]);
        assert_eq!(some.prefixes_of("c"), [""; 0]);
    }

    #[test]
    fn a_lock_belongs_to_the_longest_prefix() {
        let some = caller(&["a:", "a:x", "b:"]);
        let of = |name| some.identity.prefix_of(&Name::new(name).unwrap()).map(|p| &**p);
        assert_eq!([of("a:xy"), of("a:y"), of("c")], [Some("a:x"), Some("a:"), None]);
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
