//! A nightly job that cron starts on every machine, and that must run once a night.
//!
//! ```sh
//! cargo run -p leasehold --example run_once
//! cargo run -p leasehold --features postgres --example run_once -- postgres://user@host/db
//! ```
//!
//! Three "machines" start it at about the same time. `once_per` acquires the lock on one of them,
//! and keeps it unavailable for the rest of the period after the job is done. So a machine whose
//! clock is a little late does not run it again. In a crontab, the same is one line:
//! `leasehold run --once-per 50m nightly ./report.sh`.

use std::time::Duration;

use leasehold::{Error, OncePer};

/// A time longer than the largest difference between the machines' clocks, and shorter than a day.
const PERIOD: Duration = Duration::from_secs(30);

/// Runs the job as cron would on one machine. Returns whether it ran.
async fn nightly(url: String, name: String, late: Duration) -> Result<bool, Error> {
    tokio::time::sleep(late).await;
    let locks = leasehold::connect(url).await?;
    match locks.mutex(name).once_per(PERIOD).await? {
        OncePer::Ran(guard) => {
            // If the lock is lost, `run` drops the job.
            guard
                .run(|guard| async move {
                    println!("the machine that is {late:?} late runs the job, {}", guard.token());
                })
                .await?;
            Ok(true)
        }
        _ => {
            println!("the machine that is {late:?} late does not run the job");
            Ok(false)
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1);
    let own = std::env::temp_dir().join(format!("leasehold-example-{}", std::process::id()));
    let url = url.unwrap_or_else(|| format!("file:{}", own.display()));
    // This name is tonight's. Another run of this example is another night.
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
