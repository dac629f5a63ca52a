//! Disks that fail: a power cut, input and output errors, no space left.
#![cfg(feature = "sqlite")]

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use testbed::{Disk, where_disks_are_possible};

use crate::common::{Place, is_cause_and_hint};

/// The stores that keep their data in files of their clients.
fn stores(disk: &Disk) -> [String; 2] {
    let path = disk.path().display();
    [format!("file:{path}/locks"), format!("sqlite:{path}/locks.db")]
}

/// Runs a command under a lock. Returns the token, or what leasehold printed if the command did not
/// run within `wait`.
fn try_token(store: &str, wait: &str) -> Result<u64, String> {
    let place = Place::new();
    let words = ["run", "--wait", wait, "x", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN"];
    let output = place.leasehold(words).env("LEASEHOLD_STORE", store).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.success(), !stdout.is_empty(), "{stdout}{stderr}");
    stdout.trim().parse().map_err(|_| stderr)
}

fn token(store: &str) -> u64 {
    try_token(store, "60s").unwrap()
}

/// Runs a case with a disk that is small enough to be filled.
fn with_disk(test: &str, case: impl FnOnce(&Disk)) {
    where_disks_are_possible(test, || case(&Disk::of("64M")));
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn tokens_increase_across_a_power_cut_and_a_failed_disk_grants_nothing() {
    let name = "disk::tokens_increase_across_a_power_cut_and_a_failed_disk_grants_nothing";
    with_disk(name, |disk| {
        let stores = stores(disk);
        let before = stores.each_ref().map(|store| {
            let first = token(store);
            let last = token(store);
            assert!(last > first, "{store}: token {last} after {first}");
            last
        });
        disk.cut_power();
        for store in &stores {
            let error = try_token(store, "10s").expect_err("a lock was granted without a disk");
            assert!(is_cause_and_hint(&error), "{store}: {error}");
        }
        disk.restore_power();
        for (store, before) in stores.iter().zip(before) {
            let after = token(store);
            assert!(after > before, "{store}: token {after} after {before}");
        }
    });
}

/// Commands are killed while they write, and then the power is cut.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn tokens_increase_across_torn_writes() {
    with_disk("disk::tokens_increase_across_torn_writes", |disk| {
        let place = Place::new();
        let mut torn = 0;
        for store in (0..6).flat_map(|_| stores(disk)) {
            let tokens = place.path("tokens");
            let script = format!("echo $LEASEHOLD_TOKEN >> '{}'", tokens.display());
            std::fs::write(&tokens, "").unwrap();
            let mut running: Vec<Child> = Vec::new();
            while place.read("tokens").lines().count() < 10 {
                running.retain_mut(|child| child.try_wait().unwrap().is_none());
                while running.len() < 4 {
                    let mut command = place.leasehold(["run", "x", "--", "sh", "-c", &script]);
                    running.push(command.env("LEASEHOLD_STORE", &store).spawn().unwrap());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            torn += disk.cycle_power_tearing_writes(|| {
                for child in &mut running {
                    child.kill().unwrap();
                    child.wait().unwrap();
                }
            });
            disk.pretend_restart();
            let granted = place.read("tokens");
            let last = granted.lines().filter_map(|line| line.parse().ok()).max().unwrap();
            let after = token(&store);
            assert!(after > last, "{store}: token {after} after {last}");
        }
        assert!(torn > 0, "no write was torn");
    });
}

/// Fills the disk to the last byte.
fn fill(file: &Path) {
    let of = format!("of={}", file.display());
    let full = Command::new("dd").args(["if=/dev/zero", &of, "bs=1M"]).output().unwrap();
    assert!(!full.status.success(), "the disk is not full");
    let of = format!("of={}.rest", file.display());
    let full = Command::new("dd").args(["if=/dev/zero", &of, "bs=1"]).output().unwrap();
    assert!(!full.status.success(), "the disk is not full");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn full_disk_is_reported_and_loses_no_token() {
    with_disk("disk::full_disk_is_reported_and_loses_no_token", |disk| {
        let stores = stores(disk);
        let before = stores.each_ref().map(|store| token(store));
        let file = disk.path().join("fill");
        fill(&file);
        for (store, before) in stores.iter().zip(before) {
            // An existing lock may need no space. Then it works.
            match try_token(store, "10s") {
                Ok(now) => assert!(now > before, "{store}: token {now} after {before}"),
                Err(error) => {
                    assert!(is_cause_and_hint(&error), "{store}: {error}");
                    assert!(
                        error.to_lowercase().contains("full") || error.contains("space"),
                        "{error}"
                    );
                }
            }
        }
        std::fs::remove_file(&file).unwrap();
        std::fs::remove_file(disk.path().join("fill.rest")).unwrap();
        for (store, before) in stores.iter().zip(before) {
            let after = token(store);
            assert!(after > before, "{store}: token {after} after {before}");
        }
    });
}
