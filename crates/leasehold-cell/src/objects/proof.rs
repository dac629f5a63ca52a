//! Whether the object store does what a condition says: some servers, and proxies before them, do not know
//! the headers, leave them out and write.
//!
//! Several create one object at once, and then several replace it: exactly one may do each, and none whose
//! version is old. A store that has passed is marked, so that a client that connects later reads nothing but the
//! mark; `doctor` races again. The mark names all that the proof holds for: the endpoint (also one from the environment),
//! the bucket, the proxy before it, and whether the bucket keeps versions, for some stores judge conditions otherwise
//! then. A mark is good for a week.

use futures_util::future::join_all;
use leasehold_core::kit::wall_micros;
use leasehold_core::{ClaimId, ErrorKind, Result};

use super::fault;
use super::link::{Link, is_versioned};
use super::url::ObjectsUrl;
use crate::cells::{Answer, Request, Version};
use crate::lasting::Lasting;

/// After a race of which some were told to come later.
const LATER: std::time::Duration = std::time::Duration::from_millis(1_200);
/// How often doctor has them race.
const ROUNDS: u32 = 3;
/// How many race.
const RIVALS: usize = 4;

/// How long a mark is good, in days.
const GOOD_FOR: u64 = 7;

/// Proves it, unless that was done before.
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
    // Refused, another client has proved it.
    cells.one(mark).await.map(drop)
}

/// What a mark says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    place: String,
    is_versioned: bool,
    /// In days since 1970, by the clock of the client that proved it: a wrong clock costs a race.
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

/// The place, and how it is reached.
fn way(url: &ObjectsUrl) -> String {
    match &url.way {
        Some(way) => format!("{} through {way}", url.place()),
        None => url.place(),
    }
}

/// Proves it by a race. Whether the bucket keeps versions.
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

/// What the one has written that was let.
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
            // One that is told to come later, as Google does with several changes of an object in a second.
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

/// What doctor says of the race.
pub(super) async fn told(cells: &Lasting<Link>, url: &ObjectsUrl) -> Result<Option<String>> {
    let mut raced = race(cells, url).await;
    for _ in 1..ROUNDS {
        if raced.is_ok() {
            raced = race(cells, url).await;
        }
    }
    match raced {
        Ok(_) => Ok(None),
        Err(error) if error.kind() == ErrorKind::Config => Ok(Some(error.reason())),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_older_ones_are_none() {
        for is_versioned in [false, true] {
            let mark = Mark { place: "s3://b at http://h".into(), is_versioned, day: 20_000 };
            assert_eq!(Mark::read(&mark.written()), Some(mark));
        }
        for old in ["s3://b", "", "s3://b\nplain", "s3://b\nelse 1"] {
            assert_eq!(Mark::read(old.as_bytes()), None);
        }
    }
}
