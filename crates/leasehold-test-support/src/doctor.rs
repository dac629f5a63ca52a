//! The findings of the doctor, as the tests of each store compare them.

use leasehold::doctor::{Finding, Severity};

/// Returns all findings for this store.
///
/// # Panics
/// If the store cannot be connected to or diagnosed, or a finding is malformed.
pub async fn findings(url: &str) -> Vec<Finding> {
    try_findings(url).await.unwrap()
}

/// Returns all findings, or the error of the connection.
///
/// # Errors
/// As the connection or the diagnosis fails.
///
/// # Panics
/// If a finding is malformed: findings come worst first, on one line each, with a fix and without a password.
pub async fn try_findings(url: &str) -> leasehold::Result<Vec<Finding>> {
    let found = leasehold::connect(url).await?.diagnose().await?;
    assert!(found.is_sorted_by(|a, b| a.severity >= b.severity), "worst first: {found:?}");
    for finding in &found {
        let worse = finding.severity > Severity::Note;
        assert!(worse != finding.fix.is_empty(), "{finding:?}");
        let text = format!("{}{}{}", finding.what, finding.why, finding.fix);
        assert!(!text.contains('\n') && !finding.why.is_empty(), "{finding:?}");
        assert!(!text.contains("lh:lh"), "a password: {finding:?}");
    }
    Ok(found)
}

/// The id and severity of a finding.
pub type Trouble = (&'static str, Severity);

/// Returns the findings that are worse than a note.
///
/// # Panics
/// As [`findings`].
pub async fn troubles(url: &str) -> Vec<Trouble> {
    try_troubles(url).await.unwrap()
}

/// Returns the findings that are worse than a note, or the error of the connection.
///
/// # Errors
/// As [`try_findings`].
pub async fn try_troubles(url: &str) -> leasehold::Result<Vec<Trouble>> {
    let found = try_findings(url).await?.into_iter().filter(|f| f.severity > Severity::Note);
    let mut ids: Vec<_> = found.map(|f| (f.id, f.severity)).collect();
    ids.sort_unstable();
    Ok(ids)
}

/// Waits until the doctor finds exactly these: a server that does not answer in time counts as down.
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

/// Waits until the condition holds.
///
/// # Panics
/// If that takes longer than a minute.
pub async fn until(mut so: impl AsyncFnMut() -> bool) {
    let start = std::time::Instant::now();
    while !so().await {
        assert!(start.elapsed().as_secs() < 60, "never");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
