//! The doctor's findings, in the form that the tests of each store compare.

use leasehold::doctor::{Finding, Severity};

/// Returns all findings for this store.
///
/// # Panics
/// If connecting to the store or diagnosing it fails, or if a finding is malformed.
pub async fn findings(url: &str) -> Vec<Finding> {
    try_findings(url).await.unwrap()
}

/// Returns all findings, or the error of the connection.
///
/// # Errors
/// The errors of the connection or the diagnosis.
///
/// # Panics
/// If the findings are not sorted by severity, worst first, or if one is malformed. A finding has
/// one line, a fix if it is worse than a note, and no password.
pub async fn try_findings(url: &str) -> leasehold::Result<Vec<Finding>> {
    let found = leasehold::connect(url).await?.diagnose().await?;
    assert!(
        found.is_sorted_by(|a, b| a.severity >= b.severity),
        "the findings are not sorted by severity: {found:?}"
    );
    for finding in &found {
        let worse = finding.severity > Severity::Note;
        assert!(worse != finding.fix.is_empty(), "{finding:?}");
        let text = format!("{}{}{}", finding.what, finding.why, finding.fix);
        assert!(!text.contains('\n') && !finding.why.is_empty(), "{finding:?}");
        assert!(!text.contains("lh:lh"), "a password: {finding:?}");
    }
    Ok(found)
}

/// The ID and severity of a finding.
pub type Trouble = (&'static str, Severity);

/// Returns the findings that are worse than a note.
///
/// # Panics
/// See [`findings`].
pub async fn troubles(url: &str) -> Vec<Trouble> {
    try_troubles(url).await.unwrap()
}

/// Returns the findings that are worse than a note, or the error of the connection.
///
/// # Errors
/// See [`try_findings`].
pub async fn try_troubles(url: &str) -> leasehold::Result<Vec<Trouble>> {
    let found = try_findings(url).await?.into_iter().filter(|f| f.severity > Severity::Note);
    let mut ids: Vec<_> = found.map(|f| (f.id, f.severity)).collect();
    ids.sort_unstable();
    Ok(ids)
}

/// Waits until the doctor finds exactly these problems. It retries, because a server that does not
/// answer in time is reported as down.
///
/// # Panics
/// If that takes longer than a minute.
pub async fn until_troubles(url: &str, expected: &[Trouble]) {
    let start = std::time::Instant::now();
    loop {
        let found = try_troubles(url).await;
        if found.as_ref().is_ok_and(|found| found == expected) {
            return;
        }
        assert!(start.elapsed().as_secs() < 60, "{url}: {found:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
