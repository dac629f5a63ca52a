//! The fenced resource in a Redis server: a list for each lock, guarded by
//! [`fence::redis::Fenced`].

use async_trait::async_trait;
use leasehold::fence::redis::{Fenced, mark_of};
use leasehold::{ErrorKind, Result};
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;

use super::{Entry, Ledger, Proof, failed, foreign, parts};
use crate::resource::Read;

pub(crate) struct Redis {
    client: redis::Client,
    run: String,
    read: Fenced,
    write: Fenced,
}

impl Redis {
    pub(crate) async fn open(url: &str, run: &str) -> Result<Self> {
        let of = parts(url)?;
        let user = of.user.map_or(String::new(), |(user, password)| format!("{user}:{password}@"));
        let url = format!("redis://{user}{}/{}", of.servers, of.path);
        let client = redis::Client::open(url).map_err(failed)?;
        Ok(Self {
            client,
            run: run.to_owned(),
            read: Fenced::new(
                "return { redis.call('LLEN', KEYS[1]), redis.call('LINDEX', KEYS[1], -1) }",
            ),
            write: Fenced::new("return redis.call('RPUSH', KEYS[1], ARGV[1])"),
        })
    }

    /// Opens a new connection for each call, because the last one may have been cut.
    async fn connection(&self) -> Result<MultiplexedConnection> {
        self.client.get_multiplexed_async_connection().await.map_err(failed)
    }

    fn list(&self, lock: usize) -> String {
        format!("leasehold-torture-{{{}}}/{lock}", self.run)
    }
}

/// Maps a stale token to `None`.
fn unless_stale<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(e) if e.kind() == ErrorKind::StaleToken => Ok(None),
        Err(e) => Err(e),
    }
}

#[async_trait]
impl Ledger for Redis {
    async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>> {
        #[allow(irrefutable_let_patterns, reason = "other stores have other proofs")]
        let Proof::Token(token) = proof else { return Err(foreign(proof)) };
        let list = self.list(lock);
        let nothing: [&str; 0] = [];
        let mut connection = self.connection().await?;
        let answer = self.read.run(&mut connection, &list, *token, &[&list], &nothing).await;
        let answer: Option<(usize, Option<String>)> = unless_stale(answer)?;
        let Some((version, last)) = answer else { return Ok(None) };
        let last: Option<Entry> =
            last.map(|text| serde_json::from_str(&text)).transpose().map_err(failed)?;
        Ok(Some(Read { version, value: last.map_or(0, |entry| entry.value) }))
    }

    async fn write(&self, lock: usize, proof: &Proof, entry: Entry) -> Result<bool> {
        #[allow(irrefutable_let_patterns, reason = "other stores have other proofs")]
        let Proof::Token(token) = proof else { return Err(foreign(proof)) };
        let list = self.list(lock);
        let text = serde_json::to_string(&entry).map_err(failed)?;
        let mut connection = self.connection().await?;
        let answer = self.write.run(&mut connection, &list, *token, &[&list], &[text]).await;
        let answer: Option<usize> = unless_stale(answer)?;
        Ok(answer.is_some())
    }

    async fn entries(&self, lock: usize) -> Result<Vec<(usize, Entry)>> {
        let mut connection = self.connection().await?;
        let texts: Vec<String> = connection.lrange(self.list(lock), 0, -1).await.map_err(failed)?;
        let entry = |(i, text): (usize, &String)| Ok((i + 1, serde_json::from_str(text)?));
        let entries: serde_json::Result<_> = texts.iter().enumerate().map(entry).collect();
        entries.map_err(failed)
    }

    async fn remove(&self, locks: usize) -> Result<()> {
        let mut connection = self.connection().await?;
        for lock in 0..locks {
            let list = self.list(lock);
            let () = connection.del(&[mark_of(&list), list]).await.map_err(failed)?;
        }
        Ok(())
    }
}
