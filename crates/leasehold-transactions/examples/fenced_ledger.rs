//! A paused holder of a lock, with two processes, a SIGSTOP and a ledger in PostgreSQL.
//!
//! ```sh
//! cargo run -p leasehold-transactions --features postgres --example fenced_ledger
//! cargo run -p leasehold-transactions --features postgres --example fenced_ledger -- postgres://user@host/db
//! ```
//!
//! A teller locks an account and reads its balance. Then *the operating system pauses the teller*.
//! It resumes much later and still uses the old balance. Meanwhile its lease has expired, and
//! another teller has locked the account and booked. Without a fence, the late booking overwrites
//! the other one. So money is lost although both tellers acquired the lock. With a fence, the
//! teller first presents its token in its transaction, and the ledger rejects the transaction.
//!
//! Without a URL, the example starts a private, temporary server from the installed packages. It
//! creates and drops the tables `example_ledger` and `example_bookings`, and creates leasehold's
//! own tables.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use leasehold::fence::sql;
use leasehold::{ErrorKind, database};
use sqlx::PgPool;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const LEASE: Duration = Duration::from_secs(3);

/// Books `amount`. Between reading and writing, it waits for a line on stdin.
async fn teller(url: &str, amount: i64, fenced: bool) -> Result<(), Failure> {
    let locks = leasehold::connect(url).await?;
    let pool = PgPool::connect(url).await?;
    let guard = locks.mutex("account:1").lease(LEASE).lock().await?;
    let token = guard.token();
    let mut tx = pool.begin().await?;
    if fenced {
        // The read presents the token too. From here on, the fence rejects all earlier holders.
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
    // If the lock was lost in the meantime, this returns an error, but too late to prevent harm.
    if let Err(error) = guard.release().await {
        println!("only now: {error}");
    }
    Ok(())
}

/// A teller in a separate process.
struct Teller {
    child: Child,
    go: ChildStdin,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    name: &'static str,
}

impl Teller {
    fn start(name: &'static str, url: &str, amount: i64, fenced: bool) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["teller", &amount.to_string(), &fenced.to_string()])
            // The URL may contain a password, and all users can read command lines.
            .env("EXAMPLE_URL", url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(go), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".into());
        };
        Ok(Self { child, go, lines: BufReader::new(output).lines(), name })
    }

    /// Returns the next line that the teller prints.
    fn says(&mut self) -> Result<String, Failure> {
        let line = self.lines.next().ok_or_else(|| format!("{} ended", self.name))??;
        println!("  {}: {line}", self.name);
        Ok(line)
    }

    fn signal(&self, signal: i32) -> Result<(), Failure> {
        // SAFETY: This sends a signal to a child that was not waited for yet.
        match unsafe { libc::kill(i32::try_from(self.child.id())?, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().into()),
        }
    }

    fn goes_on(&mut self) -> Result<(), Failure> {
        Ok(writeln!(self.go, "go")?)
    }
}

/// Runs two tellers that book 10 and 100, and pauses the first one in between. Returns the balance
/// and the sum of the bookings.
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
    println!("  (the operating system pauses ann)");
    ann.signal(libc::SIGSTOP)?;
    let mut bob = Teller::start("bob", url, 100, fenced)?;
    bob.says()?; // bob waits until ann's lease expires
    bob.goes_on()?;
    bob.says()?;
    println!("  (ann resumes)");
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
    assert_ne!(balance, booked, "the lock alone prevented the lost booking in this run");
    let (balance, booked) = story(&url, true).await?;
    assert_eq!(balance, booked);
    println!("the lock alone lost a booking; the fence refused the late one");
    Ok(())
}
