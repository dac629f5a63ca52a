//! A nightly job that every machine's cron starts, and that must run once a night.
//!
//! ```sh
//! cargo run -p leasehold --example run_once
//! cargo run -p leasehold --features postgres --example run_once -- postgres://user@host/db
//! ```
//!
//! Three "machines" start it at about the same time. `try_lock` lets one in and sends the others
//! home; `at_least` keeps the lock taken after the job is done, so that a machine whose clock is a
//! little late does not run it again. From cron itself the same is one line:
//! `leasehold run --try -E 0 --at-least 50m nightly -- ./report.sh`.

use std::time::Duration;

use leasehold::{Error, ErrorKind};

/// Longer than any two of the machines' clocks are apart, and shorter than a day.
const PERIOD: Duration = Duration::from_secs(30);

/// The job, as cron starts it on one machine. Tells whether it ran.
async fn nightly(url: String, name: String, late: Duration) -> Result<bool, Error> {
    tokio::time::sleep(late).await;
    let locks = leasehold::connect(url).await?;
    match locks.mutex(name).at_least(PERIOD).try_lock().await {
        Ok(guard) => {
            println!("the machine that is {late:?} late runs the job");
            guard.release().await?; // The lock stays taken until the period is over.
            Ok(true)
        }
        Err(error) if error.kind() == ErrorKind::Contended => {
            println!("the machine that is {late:?} late: it is done already");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1);
    let own = std::env::temp_dir().join(format!("leasehold-example-{}", std::process::id()));
    let url = url.unwrap_or_else(|| format!("file:{}", own.display()));
    // Of tonight: a second run of this example is another night.
    let name = format!("example:nightly:{}", std::process::id());
    let late = |n: u64| Duration::from_millis(200 * n);
    let machine = |n| tokio::spawn(nightly(url.clone(), name.clone(), late(n)));
    let mut runs = 0;
    for machine in [0, 1, 2].map(machine) {
        runs += u32::from(machine.await.expect("no panic")?);
    }
    let _ = std::fs::remove_dir_all(own);
    println!("one night, three machines, {runs} run");
    assert_eq!(runs, 1);
    Ok(())
}
