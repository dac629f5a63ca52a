//! Which tables of which database a store is, whatever address it is reached by: a server has a name
//! of its own, which neither a pooler in front nor another host name changes.

use super::fault::{Failure, no_answer};
use super::limits::LIMIT;
use super::rows::Cells;
use super::shared::Shared;
use super::url::{Dialect, SqlUrl};
use super::wire::Statement;
use leasehold_core::{Error, ErrorKind, Result};

/// What the server is asked, the first that it understands: its name with the database's, and the
/// schema that tables are in if the URL names none.
fn questions(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => &[],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => &[
            "SELECT 'postgres:' || system_identifier::text || '/' || current_database()::text, \
             current_schema()::text FROM pg_control_system()",
            // Where an administrator has taken that from us.
            "SELECT 'postgres:' || coalesce(inet_server_addr()::text, '') || ':' || \
             coalesce(inet_server_port()::text, '') || '/' || current_database()::text, \
             current_schema()::text",
        ],
        #[cfg(feature = "mysql")]
        Dialect::MySql => &[
            "SELECT CONCAT('mysql:', @@server_uuid, '/', DATABASE()), ''",
            // MariaDB: where it is new enough, and where it is not.
            "SELECT CONCAT('mysql:', @@server_uid, '/', DATABASE()), ''",
            "SELECT CONCAT('mysql:', @@hostname, ':', @@port, '/', DATABASE()), ''",
        ],
    }
}

/// Asks for the mark of these tables.
#[cfg(feature = "mysql")]
pub(super) fn mark_of(url: &SqlUrl) -> String {
    format!("SELECT label FROM {} WHERE name = ''", url.table("locks"))
}

impl Shared {
    /// See [`Store::identity`](leasehold_core::store::Store::identity). The tables of another schema or prefix
    /// are another store.
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
                // Another make or version, or a right that was taken away: the next.
                Err(Failure::Final(_)) => {}
                Err(failure) => return Err(failure.into_error()),
            }
        }
        Err(Error::new(ErrorKind::Corrupt, "the database does not report its identity"))
    }

    /// The mark by which these tables are known whichever server has them: a word in the row that no lock has (see
    /// [`sweeper`](super::statements::Statements::sweeper)), which replicas and dumps have as well. A server has a name
    /// of its own, but a replica that is promoted has another.
    #[cfg(feature = "mysql")]
    pub(super) async fn mark(&self, url: &SqlUrl) -> Result<Option<String>, Failure> {
        let mut pooled = self.pool.take().await?;
        let ask = Statement { sql: mark_of(url).into(), shape: "t" };
        let read = |rows: Vec<super::wire::Row>| {
            rows.into_iter().next().map(|row| Cells::new(row).text()).transpose()
        };
        let mut mark = read(pooled.wire.rows(&ask, Vec::new()).await?)?;
        if mark.as_ref().is_some_and(String::is_empty) {
            // Of several who do so at once, one does.
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
        // A question that was not understood was answered.
        if matches!(rows, Ok(_) | Err(Failure::Final(_))) {
            self.pool.put(pooled);
        }
        let mut cells = Cells::new(rows?.into_iter().next().unwrap_or_default());
        Ok([cells.text()?, cells.text()?])
    }
}
