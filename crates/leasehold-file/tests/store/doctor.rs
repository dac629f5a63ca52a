//! The doctor finds each planted misconfiguration, and nothing in a correctly configured directory.

use leasehold::doctor::Severity::{self, Weak};
use leasehold_test_support::doctor::troubles;

#[tokio::test]
async fn doctor_accepts_a_disk_directory_and_reports_others() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = format!("file:{}", dir.path().display());
    let ours = |found: &[(&'static str, Severity)]| {
        // The file system of the tests' directory is not under the test's control.
        found.iter().copied().filter(|(id, _)| *id != "file-system").collect::<Vec<_>>()
    };
    assert_eq!(ours(&troubles(&url).await), []);
    let open = |mode| std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode));
    open(0o777).unwrap();
    assert_eq!(ours(&troubles(&url).await), [("rights", Weak)]);
    open(0o1777).unwrap();
    assert_eq!(ours(&troubles(&url).await), [("rights", Weak)]);
    // This is the mode that the hint advises.
    open(0o2770).unwrap();
    assert_eq!(ours(&troubles(&url).await), []);
    // Every Linux system has a tmpfs there.
    if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
        let found = troubles(&format!("file:{}", dir.path().display())).await;
        assert_eq!(found, [("file-system", Weak)]);
    }
}
