//! The story of the paused holder, with two processes, a SIGSTOP and a ledger in PostgreSQL.
//!
//! ```sh
//! cargo run -p leasehold --features postgres --example fenced_ledger
//! cargo run -p leasehold --features postgres --example fenced_ledger -- postgres://user@host/db
//! ```
//!
//! A teller locks an account, reads its balance, *is stopped by the operating system*, and goes on
//! much later with what it had read. Meanwhile its lease has run out, and another teller has locked
//! the account and booked. Without a fence the late booking overwrites the other one: money is gone,
//! though everybody took the lock. With the fence, the teller shows its token first thing in its
//! transaction, and the ledger refuses it.
//!
//! Without a URL it starts a private throw-away server from the installed packages. It makes and
//! drops the tables `example_ledger` and `example_bookings`, and makes leasehold's own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use leasehold::fence::sql;
use leasehold::{ErrorKind, database};
use sqlx::PgPool;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const LEASE: Duration = Duration::from_secs(3);

/// Books `amount`; stops between reading and writing until a line comes on stdin.
async fn teller(url: &str, amount: i64, fenced: bool) -> Result<(), Failure> {
    let locks = leasehold::connect(url).await?;
    let pool = PgPool::connect(url).await?;
    let guard = locks.mutex("account:1").lease(LEASE).lock().await?;
    let token = guard.token();
    let mut tx = pool.begin().await?;
    if fenced {
        // Reads carry the token too: from here on, no earlier holder gets past.
        sql::check(&mut tx, "account:1", token).await?;
    }
    let balance: i64 =
        sqlx::query_scalar("SELECT balance FROM example_ledger").fetch_one(&mut *tx).await?;
    tx.commit().await?;
    println!("read {balance} under token {token}");

    let mut go = String::new();
    std::io::stdin().read_line(&mut go)?;

    let mut tx = pool.begin().await?;
    if fenced {
        match sql::check(&mut tx, "account:1", token).await {
            Err(error) if error.kind() == ErrorKind::StaleToken => {
                println!("refused: {error}");
                return Ok(());
            }
            other => other?,
        }
    }
    sqlx::query("UPDATE example_ledger SET balance = $1")
        .bind(balance + amount)
        .execute(&mut *tx)
        .await?;
    sqlx::query("INSERT INTO example_bookings VALUES ($1)").bind(amount).execute(&mut *tx).await?;
    tx.commit().await?;
    println!("booked {amount}");
    // If the lock was lost meanwhile, this says so; by then it is too late to help.
    if let Err(error) = guard.release().await {
        println!("only now: {error}");
    }
    Ok(())
}

/// A teller in a process of its own.
struct Teller {
    child: Child,
    go: ChildStdin,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
    name: &'static str,
}

impl Teller {
    fn start(name: &'static str, url: &str, amount: i64, fenced: bool) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["teller", &amount.to_string(), &fenced.to_string()])
            // It may have a password, and command lines are for all to read.
            .env("EXAMPLE_URL", url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(go), Some(said)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".into());
        };
        Ok(Self { child, go, said: BufReader::new(said).lines(), name })
    }

    /// What it says next.
    fn says(&mut self) -> Result<String, Failure> {
        let line = self.said.next().ok_or_else(|| format!("{} ended", self.name))??;
        println!("  {}: {line}", self.name);
        Ok(line)
    }

    fn signal(&self, signal: i32) -> Result<(), Failure> {
        // SAFETY: a plain kill of a child that we have not waited for yet.
        match unsafe { libc::kill(i32::try_from(self.child.id())?, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().into()),
        }
    }

    fn goes_on(&mut self) -> Result<(), Failure> {
        Ok(writeln!(self.go, "go")?)
    }
}

/// Two tellers book 10 and 100; the first is stopped in between. What is the balance, and what was
/// booked?
async fn story(url: &str, fenced: bool) -> Result<(i64, i64), Failure> {
    let pool = PgPool::connect(url).await?;
    for sql in [
        "DROP TABLE IF EXISTS example_ledger, example_bookings",
        "CREATE TABLE example_ledger (balance BIGINT NOT NULL)",
        "CREATE TABLE example_bookings (amount BIGINT NOT NULL)",
        "INSERT INTO example_ledger VALUES (0)",
    ] {
        sqlx::query(sql).execute(&pool).await?;
    }
    println!("{} a fence:", if fenced { "with" } else { "without" });
    let mut ann = Teller::start("ann", url, 10, fenced)?;
    ann.says()?;
    println!("  (ann is stopped by the operating system)");
    ann.signal(libc::SIGSTOP)?;
    let mut bob = Teller::start("bob", url, 100, fenced)?;
    bob.says()?; // He waits for the end of her lease.
    bob.goes_on()?;
    bob.says()?;
    println!("  (ann goes on)");
    ann.goes_on()?;
    ann.signal(libc::SIGCONT)?;
    ann.says()?;
    ann.child.wait()?;
    bob.child.wait()?;
    let balance = sqlx::query_scalar("SELECT balance FROM example_ledger").fetch_one(&pool).await?;
    let booked = "SELECT coalesce(sum(amount), 0)::bigint FROM example_bookings";
    let booked = sqlx::query_scalar(booked).fetch_one(&pool).await?;
    println!("  booked {booked}, and the balance is {balance}");
    sqlx::query("DROP TABLE example_ledger, example_bookings").execute(&pool).await?;
    Ok((balance, booked))
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [what, amount, fenced] = &words[..]
        && what == "teller"
    {
        return teller(&std::env::var("EXAMPLE_URL")?, amount.parse()?, fenced == "true").await;
    }
    let server = words.is_empty().then(testbed::Postgres::start);
    let url = server.as_ref().map_or_else(|| words[0].clone(), testbed::Postgres::database);
    database::install(&PgPool::connect(&url).await?).await?;
    let (balance, booked) = story(&url, false).await?;
    assert_ne!(balance, booked, "the lock alone would have done, this time");
    let (balance, booked) = story(&url, true).await?;
    assert_eq!(balance, booked);
    println!("the lock alone lost a booking; the fence refused the late one");
    Ok(())
}
