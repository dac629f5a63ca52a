//! Which database this is, whatever address it is reached by.

use super::Shared;
use super::fault::Failure;
use super::rows::Cells;

use super::url::{Dialect, SqlUrl};
use super::wire::Statement;
use crate::error::{Error, ErrorKind, Result};

impl Shared {
    /// Which tables of which database these are, whatever address they are reached by: a server has
    /// a name of its own, which its replicas share where it is that of the data.
    pub(super) async fn identity(&self, url: &SqlUrl) -> Result<String> {
        let asked: &[&str] = match url.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => {
                let file = crate::store::machine::identity_of("sqlite", url.path()?.as_ref());
                return Ok(format!("{file}#{}", url.prefix));
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => &[
                "SELECT 'postgres:' || system_identifier || '/' || current_database() || '#' || \
                 current_schema() FROM pg_control_system()",
                "SELECT 'postgres:' || coalesce(inet_server_addr()::text, '') || ':' || \
                 coalesce(inet_server_port()::text, '') || '/' || current_database() || '#' || \
                 current_schema()",
            ],
            #[cfg(feature = "mysql")]
            Dialect::MySql => &[
                "SELECT CONCAT('mysql:', @@server_uuid, '/', DATABASE(), '#')",
                "SELECT CONCAT('mysql:', @@server_uid, '/', DATABASE(), '#')",
                "SELECT CONCAT('mysql:', @@hostname, ':', @@port, '/', DATABASE(), '#')",
            ],
        };
        for sql in asked {
            let statement = Statement { sql: (*sql).into(), shape: "t" };
            let mut pooled = self.pool.take().await.map_err(|e| Failure::from(e).into_error())?;
            match pooled.wire.rows(&statement, Vec::new()).await.map_err(Failure::from) {
                Ok(rows) => {
                    self.pool.put(pooled);
                    let mut cells = Cells::new(rows.into_iter().next().unwrap_or_default());
                    let text = cells.text().map_err(Failure::into_error)?;
                    // The tables of another schema or prefix are another store.
                    return Ok(match &url.schema {
                        Some(_) => format!("{}{}", until_hash(&text), url.table("")),
                        None => format!("{text}.{}", url.prefix),
                    });
                }
                // Another make or version, or a right that was taken away: the next.
                Err(Failure::Final(_)) => {}
                Err(failure) => return Err(failure.into_error()),
            }
        }
        Err(Error::new(ErrorKind::Corrupt, "the database does not say which one it is"))
    }
}

/// The text up to its last `#`, and that.
fn until_hash(text: &str) -> &str {
    text.rfind('#').map_or(text, |at| &text[..=at])
}
