//! Checks that the object store obeys write conditions. Some servers ignore the headers, and some
//! proxies drop them, so that writes are unconditional.
//!
//! Several requests create one object concurrently, and then several replace it. Exactly one may
//! succeed each time, and none that names an old version. In a store that passes, the client writes
//! a mark, so that later clients only read the mark. `doctor` repeats the race.
//!
//! The mark contains everything that the result depends on: the endpoint (even if it comes from the
//! environment), the bucket, the proxy, and whether the bucket has versioning. Some stores treat
//! conditions differently with versioning. A mark is valid for a week.

use std::time::Duration;

use futures_util::future::join_all;
use leasehold_core::kit::wall_micros;
use leasehold_core::{ClaimId, ErrorKind, Result};
use tokio::time::timeout;

use super::fault;
use super::link::{Link, is_versioned};
use super::url::ObjectsUrl;
use crate::cells::{Answer, Request, Version};
use crate::lasting::Lasting;

/// The pause after a race in which some requests must be retried later.
const LATER: Duration = Duration::from_millis(1_200);
/// Number of races that `doctor` runs.
pub(super) const ROUNDS: u32 = 3;
/// Number of requests in a race.
const RIVALS: usize = 4;

/// How long a mark is valid, in days.
const GOOD_FOR: u64 = 7;

/// Runs the race, unless there is a valid mark.
pub(super) async fn once(cells: &Lasting<Link>, url: &ObjectsUrl) -> Result<()> {
    let key = format!("{}p", url.prefix);
    let today = wall_micros() / 86_400_000_000;
    let found = cells.one(Request::Get { key: key.clone() }).await?;
    if let Answer::Found(found) = &found
        && Mark::read(&found.value).is_some_and(|mark| {
            mark.place == way(url)
                && mark.is_versioned == is_versioned(&found.version)
                && mark.day.abs_diff(today) < GOOD_FOR
        })
    {
        return Ok(());
    }
    let is_versioned = race(cells, url).await?;
    let value = Mark { place: way(url), is_versioned, day: today }.written();
    let lives = None;
    let mark = match found {
        Answer::Found(found) => Request::Replace { key, value, version: found.version, lives },
        _ => Request::Create { key, value, lives },
    };
    // If the write is refused, another client has written a mark.
    cells.one(mark).await.map(drop)
}

/// The content of a mark.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    place: String,
    is_versioned: bool,
    /// Days since 1970, by the clock of the client that ran the race. A wrong clock only causes
    /// another race.
    day: u64,
}

impl Mark {
    fn written(&self) -> Vec<u8> {
        let versions = if self.is_versioned { "versions" } else { "plain" };
        format!("{}\n{versions} {}", self.place, self.day).into_bytes()
    }

    fn read(value: &[u8]) -> Option<Self> {
        let (place, rest) = std::str::from_utf8(value).ok()?.split_once('\n')?;
        let (versions, day) = rest.split_once(' ')?;
        let is_versioned = match versions {
            "versions" => true,
            "plain" => false,
            _ => return None,
        };
        Some(Self { place: place.to_owned(), is_versioned, day: day.parse().ok()? })
    }
}

/// Returns the bucket, the endpoint and the proxy, which the result of the race depends on.
fn way(url: &ObjectsUrl) -> String {
    match &url.way {
        Some(way) => format!("{} through {way}", url.place()),
        None => url.place(),
    }
}

/// Runs the race. Returns whether the bucket has versioning.
pub(super) async fn race(cells: &Lasting<Link>, url: &ObjectsUrl) -> Result<bool> {
    let key = format!("{}p:{}", url.prefix, ClaimId::random()?.to_hex());
    let raced = race_for(cells, &key, url).await;
    let cleared = cells.delete(&key).await;
    let is_versioned = raced?;
    cleared.map(|()| is_versioned)
}

async fn race_for(cells: &Lasting<Link>, key: &str, url: &ObjectsUrl) -> Result<bool> {
    let (key, lives) = (key.to_owned(), None);
    let value = |i: usize| i.to_string().into_bytes();
    let creates = (0..RIVALS).map(|i| Request::Create { key: key.clone(), value: value(i), lives });
    let first = winner(cells, creates, url, "several clients can create the same object").await?;
    let replace = |i: usize| Request::Replace {
        key: key.clone(),
        value: value(i),
        version: first.clone(),
        lives,
    };
    let several = "several clients can replace the same version of an object";
    winner(cells, (0..RIVALS).map(replace), url, several).await?;
    match cells.one(replace(0)).await? {
        Answer::Refused | Answer::InDoubt => Ok(is_versioned(&first)),
        _ => Err(fault::careless(url, "it replaces an object that has changed since it was read")),
    }
}

/// Runs concurrent requests, and returns the version written by the only one that succeeded.
async fn winner(
    cells: &Lasting<Link>,
    requests: impl Iterator<Item = Request>,
    url: &ObjectsUrl,
    several: &str,
) -> Result<Version> {
    let answers = join_all(requests.map(|request| cells.one(request))).await;
    let (mut winner, mut unknown) = (None, None);
    for answer in answers {
        let answer = match answer {
            // The request must be retried later. Google limits the changes of an object per second.
            Err(error) if error.kind() == ErrorKind::Unreachable => {
                unknown = Some(error);
                continue;
            }
            answer => answer?,
        };
        if let Answer::Written(version) = answer
            && winner.replace(version).is_some()
        {
            return Err(fault::careless(url, several));
        }
    }
    if unknown.is_some() {
        tokio::time::sleep(LATER).await;
    }
    let none = || fault::unreachable(url, "it rejected all of several concurrent writes");
    winner.ok_or_else(|| unknown.unwrap_or_else(none))
}

/// Returns what `doctor` reports about the races, each of which takes at most `limit`. A race
/// without a reply in time proves nothing. If no race was decided, that is an error.
pub(super) async fn finding(
    cells: &Lasting<Link>,
    url: &ObjectsUrl,
    limit: Duration,
) -> Result<Option<String>> {
    let (mut is_decided, mut undecided) = (false, None);
    for _ in 0..ROUNDS {
        let raced = timeout(limit, race(cells, url)).await;
        match raced.unwrap_or_else(|_| Err(fault::unreachable(url, "no reply in time"))) {
            Ok(_) => is_decided = true,
            Err(error) if error.kind() == ErrorKind::Config => return Ok(Some(error.reason())),
            Err(error) if error.kind() == ErrorKind::Unreachable => undecided = Some(error),
            Err(error) => return Err(error),
        }
    }
    match undecided {
        Some(error) if !is_decided => Err(error),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_record_is_read_back_and_older_formats_are_ignored() {
        for is_versioned in [false, true] {
            let mark = Mark { place: "s3://b at http://h".into(), is_versioned, day: 20_000 };
            assert_eq!(Mark::read(&mark.written()), Some(mark));
        }
        for old in ["s3://b", "", "s3://b\nplain", "s3://b\nelse 1"] {
            assert_eq!(Mark::read(old.as_bytes()), None);
        }
    }
}
