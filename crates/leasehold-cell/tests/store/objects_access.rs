//! Objects: mistakes of users when they connect, and object stores that cannot store locks.

use std::process::Command;

use leasehold::ErrorKind;
use leasehold::doctor::Severity;
use leasehold::store::{Durability, Guarantee};
use leasehold_test_support::*;
use testbed::SeaweedFs;

use crate::objects_front::{Does, front};

/// Returns the error of a failed connection.
async fn refusal(url: &str) -> (ErrorKind, String) {
    let error = leasehold::connect(url).await.expect_err(url);
    let text = format!("{error:#}");
    assert!(!text.contains("sekret") && text.lines().count() == 1, "{text}");
    (error.kind(), text)
}

// S94
#[test]
#[ignore = "runs with ./test.sh --all"]
fn connection_mistakes_at_object_stores_name_the_fix() {
    run(async {
        let closed = SeaweedFs::start();
        closed.kill();
        let (kind, text) = refusal(&closed.url("s94")).await;
        assert!(kind == ErrorKind::Unreachable && text.contains("check the endpoint"), "{text}");
        // Another program listens there.
        let redis = testbed::redis().port();
        let wrong = format!("s3://locks?anonymous=yes&endpoint=http://127.0.0.1:{redis}");
        let (kind, text) = refusal(&wrong).await;
        assert!(kind == ErrorKind::Unreachable && text.contains("check the endpoint"), "{text}");
        // A bucket that requires credentials.
        let guarded = SeaweedFs::guarded("lh", "sekret");
        let (kind, text) = refusal(&guarded.url("s94")).await;
        assert!(kind == ErrorKind::Denied && text.contains("s3:PutObject"), "{text}");
        // Buckets that do not exist.
        let google = testbed::google();
        let (kind, text) = refusal(&google.url("s94").replace("gs://locks", "gs://nobodys")).await;
        assert!(
            kind == ErrorKind::Config
                && text.contains("gs://nobodys")
                && text.contains("does not exist"),
            "{text}"
        );
        let azure = testbed::azurite();
        let (kind, text) = refusal(&azure.url("s94").replace("az://locks", "az://nobodys")).await;
        assert!(
            kind == ErrorKind::Config
                && text.contains("az://nobodys")
                && text.contains("does not exist"),
            "{text}"
        );
    });
}

#[test]
fn endpoint_that_ignores_write_conditions_is_refused() {
    run(async {
        let server = SeaweedFs::start();
        let careless = front(server.port(), |_| Does::Carelessly);
        let url = format!("s3://locks/a?anonymous=yes&endpoint=http://127.0.0.1:{careless}");
        let (kind, text) = refusal(&url).await;
        assert!(
            kind == ErrorKind::Config && text.contains("two clients could hold the same lock"),
            "{text}"
        );
        // A check through another endpoint does not count for this one.
        connect(&server.url("a")).await;
        let (kind, text) = refusal(&url).await;
        assert!(
            kind == ErrorKind::Config && text.contains("two clients could hold the same lock"),
            "{text}"
        );
    });
}

/// Connects according to the environment, if another test runs it in a child process, and prints
/// the result.
#[test]
fn connects_as_the_environment_says() {
    let Ok(url) = std::env::var("LEASEHOLD_TEST_CONNECT") else { return };
    run(async {
        let connected = leasehold::connect(&*url).await;
        println!(
            "connected: {}",
            connected.map_or_else(|e| e.to_string(), |l| l.identity().into())
        );
    });
}

/// Returns the result of connecting in a process with this environment.
fn connected(url: &str, environment: &[(&str, String)]) -> String {
    let this = std::env::current_exe().unwrap();
    let mut child = Command::new(this);
    child.args(["--exact", "objects_access::connects_as_the_environment_says", "--nocapture"]);
    child.env("LEASEHOLD_TEST_CONNECT", url).envs(environment.iter().map(|(k, v)| (k, v)));
    let output = child.output().unwrap();
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = output
        .lines()
        .find_map(|line| line.split_once("connected: "))
        .unwrap_or_else(|| panic!("{output}"));
    line.1.to_owned()
}

/// Two processes use the same URL with different endpoints from their environments. The check of
/// one endpoint does not count for the other, and their stores are different.
#[test]
fn endpoint_from_the_environment_is_checked_separately() {
    let server = SeaweedFs::start();
    let careless = front(server.port(), |_| Does::Carelessly);
    let through = |port: u16| {
        [
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ]
    };
    let url = "s3://locks/env?anonymous=yes";
    let direct = connected(url, &through(server.port()));
    assert!(direct.contains(&server.port().to_string()), "the server is not named: {direct}");
    let message = connected(url, &through(careless));
    assert!(message.contains("two clients could hold"), "{message}");
    let other = front(server.port(), |_| Does::Passes);
    assert_ne!(connected(url, &through(other)), direct);
    // Profiles are not read. The error comes immediately, without a request to a metadata service.
    let profile =
        [("AWS_PROFILE", "p".to_owned()), ("AWS_EC2_METADATA_DISABLED", "true".to_owned())];
    let message = connected("s3://locks/env", &profile);
    assert!(
        message.contains("profile \"p\"") && message.contains("export-credentials"),
        "{message}"
    );
}

#[test]
fn require_and_doctor_report_guarantees_missing_in_object_stores() {
    run(async {
        let url = testbed::seaweed().url("doctor");
        for wanted in [
            Guarantee::GrantDurability(Durability::Disk),
            Guarantee::Push,
            Guarantee::MinHold,
            Guarantee::LockDelay,
        ] {
            let refused = leasehold::builder().require(wanted).connect(&url).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported, "{wanted}");
        }
        for wanted in [Guarantee::ExclusiveOnStoreCrash, Guarantee::Fifo] {
            connect_with(|| leasehold::builder().require(wanted), &url).await;
        }
        let locks = connect(&url).await;
        let found = locks.diagnose().await.unwrap();
        let found: Vec<_> = found.iter().map(|found| (found.id, found.severity)).collect();
        assert_eq!(found, [("lifecycle", Severity::Note)]);
    });
}
