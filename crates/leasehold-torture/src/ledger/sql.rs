//! The fenced resource in a SQL database: one row for each entry, added in a transaction that
//! [`fence::sql::check`] guards.

use async_trait::async_trait;
use leasehold::database::{self, error};
use leasehold::{ErrorKind, Result, fence};
use sqlx::{AssertSqlSafe, Pool};

use super::{Entry, Ledger, Proof, failed, foreign};
use crate::history::OpId;
use crate::resource::Read;

/// Pool size. A worker has four operations at a time, so more connections are not needed.
const CONNECTIONS: u32 = 4;

/// Returns the URL as the driver expects it, without leasehold's own parameters.
fn plain(url: &str) -> String {
    const KEPT: [&str; 5] = ["host", "sslmode", "sslrootcert", "ssl-mode", "ssl-ca"];
    let Some((url, query)) = url.split_once('?') else { return url.to_owned() };
    let known = |pair: &&str| KEPT.contains(&pair.split('=').next().unwrap_or_default());
    let kept: Vec<&str> = query.split('&').filter(known).collect();
    let url = url.replacen("mariadb:", "mysql:", 1);
    if kept.is_empty() { url } else { format!("{url}?{}", kept.join("&")) }
}

/// Everything that is put into a statement here is a number or hexadecimal digits made by this
/// program.
macro_rules! ledger {
    ($feature:literal, $name:ident) => {
        #[cfg(feature = $feature)]
        pub(crate) struct $name {
            pool: Pool<sqlx::$name>,
            run: String,
        }

        #[cfg(feature = $feature)]
        impl $name {
            pub(crate) async fn open(url: &str, run: &str, make: bool) -> Result<Self> {
                let options = sqlx::pool::PoolOptions::new().max_connections(CONNECTIONS);
                let pool = options.connect_lazy(&plain(url)).map_err(error)?;
                if make {
                    database::install(&pool).await?;
                    let sql = format!(
                        "CREATE TABLE leasehold_torture_{run} (lock_no BIGINT NOT NULL, \
                         n BIGINT NOT NULL, base BIGINT NOT NULL, val BIGINT NOT NULL, \
                         token BIGINT NOT NULL, worker BIGINT NOT NULL, op BIGINT NOT NULL, \
                         PRIMARY KEY (lock_no, n))"
                    );
                    sqlx::query(AssertSqlSafe(sql)).execute(&pool).await.map_err(error)?;
                }
                Ok(Self { pool, run: run.to_owned() })
            }

            fn resource(&self, lock: usize) -> String {
                format!("leasehold-torture-{}/{lock}", self.run)
            }

            /// Begins a transaction during which no greater token can be accepted. `None`: a
            /// greater token was accepted before.
            async fn begin(
                &self,
                lock: usize,
                proof: &Proof,
            ) -> Result<Option<sqlx::Transaction<'static, sqlx::$name>>> {
                #[allow(irrefutable_let_patterns, reason = "other stores have other proofs")]
                let Proof::Token(token) = proof else { return Err(foreign(proof)) };
                let mut tx = self.pool.begin().await.map_err(error)?;
                match fence::sql::check(&mut tx, self.resource(lock), *token).await {
                    Ok(()) => Ok(Some(tx)),
                    Err(e) if e.kind() == ErrorKind::StaleToken => {
                        tx.rollback().await.map_err(error)?;
                        Ok(None)
                    }
                    Err(e) => Err(e),
                }
            }

            fn last(&self, lock: usize) -> String {
                let run = &self.run;
                format!(
                    "SELECT n, val FROM leasehold_torture_{run} WHERE lock_no = {lock} \
                     ORDER BY n DESC LIMIT 1"
                )
            }
        }

        #[cfg(feature = $feature)]
        #[async_trait]
        impl Ledger for $name {
            async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>> {
                let Some(mut tx) = self.begin(lock, proof).await? else { return Ok(None) };
                let last: Option<(i64, i64)> =
                    sqlx::query_as(AssertSqlSafe(self.last(lock)))
                        .fetch_optional(&mut *tx)
                        .await
                        .map_err(error)?;
                tx.commit().await.map_err(error)?;
                let (version, value) = last.unwrap_or_default();
                let read = (usize::try_from(version), u64::try_from(value));
                let (Ok(version), Ok(value)) = read else { return Err(failed("a negative number")) };
                Ok(Some(Read { version, value }))
            }

            async fn write(&self, lock: usize, proof: &Proof, entry: Entry) -> Result<bool> {
                let Some(mut tx) = self.begin(lock, proof).await? else { return Ok(false) };
                let last: Option<(i64, i64)> =
                    sqlx::query_as(AssertSqlSafe(self.last(lock)))
                        .fetch_optional(&mut *tx)
                        .await
                        .map_err(error)?;
                let n = last.map_or(0, |(n, _)| n) + 1;
                let (run, Entry { base, value, token, op: OpId { worker, n: op } }) =
                    (&self.run, entry);
                let sql = format!(
                    "INSERT INTO leasehold_torture_{run} (lock_no, n, base, val, token, worker, op) \
                     VALUES ({lock}, {n}, {base}, {value}, {token}, {worker}, {op})"
                );
                sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.map_err(error)?;
                tx.commit().await.map_err(error)?;
                Ok(true)
            }

            async fn entries(&self, lock: usize) -> Result<Vec<(usize, Entry)>> {
                let sql = format!(
                    "SELECT n, base, val, token, worker, op FROM leasehold_torture_{} \
                     WHERE lock_no = {lock} ORDER BY n",
                    self.run
                );
                let rows: Vec<(i64, i64, i64, i64, i64, i64)> =
                    sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&self.pool).await.map_err(error)?;
                let entry = |(n, base, value, token, worker, op): (i64, i64, i64, i64, i64, i64)| {
                    let op = OpId { worker: worker.try_into().ok()?, n: op.try_into().ok()? };
                    let (base, value) = (base.try_into().ok()?, value.try_into().ok()?);
                    let token = token.try_into().ok()?;
                    Some((usize::try_from(n).ok()?, Entry { base, value, token, op }))
                };
                let entries: Option<Vec<_>> = rows.into_iter().map(entry).collect();
                entries.ok_or_else(|| failed("a number that no worker wrote"))
            }

            async fn remove(&self, locks: usize) -> Result<()> {
                let sql = format!("DROP TABLE leasehold_torture_{}", self.run);
                sqlx::query(AssertSqlSafe(sql)).execute(&self.pool).await.map_err(error)?;
                for lock in 0..locks {
                    let name = self.resource(lock);
                    let sql = format!("DELETE FROM leasehold_fence WHERE name = '{name}'");
                    sqlx::query(AssertSqlSafe(sql)).execute(&self.pool).await.map_err(error)?;
                }
                Ok(())
            }
        }
    };
}

ledger!("sqlite", Sqlite);
ledger!("postgres", Postgres);
ledger!("mysql", MySql);
