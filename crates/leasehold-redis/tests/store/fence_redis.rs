//! Tests `fence::redis` on a real server: interleaved writers, other languages, a paused process.
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::fence::redis::{self as fenced, Fenced};
use leasehold::{ErrorKind, FencingToken};
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;

fn token(n: u64) -> FencingToken {
    FencingToken::new(n).unwrap()
}

async fn connection() -> MultiplexedConnection {
    let client = redis::Client::open(testbed::redis().url()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

// R35
#[tokio::test]
async fn stale_token_is_refused_by_every_kind_of_write() {
    let mut c = connection().await;
    fenced::set(&mut c, "r35:s", token(5), "five").await.unwrap();
    fenced::set(&mut c, "r35:s", token(5), "five again").await.unwrap();
    let error = fenced::set(&mut c, "r35:s", token(4), "four").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
    let stale = error.stale_token().unwrap();
    assert_eq!((stale.seen, stale.offered), (token(5), token(4)));
    assert_eq!(c.get::<_, String>("r35:s").await.unwrap(), "five again");
    // After a check, lower tokens are rejected.
    fenced::check(&mut c, "r35:s", token(7)).await.unwrap();
    let error = fenced::set(&mut c, "r35:s", token(6), "six").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken);

    // The higher token differs in length, in digits, or where doubles are inexact.
    let near = (1_u64 << 53) + 1;
    for (seen, late) in
        [(10, 9), (100, 99), (near, near - 1), (FencingToken::MAX, FencingToken::MAX - 1)]
    {
        let fields = [("a", seen)];
        fenced::hash_set(&mut c, "r35:h", token(seen), &fields).await.unwrap();
        let error = fenced::hash_set(&mut c, "r35:h", token(late), &[("a", late)]).await;
        assert_eq!(error.unwrap_err().stale_token().unwrap().seen, token(seen));
        assert_eq!(c.hget::<_, _, u64>("r35:h", "a").await.unwrap(), seen);
    }
    let own = [(fenced::TOKEN_FIELD, 1)];
    let error =
        fenced::hash_set(&mut c, "r35:h", token(FencingToken::MAX), &own).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);

    let push = Fenced::new("return redis.call('RPUSH', KEYS[1], ARGV[1], ARGV[2])");
    let push = async |c: &mut MultiplexedConnection, n| {
        push.run::<i64>(c, "r35:l", token(n), &["r35:l"], &["x", "y"]).await
    };
    assert_eq!(push(&mut c, 2).await.unwrap(), 2);
    assert_eq!(push(&mut c, 1).await.unwrap_err().kind(), ErrorKind::StaleToken);
    assert_eq!(push(&mut c, 3).await.unwrap(), 4);

    // A wrong type is an error, but not a stale token.
    let error = fenced::hash_set(&mut c, "r35:s", token(9), &[("a", 1)]).await.unwrap_err();
    assert_ne!(error.kind(), ErrorKind::StaleToken, "{error}");
}

// R35
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interleaved_writers_never_go_back() {
    let writer = |seed: u64| {
        tokio::spawn(async move {
            let mut c = connection().await;
            for n in 1..=200_u64 {
                // The tokens rise like those of holders, some of which are late.
                let offered = if (n + seed).is_multiple_of(4) { n.div_ceil(2) } else { n };
                let before: Option<u64> = c.get("r35:n").await.unwrap();
                let set = fenced::set(&mut c, "r35:n", token(offered), offered).await;
                let after: u64 = c.get("r35:n").await.unwrap();
                assert!(after >= before.unwrap_or(0), "the highest token seen went back");
                match set {
                    Ok(()) => assert!(
                        offered >= before.unwrap_or(0),
                        "the stale token {offered} was accepted"
                    ),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}"),
                }
            }
        })
    };
    for writer in (0..6).map(writer).collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    assert_eq!(connection().await.get::<_, u64>("r35:n").await.unwrap(), 200);
}

// R35
#[test]
fn fence_scripts_work_from_any_language() {
    let server = testbed::redis();
    let mark = fenced::mark_of("lang");
    let set = |token: &str, value: &str| {
        server.command(&["EVAL", &fenced::set_script(), "2", "lang", &mark, token, value])
    };
    assert!(set("12", "twelve").contains("OK"));
    let mut cli = Command::new("redis-cli");
    cli.args(["-u", &server.url(), "EVAL", &fenced::set_script(), "2", "lang", &mark, "11", "x"]);
    let output = cli.output().unwrap();
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.contains("STALETOKEN 12 11"), "{output}");
    assert!(server.command(&["GET", "lang"]).contains("twelve"));

    let hash = |token: &str, value: &str| {
        let script = fenced::hash_script();
        refused(server, &["EVAL", &script, "1", "lang:h", token, "a", value, "b", value])
    };
    assert_eq!(hash("12", "twelve"), None);
    assert_eq!(hash("9", "nine").unwrap(), "STALETOKEN 12 9");
    assert_eq!(server.command(&["HGET", "lang:h", "b"]), "twelve");
    assert_eq!(server.command(&["HGET", "lang:h", "fencing_token"]), "12");

    let body = "return redis.call('RPUSH', KEYS[1], ARGV[1])";
    let (guarded, mark) = (fenced::guarded_script(body), fenced::mark_of("lang:l"));
    let push = |token: &str| refused(server, &["EVAL", &guarded, "2", &mark, "lang:l", token, "x"]);
    assert_eq!(push("12"), None);
    assert_eq!(push("11").unwrap(), "STALETOKEN 12 11");
    assert_eq!(server.command(&["LLEN", "lang:l"]), "1");
}

/// Returns the error of a server for an EVAL.
fn refused(server: &testbed::Redis, eval: &[&str]) -> Option<String> {
    let mut cli = Command::new("redis-cli");
    cli.args(["-e", "-u", &server.url()]).args(eval);
    let output = cli.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    (!output.status.success()).then_some(text)
}

// R35
/// If one of these values were accepted, no holder's token would ever be higher, and the resource
/// would stay blocked.
#[test]
fn invalid_tokens_are_refused_and_do_not_block_the_resource() {
    let server = testbed::redis();
    let mark = fenced::mark_of("bad");
    let guarded = fenced::guarded_script("return 1");
    for bad in [
        "0000000000000000000009",
        "1.7e15",
        "",
        "0",
        "-1",
        "9x",
        " 9",
        "1e9",
        "9999999999999999999",
        "9223372036854775808",
        "10000000000000000000",
    ] {
        for eval in [
            ["EVAL", &fenced::set_script(), "2", "bad", &mark, bad, "x"].as_slice(),
            &["EVAL", &fenced::hash_script(), "1", "bad:h", bad, "a", "x"],
            &["EVAL", &guarded, "1", &mark, bad],
        ] {
            let refused = refused(server, eval).unwrap_or_else(|| panic!("{bad:?} was accepted"));
            assert!(refused.starts_with("BADTOKEN"), "{bad:?}: {refused}");
        }
    }
    assert_eq!(server.command(&["EXISTS", "bad", &mark, "bad:h"]), "0");
    let greatest = FencingToken::MAX.to_string();
    let set = ["EVAL", &fenced::set_script(), "2", "bad", &mark, &greatest, "x"];
    assert_eq!(refused(server, &set), None);
}

// R35
/// A stored token that another program has damaged is reported, and not used.
#[tokio::test]
async fn damaged_stored_token_is_reported() {
    let mut c = connection().await;
    c.set::<_, _, ()>(fenced::mark_of("r35:odd"), "1.7e15").await.unwrap();
    let error = fenced::set(&mut c, "r35:odd", token(5), "five").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(format!("{error:#}").contains("delete it"), "{error}");
}

// S26
/// The key and its token must be in one slot, or the server refuses the script.
#[tokio::test]
async fn the_fence_works_in_a_cluster() {
    let cluster = testbed::cluster();
    for key in ["a", "a{b}c", "a{b", "{", "user:{7}:name"] {
        let mut answers = Vec::new();
        for node in cluster.nodes() {
            let client = redis::Client::open(node.url()).unwrap();
            let mut c = client.get_multiplexed_async_connection().await.unwrap();
            answers.push(fenced::set(&mut c, key, token(7), "seven").await);
        }
        // Exactly one node serves the slot. No node finds the keys in two slots.
        assert_eq!(
            answers.iter().filter(|answers| answers.is_ok()).count(),
            1,
            "{key}: {answers:?}"
        );
        let crossed = |e: &leasehold::Error| e.to_string().contains("CROSSSLOT");
        assert!(
            !answers.iter().filter_map(|t| t.as_ref().err()).any(crossed),
            "{key}: {answers:?}"
        );
    }
}

const LEASE: Duration = Duration::from_secs(10);

/// The child process of the test below. It holds the lock, is paused, and then writes as before.
#[test]
fn child_process_that_is_paused() {
    let Ok(url) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let locks = leasehold::connect(&url).await.unwrap();
        let guard = locks.mutex("r40").lease(LEASE).lock().await.unwrap();
        let token = guard.token();
        let client = redis::Client::open(url).unwrap();
        let mut c = client.get_multiplexed_async_connection().await.unwrap();
        fenced::set(&mut c, "r40:data", &guard, "child").await.unwrap();
        println!("wrote under {token}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        // The child decided with the token. The guard already knows of the loss.
        let late = fenced::set(&mut c, "r40:data", token, "late").await.unwrap_err();
        println!("late {:?} {}", late.kind(), late.stale_token().unwrap().seen);
        let refused = fenced::set(&mut c, "r40:data", &guard, "later").await.unwrap_err();
        println!("later {:?}", refused.kind());
    });
}

// R40
#[tokio::test]
#[ignore = "runs with ./test.sh --all"]
async fn late_write_of_a_paused_process_is_refused_by_redis() {
    let url = testbed::redis().url();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "fence_redis::child_process_that_is_paused",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("LEASEHOLD_TEST_CHILD", &url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let (tell, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
    });
    let mut line = async |start: &str| loop {
        let printed = tokio::time::timeout(Duration::from_secs(60), receiver.recv()).await;
        let printed = printed.expect("the child says nothing").expect("the child ended");
        if let Some((_, rest)) = printed.split_once(start) {
            return rest.to_owned();
        }
    };
    line("wrote under ").await;
    // SAFETY: sends a signal to a child process that was not waited for yet.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let locks = leasehold::connect(&url).await.unwrap();
    let guard = locks.mutex("r40").lock_timeout(Duration::from_secs(60)).await.unwrap();
    let mut c = connection().await;
    fenced::set(&mut c, "r40:data", &guard, "parent").await.unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    // SAFETY: as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert_eq!(line("late ").await, format!("StaleToken {}", guard.token()));
    assert_eq!(line("later ").await, "Lost");
    assert!(child.wait().unwrap().success());
    assert_eq!(c.get::<_, String>("r40:data").await.unwrap(), "parent");
}
