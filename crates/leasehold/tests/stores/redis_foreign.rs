//! redis-py's own `Lock` and ours on the same key: they exclude each other, both ways round.
//!
//! The Python is in `redis_foreign.py`; `./test.sh` makes the environment that it runs in.

#![cfg(feature = "redis")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::common::*;
use leasehold::ErrorKind;
use testbed::{Redis, Setup};

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
        let server = Redis::with(Setup::new().fast());
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
        while locks.read("shared").await.unwrap().is_none_or(|i| i.waiters().count() == 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
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
        let server = Redis::with(Setup::new().fast());
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
