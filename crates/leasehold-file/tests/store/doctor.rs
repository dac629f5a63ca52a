//! The doctor finds each planted misconfiguration, and nothing on a server that is set up well.

use leasehold::doctor::Severity::{self, Weak};
use leasehold_test_support::doctor::troubles;

#[tokio::test]
async fn a_directory_on_a_disk_is_fine_and_others_are_not() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = format!("file:{}", dir.path().display());
    let ours = |found: &[(&'static str, Severity)]| {
        // What the tests' directory is on is not ours to choose.
        found.iter().copied().filter(|(id, _)| *id != "file-system").collect::<Vec<_>>()
    };
    assert_eq!(ours(&troubles(&url).await), []);
    let open = |mode| std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode));
    open(0o777).unwrap();
    assert_eq!(ours(&troubles(&url).await), [("rights", Weak)]);
    open(0o1777).unwrap();
    assert_eq!(ours(&troubles(&url).await), [("rights", Weak)]);
    // As it is advised.
    open(0o2770).unwrap();
    assert_eq!(ours(&troubles(&url).await), []);
    // Every Linux has a tmpfs there.
    if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
        let found = troubles(&format!("file:{}", dir.path().display())).await;
        assert_eq!(found, [("file-system", Weak)]);
    }
}
