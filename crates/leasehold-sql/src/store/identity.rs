//! Identifies which tables of which database a store uses, independently of the server's address. A
//! server has an identifier of its own, which neither a pooler in front of it nor another host name
//! changes.

use super::fault::{Failure, no_answer};
use super::limits::LIMIT;
use super::rows::Cells;
use super::shared::Shared;
use super::url::{Dialect, SqlUrl};
use super::wire::Statement;
use leasehold_core::{Error, ErrorKind, Result};

/// Returns the queries for the server's identity, in the order in which they are tried. Each
/// returns the names of the server and the database as one text, and the schema of the tables if
/// the URL names none.
fn questions(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => &[],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => &[
            "SELECT 'postgres:' || system_identifier::text || '/' || current_database()::text, \
             current_schema()::text FROM pg_control_system()",
            // For roles that an administrator has denied the function above.
            "SELECT 'postgres:' || coalesce(inet_server_addr()::text, '') || ':' || \
             coalesce(inet_server_port()::text, '') || '/' || current_database()::text, \
             current_schema()::text",
        ],
        #[cfg(feature = "mysql")]
        Dialect::MySql => &[
            "SELECT CONCAT('mysql:', @@server_uuid, '/', DATABASE()), ''",
            // For MariaDB. Old versions lack `server_uid`.
            "SELECT CONCAT('mysql:', @@server_uid, '/', DATABASE()), ''",
            "SELECT CONCAT('mysql:', @@hostname, ':', @@port, '/', DATABASE()), ''",
        ],
    }
}

/// Returns the query for the [mark](Shared::mark) of these tables.
#[cfg(feature = "mysql")]
pub(super) fn mark_of(url: &SqlUrl) -> String {
    format!("SELECT label FROM {} WHERE name = ''", url.table("locks"))
}

impl Shared {
    /// Returns the store's identity, see
    /// [`StoreInfo::identity`](field@leasehold_core::store::StoreInfo::identity). The tables of
    /// another schema or prefix are another store.
    pub(super) async fn identity(&self, url: &SqlUrl) -> Result<String> {
        #[cfg(feature = "sqlite")]
        if url.dialect == Dialect::Sqlite {
            let file = leasehold_core::kit::identity_of("sqlite", url.path()?.as_ref());
            return Ok(format!("{file}#{}", url.prefix));
        }
        for question in questions(url.dialect) {
            let asked = tokio::time::timeout(LIMIT, self.ask_who(question)).await;
            match asked.map_err(|_| no_answer())? {
                Ok([server, schema]) => {
                    let schema = url.schema.clone().unwrap_or(schema);
                    return Ok(format!("{server}#{schema}.{}", url.prefix));
                }
                // The server is another product or version, or the permission was revoked. Try the
                // next query.
                Err(Failure::Final(_)) => {}
                Err(failure) => return Err(failure.into_error()),
            }
        }
        Err(Error::new(ErrorKind::Corrupt, "the database does not report its identity"))
    }

    /// Returns the mark that identifies these tables on any server. The mark is a word in the row
    /// that no lock uses (see [`sweeper`](super::statements::Statements::sweeper)), so replicas and
    /// dumps contain it too. The server's own identifier would not work, because a promoted replica
    /// has a different one.
    #[cfg(feature = "mysql")]
    pub(super) async fn mark(&self, url: &SqlUrl) -> Result<Option<String>, Failure> {
        let mut pooled = self.pool.take().await?;
        let ask = Statement { sql: mark_of(url).into(), shape: "t" };
        let read = |rows: Vec<super::wire::Row>| {
            rows.into_iter().next().map(|row| Cells::new(row).text()).transpose()
        };
        let mut mark = read(pooled.wire.rows(&ask, Vec::new()).await?)?;
        if mark.as_ref().is_some_and(String::is_empty) {
            // If several clients set a mark at the same time, only one client succeeds.
            let sql = format!(
                "UPDATE {} SET label = ? WHERE name = '' AND label = ''",
                url.table("locks")
            );
            let set = Statement { sql: sql.into(), shape: "" };
            let new = leasehold_core::ClaimId::random()?.to_hex();
            pooled.wire.run(&set, vec![new.into()]).await?;
            mark = read(pooled.wire.rows(&ask, Vec::new()).await?)?;
        }
        self.pool.put(pooled);
        Ok(mark.filter(|mark| !mark.is_empty()))
    }

    async fn ask_who(&self, question: &str) -> Result<[String; 2], Failure> {
        let mut pooled = self.pool.take().await?;
        let statement = Statement { sql: question.into(), shape: "tt" };
        let rows = pooled.wire.rows(&statement, Vec::new()).await.map_err(Failure::from);
        // The server answered even if it did not understand the query.
        if matches!(rows, Ok(_) | Err(Failure::Final(_))) {
            self.pool.put(pooled);
        }
        let mut cells = Cells::new(rows?.into_iter().next().unwrap_or_default());
        Ok([cells.text()?, cells.text()?])
    }
}
