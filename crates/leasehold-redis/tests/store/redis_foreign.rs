//! Keys of other programs: redis-py, Redisson and the common recipe on a shared key, other versions
//! of leasehold, keys that are not locks, and deleted keys.
//!
//! The Python code is in `redis_foreign.py`. `./test.sh` creates its environment.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::redis_common::*;
use leasehold::store::{Evict, Joined, Mode, Renewal};
use leasehold::{ErrorKind, Kind};
use leasehold_test_support::*;
use testbed::Redis;

/// redis-py in a separate process, with one command and one reply per line.
struct Python {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Python {
    fn start(server: &Redis) -> Self {
        let mut command = Command::new(testbed::python());
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/redis_foreign.py"));
        command.arg(server.port().to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("cannot start python");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("python does not read its input");
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("python does not reply");
        line.trim().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.answer()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // The process may have exited on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// S27
#[test]
fn redis_py_and_leasehold_exclude_each_other() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let mut python = Python::start(&server);
        // The Python client holds the lock.
        assert_eq!(python.ask("try shared 60"), "True");
        let error = locks.mutex("shared").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("shared").lock().await }
        });
        until_waiting(&locks, "shared", 1).await;
        assert_eq!(python.ask("extend 60"), "True");
        assert!(!waiter.is_finished());
        assert_eq!(python.ask("release"), "released");
        // Leasehold holds the lock.
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert_eq!(python.ask("try shared 60"), "False");
        // The Python client's release does not affect a lock that it does not hold.
        assert_eq!(python.ask("steal shared"), "LockNotOwnedError");
        assert!(guard.is_held());
        python.send("wait shared 60");
        release(guard).await;
        assert_eq!(python.answer(), "True");
        assert_eq!(python.ask("release"), "released");
        // The lock is free when the Python client's key expires.
        assert_eq!(python.ask("try shared 0.3"), "True");
        let guard = locks.mutex("shared").lock().await.unwrap();
        assert_eq!(python.ask("release"), "LockNotOwnedError");
        assert!(guard.is_held());
        release(guard).await;
        // A key without an expiry, which is redis-py's default, is reported.
        assert_eq!(python.ask("try endless none"), "True");
        let error = locks.mutex("endless").lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Corrupt, "s3cret");
        assert_eq!(python.ask("release"), "released");
        release(locks.mutex("endless").lock().await.unwrap()).await;
    });
}

// S27
#[test]
fn foreign_client_and_leasehold_count_exactly() {
    const ROUNDS: usize = 40;
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let mut python = Python::start(&server);
        server.command(&["SET", "count", "0"]);
        python.send(&format!("count shared {ROUNDS}"));
        let mut done = 0;
        let mut waited = 0;
        let answer = tokio::task::spawn_blocking(move || (python.answer(), python));
        while done < ROUNDS || !answer.is_finished() {
            let guard = locks.mutex("shared").lock().await.unwrap();
            let read: u64 = server.command(&["GET", "count"]).parse().unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
            server.command(&["SET", "count", &(read + 1).to_string()]);
            release(guard).await;
            (done, waited) = (done + 1, waited + usize::from(!answer.is_finished()));
            // A foreign client tries periodically. It has no place in the queue.
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let (counted, _python) = answer.await.unwrap();
        assert_eq!(counted, ROUNDS.to_string());
        assert!(waited > 0, "leasehold never had to wait for redis-py");
        assert_eq!(server.command(&["GET", "count"]), (done + ROUNDS).to_string());
    });
}

// S27
#[test]
fn a_foreign_holder_is_respected_and_refused() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        // The recipe of other libraries is run by hand. The foreign client holds, and leasehold
        // waits.
        let held = server.command(&["SET", "shared", "foreign", "NX", "PX", "60000"]);
        assert_eq!(held, "OK");
        let error = locks.mutex("shared").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("shared").lock().await }
        });
        until_waiting(&locks, "shared", 1).await;
        server.command(&["DEL", "shared"]);
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        // Leasehold holds the lock. The foreign client is refused, and its release does not match.
        assert_eq!(server.command(&["SET", "shared", "foreign", "NX", "PX", "60000"]), "");
        let recipe = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', \
                      KEYS[1]) else return 0 end";
        assert_eq!(server.command(&["EVAL", recipe, "1", "shared", "foreign"]), "0");
        let value = server.command(&["GET", "shared"]);
        let id = value.split(' ').next().unwrap();
        assert!(id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit()), "{value}");
        release(guard).await;
        assert_eq!(server.command(&["SET", "shared", "foreign", "NX", "PX", "300"]), "OK");
        // The lock is also acquired when the foreign key expires.
        release(locks.mutex("shared").lock().await.unwrap()).await;
    });
}

// S27
#[test]
fn foreign_key_that_never_expires_is_reported() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["SET", "endless", "foreign"]);
        for error in [
            locks.mutex("endless").try_lock().await.unwrap_err(),
            locks.mutex("endless").lock().await.unwrap_err(),
        ] {
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(format!("{error:#}").contains("never expires"), "{error}");
        }
        // The same applies if the key appears while a client waits.
        server.command(&["SET", "later", "foreign", "PX", "60000"]);
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("later").lock().await }
        });
        until_waiting(&locks, "later", 1).await;
        server.command(&["PERSIST", "later"]);
        let waited = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::Corrupt);
        // Only the client that set the key knows whether it holds the lock. So an eviction does not
        // delete it either.
        let refused = locks.evict("endless", Evict::Holders).await.unwrap_err();
        assert_told(&refused, ErrorKind::Corrupt, "secret");
        assert_eq!(server.command(&["DEL", "endless"]), "1");
        release(locks.mutex("endless").try_lock().await.unwrap()).await;
    });
}

/// Redisson's name for a holder: the client's id and a thread's number.
const REDISSON: &str = "8743c9c0-0795-4907-87fd-6c719a6b4586:61";

/// Value of redis-py and many other clients: a random word.
const RANDOM: &str = "0f8fad5bd9cb469fa16570867728950e";

// F79
#[test]
fn redisson_lock_is_waited_for_and_named() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let writer = format!("{REDISSON}:write");
        let hashes: [(&str, &[&str]); 3] = [
            ("plain", &[REDISSON, "1"]),
            ("read", &["mode", "read", REDISSON, "2"]),
            ("write", &["mode", "write", &writer, "1"]),
        ];
        for (name, fields) in hashes {
            server.command(&[&["HSET", name], fields].concat());
            server.command(&["PEXPIRE", name, "600000"]);
            let error = locks.mutex(name).try_lock().await.unwrap_err();
            assert_told(&error, ErrorKind::Contended, "secret");
            assert!(format!("{error:#}").contains("Redisson"), "{error}");
            let error = locks.semaphore(name, 3).try_acquire().await.unwrap_err();
            assert_told(&error, ErrorKind::Mismatch, "secret");
            assert!(format!("{error:#}").contains("Redisson"), "{error}");
            let waiter = tokio::spawn({
                let mutex = locks.mutex(name);
                async move { mutex.lock().await }
            });
            until_waiting(&locks, name, 1).await;
            let info = locks.inspect(name).await.unwrap().expect("held");
            let holder = info.holders().next().expect("shown");
            assert!(holder.holder.host.contains("Redisson"), "{holder:?}");
            let limit = Duration::from_millis(300);
            let error = locks.mutex(name).lock_timeout(limit).await.unwrap_err();
            assert_told(&error, ErrorKind::Timeout, "secret");
            assert!(format!("{error:#}").contains("Redisson"), "{error}");
            let error = locks.evict(name, Evict::Holders).await.unwrap_err();
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(format!("{error:#}").contains("Redisson"), "{error}");
            assert_eq!(server.command(&["DEL", name]), "1", "leasehold deleted the foreign key");
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

// F79
/// No hint may cause a client to lose its lock.
#[test]
fn no_hint_suggests_deleting_a_key_that_may_be_held() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["HSET", "endless", REDISSON, "1"]);
        server.command(&["SET", "permits", "3"]);
        server.command(&["SET", "redis-py", RANDOM]);
        server.command(&["HSET", "hash", "mode", "dark"]);
        server.command(&["RPUSH", "list", "a"]);
        let named = [
            ("endless", "Redisson"),
            ("permits", "Redisson semaphore"),
            ("redis-py", "never expires"),
            ("hash", "another program"),
            ("list", "another program"),
        ];
        for (name, what) in named {
            for error in [
                locks.mutex(name).lock().await.unwrap_err(),
                locks.evict(name, Evict::Holders).await.unwrap_err(),
            ] {
                assert_told(&error, ErrorKind::Corrupt, "secret");
                let text = format!("{error:#}");
                assert!(text.contains(what), "{name}: {text}");
                for advice in ["--force", "remove the key", "NAME", "DEL"] {
                    assert!(!text.contains(advice), "{name}: {text}");
                }
            }
            assert_eq!(server.command(&["EXISTS", name]), "1", "{name} was deleted");
        }
    });
}

// F01
#[test]
fn evict_deletes_only_locks() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let others = [
            "17",
            "1",
            "true",
            "{\"user\":7,\"cart\":[1,2,3]}",
            "a sentence of another program",
            "https://example.com/path/1",
            "short-1",
        ];
        for value in others {
            server.command(&["SET", "other", value, "PX", "600000"]);
            let error = locks.evict("other", Evict::Holders).await.unwrap_err();
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(format!("{error:#}").contains("nothing was deleted"), "{error}");
            assert!(!format!("{error:#}").contains(value) || value.len() < 5, "{error}");
            assert_eq!(server.command(&["GET", "other"]), value);
        }
        let recipes = [RANDOM, "xbFBIj9MQ2qwuHGLOmHN5A==", "c56a4180-65aa-42ec-a945-5fd21dec0538"];
        for value in recipes {
            server.command(&["SET", "lock", value, "PX", "600000"]);
            let removed = locks.evict("lock", Evict::Holders).await;
            assert_eq!(removed.unwrap_or_else(|e| panic!("{value}: {e}")), 1);
            assert_eq!(server.command(&["EXISTS", "lock"]), "0");
        }
        let ours = mutex("lock");
        hold(&locks, &ours).await;
        assert_eq!(locks.evict("lock", Evict::Holders).await.unwrap(), 1);
    });
}

// F63
#[test]
fn messages_about_foreign_holds_name_the_other_library() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["SET", "theirs", RANDOM, "PX", "600000"]);
        let error = locks.mutex("theirs").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Contended, RANDOM);
        assert!(format!("{error:#}").contains("another library"), "{error}");
        // A key that never expires has no remaining time.
        server.command(&["PERSIST", "theirs"]);
        let info = locks.inspect("theirs").await.unwrap().expect("held");
        assert_eq!(info.claims[0].remaining, None, "{info:?}");
        let notes = locks.guarantees().notes.join("\n");
        assert!(
            notes.contains("does not show locks that only other libraries' clients hold"),
            "{notes}"
        );
    });
}

#[test]
fn foreign_keys_are_refused_and_not_listed() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["LPUSH", "list", "x"]);
        for error in [
            locks.mutex("list").try_lock().await.unwrap_err(),
            locks.semaphore("list", 2).try_acquire().await.unwrap_err(),
            locks.inspect("list").await.unwrap_err(),
        ] {
            assert_says(&error, ErrorKind::Corrupt, "belongs to another program");
        }
        let error = locks.mutex("leasehold:clock").try_lock().await.unwrap_err();
        assert_says(&error, ErrorKind::InvalidName, "leasehold's own");
        // A damaged clock key is not an error, and does not lower the tokens.
        server.command(&["SET", "leasehold:clock", "nonsense"]);
        release(locks.mutex("fine").lock().await.unwrap()).await;
        // Other programs' strings are not listed.
        server.command(&["SET", "session:1", "another program's"]);
        assert!(locks.list("").await.unwrap().is_empty());
    });
}

#[test]
fn a_prefix_keeps_names_apart() {
    run(async {
        let server = fast();
        let plain = connect(&server.url()).await;
        let prefixed = connect(&format!("{}?prefix=app:", server.url())).await;
        let one = plain.mutex("job").try_lock().await.unwrap();
        let two = prefixed.mutex("job").try_lock().await.unwrap();
        let error = plain.mutex("app:job").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let names = |listed: Vec<leasehold::store::LockInfo>| -> Vec<String> {
            listed.iter().map(|info| info.name.as_str().to_owned()).collect()
        };
        assert_eq!(names(prefixed.list("").await.unwrap()), ["job"]);
        assert_eq!(names(plain.list("").await.unwrap()), ["app:job", "job"]);
        release(one).await;
        release(two).await;
    });
}

// F44
/// Format that earlier versions have written and must be able to read. A change here changes the
/// format. Clients of both versions share a server while a deployment is upgraded.
#[test]
fn key_format_is_unchanged() {
    const ID: &str = "00112233445566778899aabbccddeeff";
    const WHO: &str = r#"{"host":"old","pid":7,"label":"job","more":"a field of a later version"}"#;
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let begins = |key: &str, pattern: &str| {
            let value = server.command(&["GET", key]);
            let mut words = value.splitn(5, ' ');
            let shape: Vec<_> = words.by_ref().take(4).map(shape).collect();
            assert_eq!(shape.join(" "), pattern, "{key}: {value}");
            let who = words.next().unwrap_or_default();
            assert!(who.starts_with("{\"host\":\""), "{key}: {value}");
        };
        // The current version writes claim, token, since (µs), lock delay (ms) and holder.
        let mut held = mutex("mutex");
        held.lock_delay = Duration::from_secs(2);
        hold(&locks, &held).await;
        begins("mutex", "32x 16d 16d 4d");
        let next = mutex("mutex");
        wait(&locks, &next).await;
        for letter in ["w", "x"] {
            let member =
                server.command(&["ZRANGE", &format!("leasehold:{letter}:mutex"), "0", "0"]);
            let words: Vec<&str> = member.splitn(4, ' ').collect();
            assert_eq!((words[0], words[1]), (next.id.to_hex().as_str(), "0"), "{member}");
            assert!(words[2].starts_with("leasehold:inbox:"), "{member}");
            assert!(words[3].starts_with("{\"host\":\""), "{member}");
        }
        let permit = claim("permits", Kind::Semaphore, 3);
        hold(&locks, &permit).await;
        let meta = |field: &str| server.command(&["HGET", "leasehold:m:permits", field]);
        assert_eq!((meta("k"), meta("c"), meta("h")), ("semaphore".into(), "3".into(), "1".into()));
        let entry = meta(&permit.id.to_hex());
        let words: Vec<&str> = entry.splitn(6, ' ').collect();
        assert_eq!((words[0], words[1], words[2]), ("h", "1", "0"), "{entry}");
        assert!(words[3].starts_with("leasehold:inbox:") && shape(words[4]) == "16d", "{entry}");
        assert!(words[5].starts_with("{\"host\":\""), "{entry}");
        // The value of another version is read, including a field that this version does not know.
        let value = format!("{ID} 4503 1700000000000000 0 {WHO}");
        server.command(&["SET", "old", &value, "PX", "600000"]);
        let info = locks.inspect("old").await.unwrap().expect("held");
        assert_eq!((info.claims[0].holder.host.as_str(), info.claims[0].holder.pid), ("old", 7));
        let member = format!("{ID} 0 leasehold:inbox:ffff:1 {WHO}");
        let far = "9000000000000000";
        let holder = mutex("handed");
        hold(&locks, &holder).await;
        server.command(&["ZADD", "leasehold:w:handed", "9007199254740000", &member]);
        server.command(&["ZADD", "leasehold:x:handed", far, &member]);
        assert!(locks.store().leave(&holder, None).await.unwrap());
        // The value is preserved, including unknown fields.
        let handed = server.command(&["GET", "handed"]);
        assert!(handed.starts_with(ID) && handed.ends_with(WHO), "{handed}");
        // A later version's value that cannot be read is a foreign lock, so clients wait for it and
        // keep it.
        server.command(&["SET", "later", &format!("2:{value}"), "PX", "600000"]);
        let error = locks.mutex("later").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(locks.evict("later", Evict::Holders).await.is_err());
        assert_eq!(server.command(&["EXISTS", "later"]), "1");
    });
}

/// Returns the number of characters and their kind.
fn shape(word: &str) -> String {
    let kind = match word.chars().all(|c| c.is_ascii_digit()) {
        true => 'd',
        false if word.chars().all(|c| c.is_ascii_hexdigit()) => 'x',
        false => '?',
    };
    format!("{}{kind}", word.len())
}

// S28
/// A deleted companion key costs places in the queue, but must not break the lock for new clients.
#[test]
fn deleted_auxiliary_keys_cost_only_queue_positions() {
    run(async {
        let server = testbed::redis();
        let locks = connect(&server.url()).await;
        for (n, letters) in ["m", "w", "h", "x", "mw", "wx", "hx", "mh"].into_iter().enumerate() {
            let name = format!("s28-{n}");
            let (holder, waiter) =
                (claim(&name, Kind::Semaphore, 1), claim(&name, Kind::Semaphore, 1));
            assert!(matches!(join(&locks, &holder).await, Joined::Holding { .. }));
            assert!(matches!(join(&locks, &waiter).await, Joined::Waiting(_)));
            for letter in letters.chars() {
                assert_eq!(server.command(&["DEL", &format!("leasehold:{letter}:{name}")]), "1");
            }
            // No call returns an error. Deleted claims are lost, and the others remain valid.
            renew(&locks, &[&holder, &waiter]).await;
            let next = claim(&name, Kind::Semaphore, 1);
            locks.store().join(&next, Mode::Try).await.unwrap_or_else(|e| panic!("{letters}: {e}"));
            for claim in [&holder, &waiter, &next] {
                locks.store().leave(claim, None).await.unwrap_or_else(|e| panic!("{letters}: {e}"));
            }
            for kind in [Kind::Semaphore, Kind::Mutex] {
                let after = claim(&name, kind, 1);
                let joined = join(&locks, &after).await;
                assert!(matches!(joined, Joined::Holding { .. }), "{letters} {kind}: {joined:?}");
                assert!(locks.store().leave(&after, None).await.unwrap());
            }
        }
    });
}

// S28
/// Only the semaphore's hash is gone, and the name is then used as a mutex.
#[test]
fn name_of_a_damaged_semaphore_can_be_used_as_a_mutex() {
    run(async {
        let server = testbed::redis();
        let locks = connect(&server.url()).await;
        let claims = [0, 1, 2].map(|_| claim("s28-hash", Kind::Semaphore, 1));
        for claim in &claims {
            join(&locks, claim).await;
        }
        assert_eq!(server.command(&["DEL", "leasehold:m:s28-hash"]), "1");
        let (first, second) = (mutex("s28-hash"), mutex("s28-hash"));
        assert!(matches!(join(&locks, &first).await, Joined::Holding { .. }));
        assert!(matches!(join(&locks, &second).await, Joined::Waiting(_)));
        assert!(locks.store().leave(&first, None).await.unwrap());
        let held = &renew(&locks, &[&second]).await[0];
        assert!(matches!(held, Renewal::Holding { .. }), "{held:?}");
    });
}

// S16
/// One call contains claims on one name as a semaphore and as a mutex.
#[test]
fn lost_semaphore_claim_does_not_remove_mutex_claims() {
    run(async {
        let server = testbed::redis();
        let locks = connect(&server.url()).await;
        let permits = [0, 1].map(|_| claim("s16", Kind::Semaphore, 1));
        for permit in &permits {
            join(&locks, permit).await;
        }
        server.command(&[
            "DEL",
            "leasehold:m:s16",
            "leasehold:w:s16",
            "leasehold:h:s16",
            "leasehold:x:s16",
        ]);
        let (first, second) = (mutex("s16"), mutex("s16"));
        assert!(matches!(join(&locks, &first).await, Joined::Holding { .. }));
        assert!(matches!(join(&locks, &second).await, Joined::Waiting(_)));
        let [lost, waits] = &renew(&locks, &[&permits[1], &second]).await[..] else { panic!() };
        assert!(matches!(lost, Renewal::Lost), "{lost:?}");
        assert!(matches!(waits, Renewal::Waiting(_)), "{waits:?}");
    });
}
