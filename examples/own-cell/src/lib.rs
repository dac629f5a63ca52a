//! Locks in a git repository: `git:/srv/locks.git`, for all who work on the machine that has it. A third party's store
//! in 190 lines: whatever can write a value if it is still what was read keeps queues, tokens and waiters by
//! `leasehold-cell`, and all that remains to be told is how that is done there.
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
//! A cell is a ref, `refs/leasehold/…`, that points at a blob.
//!
//! **What is atomic**: `git update-ref REF NEW OLD`, which does nothing if the ref is not OLD. The blob is there before;
//! whoever dies in between leaves a blob that `git gc` removes. A random number in each blob makes
//! every state of a cell another object, so that no version comes again.
//!
//! **Whose clock**: the machine's boot clock, which all its processes share and nobody can set. A session's blob says in
//! which boot it ends, and when. Whoever finds it over removes it, if it is still what was seen: a touch that comes later
//! finds nothing to replace. So nobody is taken for dead by a look alone.
//! A restart of the machine ends all sessions; a power cut may damage what git wrote last, which it then says.
//!
//! **If this reply is lost**: there is none to lose, for git is a child that ends when it is done; killed in the middle, it
//! may leave a `.lock` file, of which the error then tells.
//!
//! **If this future is dropped**: git goes on, and the write may be done: as `leasehold-cell` expects.
//!
//! **What it costs**: a look asks a `git cat-file` that the client keeps; a write is two processes, some milliseconds each:
//! for builds and deploys, not for crowds. What was written before is left to `git gc`, a small blob for each change and each heartbeat.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_cell::{
    Answer, CellStore, Cells, Found, Options, Request, System, Version, promises,
};
use leasehold_core::kit::{boot_id, identity_of, locked};
use leasehold_core::store::{Durability, Store, StoreInfo, Survival};
use leasehold_core::{ClaimId, Clock, Error, ErrorKind, Moment, Opening, Result};
use tokio::runtime::Handle;

/// What git is like. A ref is a file, and `.lock` stands behind its name while it is written.
const SYSTEM: System = System::lasting(200, 1 << 20);

/// What a cell's blob begins with; then a random number, the boot and the moment in which it ends.
const START: &str = "leasehold git 1 ";

/// Opens the store of a `git:` URL: what a [`Registry`](leasehold_core::Registry) wants.
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move {
        let path = PathBuf::from(url.strip_prefix("git:").unwrap_or_default());
        let identity = identity_of("git", &path);
        let (clock, runs, reader) = (Clock::default(), runtime.clone(), Arc::default());
        let git = Git { path, boot: boot_id(), clock, runtime: runs, reader };
        git.say(&["rev-parse", "--git-dir"], b"").map_err(|e| {
            let what = "a git: store is git:/a/repository that is there: git init --bare makes one";
            Error::new(ErrorKind::Config, what).because(e)
        })?;
        let options = Options { prefix: String::new(), ..Options::default() };
        let mut promised = promises(&SYSTEM, &options);
        (promised.grant, promised.token) = (Durability::Machine, Durability::Machine);
        promised.on_store_crash = Survival::NotApplicable;
        promised.on_failover = Survival::NotApplicable;
        promised.on_partition = Survival::NotApplicable;
        let info = StoreInfo::new(url, promised).identified(identity);
        Ok(Arc::new(CellStore::new(Arc::new(git), options, info, &runtime)) as Arc<dyn Store>)
    })
}

/// The cells of one repository.
#[derive(Clone, Debug)]
struct Git {
    path: PathBuf,
    boot: String,
    clock: Clock,
    runtime: Handle,
    reader: Arc<Mutex<Option<Reader>>>,
}

/// A `git cat-file` that answers until the client is gone.
#[derive(Debug)]
struct Reader {
    git: Child,
    said: BufReader<ChildStdout>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.git.kill().and_then(|()| self.git.wait());
    }
}

impl Reader {
    /// The object that a ref points at, and what is in it: OBJECT TYPE SIZE, a line of its own, and the content.
    fn ask(&mut self, name: &str) -> io::Result<Option<(String, Vec<u8>)>> {
        let mut head = String::new();
        self.git.stdin.as_mut().map(|stdin| writeln!(stdin, "{name}")).transpose()?;
        self.said.read_line(&mut head)?;
        let words: Vec<&str> = head.split_whitespace().collect();
        let [object, _, size] = words[..] else {
            let is_missing = words == [name, "missing"];
            return if is_missing { Ok(None) } else { Err(io::Error::other(head)) };
        };
        let mut content = vec![0; size.parse::<usize>().map_err(io::Error::other)? + 1];
        self.said.read_exact(&mut content)?;
        content.pop();
        Ok(Some((object.to_owned(), content)))
    }
}

#[async_trait]
impl Cells for Git {
    fn system(&self) -> &System {
        &SYSTEM
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let git = self.clone();
        let all = move || requests.into_iter().map(|request| git.one(request)).collect();
        let ended = |_| Error::new(ErrorKind::Closed, "the client has ended: connect again");
        self.runtime.spawn_blocking(all).await.map_err(ended)?
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let words = ["for-each-ref", "--format=%(refname:lstrip=2)", "refs/leasehold/"];
        let keys = text(&self.say(&words, b"")?).replace('/', ":");
        Ok(keys.lines().filter(|key| key.starts_with(prefix)).map(str::to_owned).collect())
    }
}

impl Git {
    fn one(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Get { key } => Ok(self.look(&key)?.map_or(Answer::Absent, Answer::Found)),
            // What is over is not in its way any more once it was looked at.
            Request::Create { key, value, lives } => match self.look(&key)? {
                None => self.write(&key, &value, lives, ""),
                Some(_) => Ok(Answer::Refused),
            },
            Request::Replace { key, value, version, lives } => {
                self.write(&key, &value, lives, &version.0)
            }
            Request::Touch { key, value, version, lives } => {
                self.write(&key, &value, Some(lives), &version.0)
            }
            Request::Remove { key, version } => {
                self.update(&key, &["update-ref", "-d", &ref_of(&key), &version.0], Answer::Done)
            }
        }
    }

    fn object(&self, key: &str) -> Result<Option<(String, Vec<u8>)>> {
        let mut kept = locked(&self.reader);
        // One that fails is gone, and the next is asked anew.
        let mut reader = match kept.take() {
            Some(reader) => reader,
            None => self.reads().map_err(failed)?,
        };
        let object = reader.ask(&ref_of(key)).map_err(failed)?;
        *kept = Some(reader);
        Ok(object)
    }

    fn reads(&self) -> io::Result<Reader> {
        let mut git = self.git(&["cat-file", "--batch"])?;
        // Nobody listens to warnings.
        drop(git.stderr.take());
        let said = git.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Reader { git, said: BufReader::new(said) })
    }

    /// What is there and has not ended.
    fn look(&self, key: &str) -> Result<Option<Found>> {
        let Some((object, content)) = self.object(key)? else { return Ok(None) };
        // What is not ours is shown as it is.
        let (boot, ends, value) = parsed(&content).unwrap_or(("", Moment::NEVER, &content));
        let now = if boot == self.boot { self.clock.now() } else { Moment::NEVER };
        let remaining = (ends < Moment::NEVER).then(|| ends.since(now));
        let (value, version) = (value.to_vec(), Version(object));
        if remaining != Some(Duration::ZERO) {
            return Ok(Some(Found { value, version, remaining }));
        }
        let removed = self.one(Request::Remove { key: key.to_owned(), version })?;
        if removed == Answer::Refused { self.look(key) } else { Ok(None) }
    }

    fn write(&self, key: &str, value: &[u8], life: Option<Duration>, old: &str) -> Result<Answer> {
        // Two processes in vain are dear.
        if !self.is(key, old)? {
            return Ok(Answer::Refused);
        }
        let ends = life.map_or(Moment::NEVER, |life| self.clock.now().plus(life)).as_nanos();
        let head = format!("{START}{} {} {ends}\n", ClaimId::random()?.to_hex(), self.boot);
        let blob = [head.as_bytes(), value].concat();
        let object = text(&self.say(&["hash-object", "-w", "--stdin"], &blob)?).trim().to_owned();
        let done = Answer::Written(Version(object.clone()));
        self.update(key, &["update-ref", &ref_of(key), &object, old], done)
    }

    /// What an update comes to. One that fails was refused if the ref is not what it was to be, the last word.
    fn update(&self, key: &str, words: &[&str], done: Answer) -> Result<Answer> {
        let Err(error) = self.say(words, b"") else { return Ok(done) };
        let is_still = words.last().is_some_and(|old| self.is(key, old).unwrap_or(true));
        if is_still { Err(error) } else { Ok(Answer::Refused) }
    }

    fn is(&self, key: &str, old: &str) -> Result<bool> {
        Ok(self.object(key)?.map_or(old.is_empty(), |(object, _)| object == old))
    }

    /// Runs git; what it prints.
    fn say(&self, words: &[&str], input: &[u8]) -> Result<Vec<u8>> {
        let mut git = self.git(words).map_err(failed)?;
        // One that has ended early says why.
        let _ = git.stdin.take().map(|mut stdin| stdin.write_all(input));
        let out = git.wait_with_output().map_err(failed)?;
        let why =
            || failed(io::Error::other(text(&out.stderr).lines().take(1).collect::<String>()));
        out.status.success().then_some(()).ok_or_else(why).map(|()| out.stdout)
    }

    fn git(&self, words: &[&str]) -> io::Result<Child> {
        let mut git = Command::new("git");
        // What a hook or a shell has set would lead it elsewhere.
        git.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        git.args(["-c", "core.filesRefLockTimeout=1000", "--git-dir"]).arg(&self.path).args(words);
        git.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    }
}

fn failed(why: io::Error) -> Error {
    let what = "git cannot read or write the repository: see what it says";
    Error::new(ErrorKind::Unreachable, what).because(why)
}

/// A cell's ref. What is escaped here stands in names alone, where an escape more means the same.
fn ref_of(key: &str) -> String {
    let part = key.replace('.', "%2E").replace('~', "%7E").replace(':', "/");
    format!("refs/leasehold/{part}")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// In which boot it ends and when, and what is in it.
fn parsed(content: &[u8]) -> Option<(&str, Moment, &[u8])> {
    let end = content.iter().position(|byte| *byte == b'\n')?;
    let line = std::str::from_utf8(&content[..end]).ok()?.strip_prefix(START)?;
    let (boot, ends) = line.split_once(' ')?.1.split_once(' ')?;
    Some((boot, Moment::from_nanos(ends.parse().ok()?), &content[end + 1..]))
}
