//! Disks that fail: a power cut, input and output errors, no space left.
#![cfg(feature = "sqlite")]

use std::path::Path;
use std::process::Command;

use testbed::{Disk, in_own_network};

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

fn with_disk(test: &str, case: impl FnOnce(&Disk)) {
    in_own_network(test, || match Disk::of("64M") {
        Some(disk) => case(&disk),
        None => eprintln!("{test}: not run: there is no loop device here"),
    });
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
