//! Whether the object store does what a condition says: some servers, and proxies before them, do not know
//! the headers, leave them out and write.
//!
//! Several create one object at once, and then several replace it: exactly one may do each, and none whose
//! version is old. A store that has passed is marked, with its place, so that whoever connects next asks
//! for nothing but the mark; `doctor` races again.

use futures_util::future::join_all;
use leasehold_core::{ClaimId, ErrorKind, Result};

use super::fault;
use super::link::Link;
use super::url::ObjectsUrl;
use crate::cells::{Answer, Request, Version};
use crate::lasting::Lasting;

/// How many race.
const RIVALS: usize = 4;

/// Proves it, unless that was done before.
pub(super) async fn once(cells: &Lasting<Link>, url: &ObjectsUrl) -> Result<()> {
    let (key, place) = (format!("{}p", url.prefix), url.place());
    let found = cells.one(Request::Get { key: key.clone() }).await?;
    if matches!(&found, Answer::Found(found) if found.value == place.as_bytes()) {
        return Ok(());
    }
    race(cells, url).await?;
    let (value, lives) = (place.into_bytes(), None);
    let mark = match found {
        Answer::Found(found) => Request::Replace { key, value, version: found.version, lives },
        _ => Request::Create { key, value, lives },
    };
    // Refused, somebody else has proved it.
    cells.one(mark).await.map(drop)
}

/// Proves it by a race.
pub(super) async fn race(cells: &Lasting<Link>, url: &ObjectsUrl) -> Result<()> {
    let key = format!("{}p:{}", url.prefix, ClaimId::random()?.to_hex());
    let raced = race_for(cells, &key, url).await;
    let cleared = cells.delete(&key).await;
    raced.and(cleared)
}

async fn race_for(cells: &Lasting<Link>, key: &str, url: &ObjectsUrl) -> Result<()> {
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
        Answer::Refused => Ok(()),
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
    let mut winner = None;
    for answer in answers {
        if let Answer::Written(version) = answer?
            && winner.replace(version).is_some()
        {
            return Err(fault::careless(url, several));
        }
    }
    winner.ok_or_else(|| fault::unreachable(url, "it rejected all of several concurrent writes"))
}

/// What doctor says of the race.
pub(super) async fn told(cells: &Lasting<Link>, url: &ObjectsUrl) -> Result<Option<String>> {
    match race(cells, url).await {
        Ok(()) => Ok(None),
        Err(error) if error.kind() == ErrorKind::Config => Ok(Some(error.reason())),
        Err(error) => Err(error),
    }
}
