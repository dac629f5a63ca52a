//! A file store that several users of the machine share, and users without access to it.
//!
//! Child processes of this test become other users, which only root can do. If the tests run as
//! another user, they print that and do nothing.
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use leasehold::store::file::FileStore;
use leasehold::store::{Claim, Evict, Joined, Mode, Store};
use leasehold::{ErrorKind, Kind, Name};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use tokio::runtime::{Handle, Runtime};

/// Two members of the team, and a user outside it.
const ANN: u32 = 61_001;
const BOB: u32 = 61_002;
const EVE: u32 = 61_666;
const TEAM: u32 = 62_000;

const ROLE: &str = "LEASEHOLD_TEST_SHARED";
const USER: &str = "LEASEHOLD_TEST_USER";
const MARK: &str = "child> ";

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn open(root: &Path) -> leasehold::Result<Arc<FileStore>> {
    FileStore::open(&format!("file:{}", root.display()), &Handle::current())
}

fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

/// Returns whether the test can become other users. Prints a message if not.
fn may_become_others() -> bool {
    let may = Uid::effective().is_root();
    if !may {
        eprintln!("skipped: only root can become another user");
    }
    may
}

/// A directory that all users can reach, which contains a test's files.
struct Ground {
    dir: tempfile::TempDir,
}

impl Ground {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    fn store(&self, owner: u32, group: u32, mode: u32) -> PathBuf {
        self.directory("store", owner, group, mode)
    }

    fn directory(&self, name: &str, owner: u32, group: u32, mode: u32) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::create_dir(&path).unwrap();
        chown(&path, Some(owner), Some(group)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }
}

/// Another user's process on a store.
struct Other {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Other {
    /// Starts a process as this user, in a group with the same number, and in the team if the user
    /// is a member.
    fn start(user: u32, root: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file_sharing::child_process_of_another_user", "--nocapture"])
            .env(ROLE, root)
            .env(USER, user.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, orders, answers }
    }

    fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        loop {
            let mut line = String::new();
            assert!(
                self.answers.read_line(&mut line).unwrap() > 0,
                "the helper ended during {order:?}"
            );
            if let Some(at) = line.find(MARK) {
                return line[at + MARK.len()..].trim().to_owned();
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn become_user(user: u32) {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    let team = [Gid::from_raw(TEAM)];
    setgroups(if user == EVE { &[] } else { &team }).unwrap();
    setresgid(gid, gid, gid).unwrap();
    setresuid(uid, uid, uid).unwrap();
    // Careful users have this umask.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

fn serve(root: &Path) {
    let runtime = runtime();
    let _context = runtime.enter();
    let mut store = None;
    let mut held: Vec<Claim> = Vec::new();
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let words: Vec<&str> = order.split(' ').collect();
        let message = |e: leasehold::Error| format!("{:?}: {e:#}", e.kind());
        let answer = match (&words[..], &store) {
            (["open"], _) => match open(root) {
                Ok(opened) => {
                    store = Some(opened);
                    "open".to_owned()
                }
                Err(e) => message(e),
            },
            // The optional argument is a token that the next one must exceed.
            (["try", name, seen @ ..], Some(store)) => {
                let mut c = claim(name);
                c.seen = seen.first().map_or(0, |seen| seen.parse().unwrap());
                match runtime.block_on(store.join(&c, Mode::Try)) {
                    Ok(Joined::Holding { token, .. }) => {
                        held.push(c);
                        format!("held {token}")
                    }
                    Ok(_) => "busy".into(),
                    Err(e) => message(e),
                }
            }
            (["leave", name], Some(store)) => {
                let mut left = "nothing".to_owned();
                for c in held.extract_if(.., |c| c.name.as_str() == *name) {
                    left = match runtime.block_on(store.leave(&c, None)) {
                        Ok(was) => format!("left {was}"),
                        Err(e) => message(e),
                    };
                }
                left
            }
            (["list"], Some(store)) => {
                let locks = runtime.block_on(store.list("")).unwrap();
                let names: Vec<_> = locks.iter().map(|l| l.name.as_str().to_owned()).collect();
                names.join(" ")
            }
            (["unlink", path], _) => match fs::remove_file(root.join(path)) {
                Ok(()) => "unlinked".into(),
                Err(e) => e.kind().to_string(),
            },
            _ => panic!("unknown order {order:?}"),
        };
        println!("\n{MARK}{answer}");
    }
}

#[test]
fn child_process_of_another_user() {
    let (Some(root), Ok(user)) = (std::env::var_os(ROLE), std::env::var(USER)) else { return };
    become_user(user.parse().unwrap());
    serve(&PathBuf::from(root));
}

fn token(answer: &str) -> u64 {
    answer.strip_prefix("held ").unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
}

/// Returns the FIFOs in the store.
fn sessions(root: &Path) -> Vec<String> {
    let all = fs::read_dir(root.join("clients")).unwrap();
    all.map(|entry| format!("clients/{}", entry.unwrap().file_name().display())).collect()
}

/// Checks everything that all users of a shared store must be able to do, whichever user created
/// the files.
fn works_for(root: &Path, others: &mut [Other]) {
    let far = leasehold_wall() + 7_200_000_000;
    let mut last = 0;
    let long = "long/".repeat(100);
    let mut rises = |token: u64| {
        assert!(token > last);
        last = token;
    };
    for other in &mut *others {
        assert_eq!(other.ask("open"), "open", "{root:?}");
    }
    for round in 0..2 {
        for i in 0..others.len() {
            for name in ["x", "order:42", &long] {
                // Each of these tokens makes it necessary to raise the ceiling.
                let seen = far * (1 + round) + u64::try_from(i).unwrap() * 600_000_000;
                let taken = others[i].ask(&format!("try {name} {seen}"));
                if name == "x" {
                    rises(token(&taken));
                }
                assert!(taken.starts_with("held "), "{taken}");
                for (j, other) in others.iter_mut().enumerate() {
                    let answer = other.ask(&format!("try {name}"));
                    assert_eq!(answer, "busy", "{j} beside {i} on {name:?}");
                }
            }
            for name in ["x", "order:42", &long] {
                assert_eq!(others[i].ask(&format!("leave {name}")), "left true");
            }
        }
    }
}

fn leasehold_wall() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

// F05
#[test]
fn only_the_group_can_use_its_shared_directory() {
    if !may_become_others() {
        return;
    }
    for (owner, mode) in [(0, 0o2775), (0, 0o2770), (0, 0o770), (0, 0o3770), (ANN, 0o2770)] {
        let ground = Ground::new();
        let root = ground.store(owner, TEAM, mode);
        let mut team = [Other::start(ANN, &root), Other::start(BOB, &root)];
        works_for(&root, &mut team);
        let mut eve = Other::start(EVE, &root);
        let refused = eve.ask("open");
        assert!(refused.starts_with("Denied"), "{mode:o}: {refused}");
        let inside = sessions(&root);
        assert_eq!(eve.ask(&format!("unlink {}", inside[0])), "permission denied");
        assert_eq!(eve.ask("unlink tokens"), "permission denied");
        // The other users find that a killed process is dead.
        let [mut ann, mut bob] = team;
        token(&ann.ask("try dead"));
        ann.kill();
        token(&bob.ask("try dead"));
        // The result does not depend on which user came first.
        let mut ann = Other::start(ANN, &root);
        assert_eq!(ann.ask("open"), "open");
        assert_eq!(ann.ask("list"), "dead");
        assert_eq!(ann.ask("try dead"), "busy");
    }
}

// F05
#[test]
fn sticky_directory_is_shared_but_users_delete_only_their_files() {
    if !may_become_others() {
        return;
    }
    let ground = Ground::new();
    let root = ground.store(0, 0, 0o1777);
    let mut all = [ANN, BOB, EVE].map(|user| Other::start(user, &root));
    works_for(&root, &mut all);
    let [mut ann, mut bob, eve] = all;
    token(&bob.ask("try kept"));
    let others = sessions(&root);
    let refused = others.iter().filter(|path| {
        // Ann came first, so the subdirectory belongs to her. Eve has the same relation to it as
        // Bob.
        let by = Other::start(EVE, &root).ask(&format!("unlink {path}"));
        by == "operation not permitted" || by == "permission denied"
    });
    assert_eq!(refused.count(), 2, "Eve must not delete other users' files");
    assert_eq!(ann.ask("try kept"), "busy");
    drop(eve);
    // A FIFO that cannot be unlinked still counts as dead.
    bob.kill();
    let mut eve = Other::start(EVE, &root);
    assert_eq!(eve.ask("open"), "open");
    token(&eve.ask("try kept"));
}

// F05
#[test]
fn advice_of_doctor_fixes_the_permissions() {
    if !may_become_others() {
        return;
    }
    let ground = Ground::new();
    let root = ground.store(0, 0, 0o777);
    works_for(&root, &mut [ANN, BOB, EVE].map(|user| Other::start(user, &root)));
    let runtime = runtime();
    let _context = runtime.enter();
    let advice = || {
        let found = runtime.block_on(open(&root).unwrap().diagnose()).unwrap();
        found.into_iter().find(|f| f.id == "rights").map(|f| f.fix.into_owned())
    };
    let advised = advice().expect("doctor does not report that all users may delete locks");
    assert!(advised.contains("chgrp GROUP") && advised.contains("chmod 2770"), "{advised}");
    chown(&root, None, Some(TEAM)).unwrap();
    fs::set_permissions(&root, Permissions::from_mode(0o2770)).unwrap();
    assert_eq!(advice(), None);
    // Any user may come first.
    works_for(&root, &mut [BOB, ANN].map(|user| Other::start(user, &root)));
    let refused = Other::start(EVE, &root).ask("open");
    assert!(refused.starts_with("Denied"), "{refused}");
}

/// Returns everything below a directory.
fn below(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned()];
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        match fs::symlink_metadata(&path).unwrap().is_dir() {
            true => found.extend(below(&path)),
            false => found.push(path),
        }
    }
    found
}

// F05
#[test]
fn root_leaves_no_inaccessible_files_in_a_users_store() {
    if !may_become_others() {
        return;
    }
    let runtime = runtime();
    let _context = runtime.enter();
    for (group, mode) in [(ANN, 0o700), (TEAM, 0o2770)] {
        let ground = Ground::new();
        let root = ground.store(ANN, group, mode);
        let (held, other, long) = (claim("held"), claim("other"), claim(&"long/".repeat(100)));
        let store = open(&root).unwrap();
        runtime.block_on(async {
            for c in [&held, &other, &long] {
                assert!(matches!(store.join(c, Mode::Try).await.unwrap(), Joined::Holding { .. }));
            }
            store.leave(&other, None).await.unwrap();
        });
        for path in below(&root) {
            let seen = fs::symlink_metadata(&path).unwrap();
            assert_eq!((seen.uid(), seen.gid()), (ANN, group), "{path:?}");
        }
        let mut ann = Other::start(ANN, &root);
        assert_eq!(ann.ask("open"), "open");
        assert_eq!(ann.ask("try held"), "busy");
        token(&ann.ask("try other"));
        let busy = runtime.block_on(store.join(&claim("other"), Mode::Try)).unwrap();
        assert!(matches!(busy, Joined::Busy { .. }));
        assert_eq!(runtime.block_on(store.evict(&other.name, Evict::Holders)).unwrap(), 1);
        drop(store);
        token(&ann.ask("try held"));
    }
    // The process has its own user again.
    assert!(Uid::effective().is_root());
    let probe = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(probe.as_file().metadata().unwrap().uid(), 0);
}

// F05
#[test]
fn store_prepared_by_another_user_is_rejected() {
    if !may_become_others() {
        return;
    }
    let runtime = runtime();
    let _context = runtime.enter();
    let ground = Ground::new();
    let tmp = ground.directory("tmp", 0, 0, 0o1777);
    let guessed = tmp.join(format!("leasehold-{ANN}"));
    fs::create_dir(&guessed).unwrap();
    let is_refused = |what: &str| {
        let error = open(&guessed).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{what}: {error}");
        let reply = Other::start(ANN, &guessed).ask("open");
        assert!(
            reply.starts_with("Config")
                && reply.contains("belongs to user")
                && !reply.contains("  "),
            "{what}: {reply}"
        );
    };
    for mode in [0o777, 0o1777, 0o2770] {
        chown(&guessed, Some(EVE), Some(TEAM)).unwrap();
        fs::set_permissions(&guessed, Permissions::from_mode(mode)).unwrap();
        is_refused(&format!("{mode:o}"));
    }
    // Eve's link leads to Ann's own directory.
    fs::remove_dir(&guessed).unwrap();
    let own = ground.directory("own", ANN, ANN, 0o700);
    symlink(&own, &guessed).unwrap();
    std::os::unix::fs::lchown(&guessed, Some(EVE), Some(EVE)).unwrap();
    is_refused("a link");
    // No other user could have put this directory there, but all users may write to it.
    let open_to_all = ground.directory("open", EVE, EVE, 0o1777);
    let reply = Other::start(ANN, &open_to_all).ask("open");
    assert!(reply.starts_with("Config") && reply.contains("belongs to user"), "{reply}");
    // Ann's own directory is accepted.
    fs::remove_file(&guessed).unwrap();
    let mut ann = Other::start(ANN, &guessed);
    assert_eq!(ann.ask("open"), "open");
    token(&ann.ask("try x"));
}

// F05
#[test]
fn owner_grants_a_group_access_to_an_existing_store() {
    if !may_become_others() {
        return;
    }
    let ground = Ground::new();
    let root = ground.store(ANN, ANN, 0o700);
    let mut ann = Other::start(ANN, &root);
    assert_eq!(ann.ask("open"), "open");
    token(&ann.ask("try held"));
    chown(&root, None, Some(TEAM)).unwrap();
    fs::set_permissions(&root, Permissions::from_mode(0o2770)).unwrap();
    // Until Ann uses the store again, the error shows other users that the file is hers.
    let reply = Other::start(BOB, &root).ask("open");
    assert!(reply.starts_with("Denied") && reply.contains(&ANN.to_string()), "{reply}");
    let mut again = Other::start(ANN, &root);
    assert_eq!(again.ask("open"), "open");
    assert_eq!(again.ask("try held"), "busy");
    let mut bob = Other::start(BOB, &root);
    assert_eq!(bob.ask("open"), "open");
    assert_eq!(bob.ask("try held"), "busy");
    token(&bob.ask("try other"));
    assert_eq!(ann.ask("leave held"), "left true");
    token(&bob.ask("try held"));
}
