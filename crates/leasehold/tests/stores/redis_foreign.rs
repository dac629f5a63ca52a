//! Keys of others: redis-py, Redisson and the common recipe on one key with us, other versions of ours, keys
//! that are no locks, and keys of ours that somebody deletes.
//!
//! The Python is in `redis_foreign.py`; `./test.sh` makes the environment that it runs in.

#![cfg(feature = "redis")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::common::*;
use crate::redis_common::*;
use leasehold::store::{Evict, Joined, Mode, Renewal};
use leasehold::{ErrorKind, Kind};
use testbed::Redis;

/// redis-py in a process of its own: one command a line, one answer a line.
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
        let mut child = command.spawn().expect("python runs");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("python listens");
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("python answers");
        line.trim().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.answer()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn s27_redis_py_and_we_exclude_each_other() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let mut python = Python::start(&server);
        // They hold.
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
        // We hold.
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert_eq!(python.ask("try shared 60"), "False");
        // Their release of what is not theirs leaves ours alone.
        assert_eq!(python.ask("steal shared"), "LockNotOwnedError");
        assert!(guard.is_held());
        python.send("wait shared 60");
        release(guard).await;
        assert_eq!(python.answer(), "True");
        assert_eq!(python.ask("release"), "released");
        // Their key that is left to expire frees the lock for us.
        assert_eq!(python.ask("try shared 0.3"), "True");
        let guard = locks.mutex("shared").lock().await.unwrap();
        assert_eq!(python.ask("release"), "LockNotOwnedError");
        assert!(guard.is_held());
        release(guard).await;
        // And one without an expiry, which is redis-py's default, is told of.
        assert_eq!(python.ask("try endless none"), "True");
        let error = locks.mutex("endless").lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Corrupt, "s3cret");
        assert_eq!(python.ask("release"), "released");
        release(locks.mutex("endless").lock().await.unwrap()).await;
    });
}

#[test]
fn s27_a_count_by_both_is_exact() {
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
            // A foreign client tries now and then; it has no place in the queue.
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let (counted, _python) = answer.await.unwrap();
        assert_eq!(counted, ROUNDS.to_string());
        assert!(waited > 0, "they never met");
        assert_eq!(server.command(&["GET", "count"]), (done + ROUNDS).to_string());
    });
}

#[test]
fn s27_a_foreign_holder_is_respected_and_refused() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        // The recipe of other libraries, by hand: they hold, and we wait.
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
        // We hold, and they are refused; and their release does not match.
        assert_eq!(server.command(&["SET", "shared", "foreign", "NX", "PX", "60000"]), "");
        let recipe = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', \
                      KEYS[1]) else return 0 end";
        assert_eq!(server.command(&["EVAL", recipe, "1", "shared", "foreign"]), "0");
        let value = server.command(&["GET", "shared"]);
        let id = value.split(' ').next().unwrap();
        assert!(id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit()), "{value}");
        release(guard).await;
        assert_eq!(server.command(&["SET", "shared", "foreign", "NX", "PX", "300"]), "OK");
        // And when their key just expires.
        release(locks.mutex("shared").lock().await.unwrap()).await;
    });
}

#[test]
fn s27_a_foreign_key_that_never_expires_is_told_of() {
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
        // Also when it comes while we wait.
        server.command(&["SET", "later", "foreign", "PX", "60000"]);
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { locks.mutex("later").lock().await }
        });
        until_waiting(&locks, "later", 1).await;
        server.command(&["PERSIST", "later"]);
        let waited = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::Corrupt);
        // Whether it is held, only they know who set it: a person's order does not delete it either.
        let refused = locks.evict("endless", Evict::Holders).await.unwrap_err();
        assert_told(&refused, ErrorKind::Corrupt, "secret");
        assert_eq!(server.command(&["DEL", "endless"]), "1");
        release(locks.mutex("endless").try_lock().await.unwrap()).await;
    });
}

/// How Redisson names who holds: a client's id and a thread's number.
const REDISSON: &str = "8743c9c0-0795-4907-87fd-6c719a6b4586:61";

/// How redis-py and many others do: a random word.
const RANDOM: &str = "0f8fad5bd9cb469fa16570867728950e";

#[test]
fn f79_a_lock_of_redissons_is_waited_for_and_named() {
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
            let info = locks.read(name).await.unwrap().expect("held");
            let holder = info.holders().next().expect("shown");
            assert!(holder.holder.host.contains("Redisson"), "{holder:?}");
            let limit = Duration::from_millis(300);
            let error = locks.mutex(name).lock_timeout(limit).await.unwrap_err();
            assert_told(&error, ErrorKind::Timeout, "secret");
            assert!(format!("{error:#}").contains("Redisson"), "{error}");
            let error = locks.evict(name, Evict::Holders).await.unwrap_err();
            assert_told(&error, ErrorKind::Corrupt, "secret");
            assert!(format!("{error:#}").contains("Redisson"), "{error}");
            assert_eq!(server.command(&["DEL", name]), "1", "we deleted it");
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

/// No advice may cost somebody their lock.
#[test]
fn f79_nobody_is_told_to_delete_what_may_be_held() {
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
            ("permits", "semaphore of Redisson"),
            ("redis-py", "never expires"),
            ("hash", "something else than a lock"),
            ("list", "something else than a lock"),
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

#[test]
fn f01_release_force_deletes_locks_and_nothing_else() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let others = [
            "17",
            "1",
            "true",
            "{\"user\":7,\"cart\":[1,2,3]}",
            "a sentence of somebody's",
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

#[test]
fn f63_messages_about_others_holds_say_whose_and_which() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["SET", "theirs", RANDOM, "PX", "600000"]);
        let error = locks.mutex("theirs").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Contended, RANDOM);
        assert!(format!("{error:#}").contains("another library"), "{error}");
        // A key that never expires has nothing that remains.
        server.command(&["PERSIST", "theirs"]);
        let info = locks.read("theirs").await.unwrap().expect("held");
        assert_eq!(info.claims[0].remaining, None, "{info:?}");
        let notes = locks.guarantees().notes.join("\n");
        assert!(
            notes.contains("lists no locks that only other libraries' clients hold"),
            "{notes}"
        );
    });
}

#[test]
fn keys_that_are_no_locks() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        server.command(&["LPUSH", "list", "x"]);
        for error in [
            locks.mutex("list").try_lock().await.unwrap_err(),
            locks.semaphore("list", 2).try_acquire().await.unwrap_err(),
            locks.read("list").await.unwrap_err(),
        ] {
            assert_says(&error, ErrorKind::Corrupt, "something else than a lock");
        }
        let error = locks.mutex("leasehold:clock").try_lock().await.unwrap_err();
        assert_says(&error, ErrorKind::InvalidName, "leasehold's own");
        // A clock that somebody has written to is no obstacle, and no reason to fall back.
        server.command(&["SET", "leasehold:clock", "nonsense"]);
        release(locks.mutex("fine").lock().await.unwrap()).await;
        // Strings of other people are not listed.
        server.command(&["SET", "session:1", "somebody's"]);
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

/// What versions before this one have written, and will read. A change here is a change of the
/// format: clients of both versions use one server while a fleet is upgraded.
#[test]
fn f44_the_format_of_the_keys_is_what_it_was() {
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
        // Written now: claim, token, since (µs), lock-delay (ms), holder.
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
        // Read: what another version wrote, with what it knows and we do not.
        let value = format!("{ID} 4503 1700000000000000 0 {WHO}");
        server.command(&["SET", "old", &value, "PX", "600000"]);
        let info = locks.read("old").await.unwrap().expect("held");
        assert_eq!((info.claims[0].holder.host.as_str(), info.claims[0].holder.pid), ("old", 7));
        let member = format!("{ID} 0 leasehold:inbox:ffff:1 {WHO}");
        let far = "9000000000000000";
        let holder = mutex("handed");
        hold(&locks, &holder).await;
        server.command(&["ZADD", "leasehold:w:handed", "9007199254740000", &member]);
        server.command(&["ZADD", "leasehold:x:handed", far, &member]);
        assert!(locks.store().leave(&holder, None).await.unwrap());
        // And is kept as it was: nothing that we do not know is dropped.
        let handed = server.command(&["GET", "handed"]);
        assert!(handed.starts_with(ID) && handed.ends_with(WHO), "{handed}");
        // A value of a later version that we cannot read is somebody's lock: waited for, kept.
        server.command(&["SET", "later", &format!("2:{value}"), "PX", "600000"]);
        let error = locks.mutex("later").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(locks.evict("later", Evict::Holders).await.is_err());
        assert_eq!(server.command(&["EXISTS", "later"]), "1");
    });
}

/// How many characters, and of which kind.
fn shape(word: &str) -> String {
    let kind = match word.chars().all(|c| c.is_ascii_digit()) {
        true => 'd',
        false if word.chars().all(|c| c.is_ascii_hexdigit()) => 'x',
        false => '?',
    };
    format!("{}{kind}", word.len())
}

/// Whoever deletes a companion takes places away, and must not break the lock for those who come.
#[test]
fn s28_companions_that_somebody_deleted_cost_places_and_no_more() {
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
            // Nobody is told an error: what is gone is lost, and whoever is left stands.
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

/// The semaphore's hash alone is gone, and the name is then used as a mutex.
#[test]
fn s28_a_mutex_stands_where_a_semaphore_lost_its_hash() {
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

/// One call asks for what a name was and for what it is now.
#[test]
fn s16_a_lost_semaphore_takes_no_place_in_a_mutex_along() {
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
