//! Locks in a git repository, `git:/srv/locks.git`, for all processes on its machine. This is a
//! third party's store in 130 lines. `leasehold-cell` provides queues, tokens, sessions and waiters
//! on anything that can write a value if it has not changed since it was read. Only the reads and
//! writes are specific to git.
//!
//! ```no_run
//! # async fn example() -> leasehold_core::Result<()> {
//! use leasehold_core::{Builder, Registry};
//! let registry = Registry::default().with("git", &["git"], own_cell::open);
//! let locks = Builder::new(registry).connect("git:/srv/locks.git").await?;
//! let guard = locks.mutex("deploy").lock().await?;
//! # drop(guard); Ok(()) }
//! ```
//!
//! A value is a ref, `refs/leasehold/…`, that points at a blob.
//!
//! **Atomicity.** `git update-ref REF NEW OLD` does nothing if the ref is not OLD. The blob is
//! written before. A process that crashes in between leaves a blob that `git gc` removes. Each
//! value begins with a random line from `leasehold-cell`, so every state is a new object, and no
//! version occurs twice.
//!
//! **Clock.** Times come from the machine's boot clock, which all its processes share and which
//! cannot be set. Each blob contains the ID of the boot and the time at which it was written, so
//! one read shows its age. A restart of the machine ends all sessions. A power cut may damage what
//! git wrote last, which git then reports.
//!
//! **Lost replies.** These cannot occur, because git is a child process that exits when it is done.
//! If it is killed during a write, it may leave a `.lock` file, which the error then names.
//!
//! **Dropped futures.** git continues, and the write may be executed, as `leasehold-cell` expects.
//!
//! **Costs.** A read is one process and a write is two, at some milliseconds each. This is fast
//! enough for builds and deployments, but not for long queues. `git gc` removes old values, which
//! are a small blob for each change and each renewal.

use std::io::{Error as Io, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_cell::lasting::{Lasting, Value, Values};
use leasehold_cell::{CellStore, Cells, Options, Version, promises};
use leasehold_core::kit::{boot_id, identity_of};
use leasehold_core::store::{Durability, Store, StoreInfo, Survival};
use leasehold_core::{Clock, Error, ErrorKind, Moment, Opening, Result};
use tokio::runtime::Handle;

/// The beginning of a blob, followed by the ID of the boot and the time at which the blob was
/// written.
const START: &str = "leasehold git 1 ";

/// Opens the store of a `git:` URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move {
        let path = PathBuf::from(url.strip_prefix("git:").unwrap_or_default());
        let identity = identity_of("git", &path);
        let git = Git { path, boot: boot_id(), clock: Clock::default(), runtime: runtime.clone() };
        let what = "a git: store is git:/a/repository that is there: git init --bare makes one";
        let there = git.aside(|git| git.say(&["rev-parse", "--git-dir"], b"")).await;
        there.map_err(|e| Error::new(ErrorKind::Config, what).with_source(e))?;
        // A ref is a file, and its name gets the suffix `.lock` while it is written.
        let cells = Lasting::new(git, 200, 1 << 20, Duration::ZERO);
        let options = Options { prefix: String::new(), ..Options::default() };
        let mut promised = promises(cells.system(), &options);
        (promised.grant, promised.token) = (Durability::Machine, Durability::Machine);
        promised.on_store_crash = Survival::NotApplicable;
        promised.on_failover = Survival::NotApplicable;
        promised.on_partition = Survival::NotApplicable;
        let info = StoreInfo::new(url, promised).identified(identity);
        Ok(Arc::new(CellStore::new(Arc::new(cells), options, info, &runtime)) as Arc<dyn Store>)
    })
}

/// The values of one repository.
#[derive(Clone, Debug)]
struct Git {
    path: PathBuf,
    boot: String,
    clock: Clock,
    runtime: Handle,
}

#[async_trait]
impl Values for Git {
    async fn get(&self, key: &str) -> Result<Option<Value>> {
        let name = ref_of(key);
        self.aside(move |git| git.look(&name)).await
    }

    async fn put(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> Result<Option<Version>> {
        let (name, old) = (ref_of(key), on.map_or(String::new(), |version| version.0.clone()));
        self.aside(move |git| git.write(&name, &bytes, &old)).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let name = ref_of(key);
        self.aside(move |git| git.say(&["update-ref", "-d", &name], b"").map(drop)).await
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let words = ["for-each-ref", "--format=%(refname:lstrip=2)", "refs/leasehold/"];
        let keys = self.aside(move |git| git.say(&words, b"")).await?;
        let keys = text(&keys).replace('/', ":");
        Ok(keys.lines().filter(|key| key.starts_with(prefix)).map(str::to_owned).collect())
    }
}

impl Git {
    /// Runs the work on a thread that may block.
    async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce(Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let git = self.clone();
        let ended = |_| Error::new(ErrorKind::Closed, "the client has ended: connect again");
        self.runtime.spawn_blocking(move || work(git)).await.map_err(ended)?
    }

    /// Reads a ref. git prints OBJECT TYPE SIZE as a line, then the content, or that the ref is
    /// missing.
    fn look(&self, name: &str) -> Result<Option<Value>> {
        let reply = self.say(&["cat-file", "--batch"], name.as_bytes())?;
        let (head, blob) = line(&reply);
        let [object, _, _] = head.split(' ').collect::<Vec<_>>()[..] else { return Ok(None) };
        let blob = blob.strip_suffix(b"\n").unwrap_or(blob);
        let (mark, value) = line(blob);
        let written = mark.strip_prefix(START).and_then(|mark| mark.split_once(' '));
        // A foreign value is returned unchanged.
        let bytes = if written.is_some() { value } else { blob }.to_vec();
        let age = written.map(|(boot, nanos)| match nanos.parse() {
            Ok(nanos) if boot == self.boot => self.clock.now().since(Moment::from_nanos(nanos)),
            _ => Duration::MAX,
        });
        Ok(Some(Value { bytes, version: Version(object.to_owned()), age }))
    }

    fn write(&self, name: &str, bytes: &[u8], old: &str) -> Result<Option<Version>> {
        let mark = format!("{START}{} {}\n", self.boot, self.clock.now().as_nanos());
        let blob = [mark.as_bytes(), bytes].concat();
        let object = text(&self.say(&["hash-object", "-w", "--stdin"], &blob)?).trim().to_owned();
        let Err(error) = self.say(&["update-ref", name, &object, old], b"") else {
            return Ok(Some(Version(object)));
        };
        // The write failed. Either the ref is not the old one, or the write was done and git failed
        // after it.
        match self.look(name)?.map_or(String::new(), |value| value.version.0) {
            now if now == object => Ok(Some(Version(object))),
            now if now == old => Err(error),
            _ => Ok(None),
        }
    }

    /// Runs git and returns its output.
    fn say(&self, words: &[&str], input: &[u8]) -> Result<Vec<u8>> {
        let mut git = Command::new("git");
        // Variables of a hook or a shell could select another repository.
        git.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        git.args(["-c", "core.filesRefLockTimeout=1000", "--git-dir"]).arg(&self.path).args(words);
        git.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut git = git.spawn().map_err(failed)?;
        // If git has exited early, its error message explains why.
        let _ = git.stdin.take().map(|mut stdin| stdin.write_all(input));
        let out = git.wait_with_output().map_err(failed)?;
        let failure = || failed(Io::other(line(&out.stderr).0.to_owned()));
        if out.status.success() { Ok(out.stdout) } else { Err(failure()) }
    }
}

fn failed(why: Io) -> Error {
    let what = "git cannot read or write the repository: see what it says";
    Error::new(ErrorKind::Unreachable, what).with_source(why)
}

/// Returns the ref of a key. Only lock names contain these characters, and an additional escape
/// there does not change the name.
fn ref_of(key: &str) -> String {
    let part = key.replace('.', "%2E").replace('~', "%7E").replace(':', "/");
    format!("refs/leasehold/{part}")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the first line, or an empty text if it is not UTF-8, and the rest.
fn line(bytes: &[u8]) -> (&str, &[u8]) {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    let rest = bytes.get(end + 1..).unwrap_or_default();
    (std::str::from_utf8(&bytes[..end]).unwrap_or_default(), rest)
}
