//! MySQL and MariaDB, InnoDB.

use std::net::IpAddr;
use std::sync::OnceLock;

use async_trait::async_trait;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlQueryResult, MySqlRow};
use sqlx::{ConnectOptions, Row};

use super::addresses::Addresses;
use super::callers::CallersPool;
use super::fault::{self, Failure};
use super::identity;
use super::message::{self, Message};
use super::url::SqlUrl;
use super::wire::{Arg, Connect, Done, Row as Cells, Statement, Step, Wire, wire};
use leasehold_core::Result;

fn text(row: &MySqlRow, i: usize) -> sqlx::Result<Option<String>> {
    let bytes: Option<Vec<u8>> = row.try_get(i)?;
    let decoded = bytes.map(String::from_utf8).transpose();
    decoded.map_err(|e| sqlx::Error::Decode(e.into()))
}

fn last_id(done: &MySqlQueryResult) -> u64 {
    done.last_insert_id()
}

wire!(MySqlConnection, String::into_bytes, text, last_id);

/// A connection that sends scripts as one message.
///
/// MariaDB ends a transaction that does nothing for a second (`idle_transaction_timeout`). MySQL has
/// no such limit, but one for a session that does nothing, which can be set from one statement to the
/// next: so a client that is stopped, or whose machine dies, with a lock's row in its hands keeps it no
/// longer than that. Nothing else changes, since both settings travel with the BEGIN and the end.
struct Session {
    connection: MySqlConnection,
    /// Whether it is the session whose limit ends a transaction.
    is_watched: bool,
}

const BEGIN: &str = "SET SESSION wait_timeout = 2; START TRANSACTION";
const COMMIT: &str = "COMMIT; SET SESSION wait_timeout = DEFAULT";
const ROLLBACK: &str = "ROLLBACK; SET SESSION wait_timeout = DEFAULT";

/// Fails, with error 1242, if the statement before it has not changed exactly one row.
const CHANGED_ONE: &str = "SELECT IF(ROW_COUNT() = 1, 1, (SELECT 1 UNION ALL SELECT 2))";

impl Session {
    fn words<'a>(&self, sql: &'a str) -> &'a str {
        match sql {
            "START TRANSACTION" if self.is_watched => BEGIN,
            "COMMIT" if self.is_watched => COMMIT,
            "ROLLBACK" if self.is_watched => ROLLBACK,
            other => other,
        }
    }

    fn written(&self, step: Step<'_>) -> Vec<(String, &'static str)> {
        match step {
            Step::Raw(sql) => message::words(self.words(&sql)),
            Step::Rows(statement, args) => message::each(statement, &args, literal),
            Step::One(statement, args) => vec![
                (message::filled(&statement.sql, &args, literal), ""),
                (CHANGED_ONE.to_owned(), ""),
            ],
        }
    }
}

/// A name is bytes, all other text is text.
fn literal(arg: &Arg) -> String {
    match arg {
        Arg::Int(n) => n.to_string(),
        Arg::Text(text) => format!("_utf8mb4 x'{}'", message::hex(text)),
        Arg::Name(name) => format!("x'{}'", message::hex(name)),
    }
}

#[async_trait]
impl Wire for Session {
    async fn rows(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Vec<Cells>> {
        Wire::rows(&mut self.connection, statement, args).await
    }

    async fn run(&mut self, statement: &Statement, args: Vec<Arg>) -> sqlx::Result<Done> {
        Wire::run(&mut self.connection, statement, args).await
    }

    async fn raw(&mut self, sql: &str) -> sqlx::Result<()> {
        let words = self.words(sql);
        Wire::raw(&mut self.connection, words).await
    }

    async fn script(
        &mut self,
        steps: Vec<Step<'_>>,
        done: &mut Vec<Vec<Cells>>,
    ) -> sqlx::Result<()> {
        let message = Message::of(steps, |step| self.written(step));
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(message.sql.clone()));
        message.read::<sqlx::MySql>(sql.fetch_many(&mut self.connection), text, done).await
    }

    async fn close(self: Box<Self>) -> sqlx::Result<()> {
        Wire::close(Box::new(self.connection)).await
    }
}

#[derive(Debug)]
pub(super) struct MySql {
    options: MySqlConnectOptions,
    addresses: Addresses,
    /// Asks for the mark of the tables, and the mark that they had.
    ask: String,
    mark: OnceLock<String>,
}

/// What is said of a connection that leads elsewhere.
const ELSEWHERE: &str = "the URL leads to other tables than when this client connected, and locks there exclude no client \
                         here: restart this client to use them";

impl MySql {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        let driver = url.driver.replacen("mariadb:", "mysql:", 1);
        let options = match &url.callers {
            Some(CallersPool::MySql(pool)) => Ok((*pool.connect_options()).clone()),
            _ => driver.parse::<MySqlConnectOptions>().map_err(Failure::from),
        };
        Ok(Self {
            options: options.map_err(Failure::into_error)?.disable_statement_logging(),
            addresses: Addresses::default(),
            ask: identity::mark_of(url),
            mark: OnceLock::new(),
        })
    }

    /// From now on a connection that leads to tables with another mark is refused.
    pub(super) fn expects(&self, mark: Option<String>) {
        if let Some(mark) = mark {
            let _ = self.mark.set(mark);
        }
    }

    async fn new_connection(&self) -> sqlx::Result<MySqlConnection> {
        let host = self.options.get_host();
        let host = self.options.get_socket().is_none().then_some((host, self.options.get_port()));
        let connect = |by: Option<IpAddr>| {
            let options = match by {
                Some(ip) => self.options.clone().host(&ip.to_string()),
                None => self.options.clone(),
            };
            async move { options.connect().await }
        };
        self.addresses.connect(host, connect).await
    }

    /// Prepares a new session, and refuses one that leads elsewhere: one message.
    async fn arrive(&self, connection: &mut MySqlConnection) -> sqlx::Result<()> {
        let Some(mark) = self.mark.get() else { return Wire::raw(connection, SESSION).await };
        let sql = sqlx::AssertSqlSafe(format!("{SESSION}; {}", self.ask));
        match sqlx::raw_sql(sql).fetch_all(connection).await {
            Ok(rows) => {
                let found = rows.first().map(|row| text(row, 0)).transpose()?.flatten();
                // A row without a mark, or none, tells nothing.
                match found.filter(|found| !found.is_empty() && found != mark) {
                    Some(_) => Err(fault::changed(ELSEWHERE.to_owned())),
                    None => Ok(()),
                }
            }
            Err(error) if fault::is_missing_table(&error) => {
                Err(fault::changed(ELSEWHERE.to_owned()))
            }
            Err(error) => Err(error),
        }
    }
}

/// What a session is set to. Each statement sees what was committed before it, and locks no gaps. The time zone has
/// no summer, so that SYSDATE() can be read back without doubt. The mode is ours, since some change the meaning of a
/// statement (MariaDB: SIMULTANEOUS_ASSIGNMENT). No statement waits for a lock of a row or of a table (a backup's,
/// FLUSH TABLES WITH READ LOCK) for longer than its caller does: the server does not notice that a client has gone
/// while its statement waits, so each try would leave a thread behind.
const SESSION: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
                       SET SESSION time_zone = '+00:00', autocommit = 1, innodb_lock_wait_timeout = 2, \
                       lock_wait_timeout = 2, sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'";

#[async_trait]
impl Connect for MySql {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let mut connection = self.new_connection().await?;
        self.arrive(&mut connection).await?;
        // Ends a client that was stopped with a lock's row in its hands: MariaDB has a word for it.
        let limited = Wire::raw(&mut connection, "SET SESSION idle_transaction_timeout = 1").await;
        let is_watched = match limited {
            Ok(()) => false,
            Err(sqlx::Error::Database(_)) => true,
            Err(error) => return Err(error),
        };
        Ok(Box::new(Session { connection, is_watched }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::SqlStore;
    use leasehold_core::Name;
    use leasehold_core::store::{Joined, Mode, Stall, Store};
    use leasehold_core::{Claim, Kind};

    /// A client dies, or is stopped, with a lock's row in its hands: that ends, on MySQL as well.
    #[tokio::test]
    async fn f38_an_open_section_ends_with_its_client() {
        let own = testbed::mariadb().database();
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        for url in [Some(own), mysql].into_iter().flatten() {
            let here = tokio::runtime::Handle::current();
            let store = SqlStore::open(&url, &here).await.unwrap();
            assert!(matches!(store.info().guarantees.stall, Stall::SameLock(_)));
            let name = Name::new(format!("stopped {}", std::process::id())).unwrap();
            let claim = Claim::new(name.clone(), Kind::Mutex, 1, 1).unwrap();
            store.join(&claim, Mode::Try).await.unwrap();
            let mut pooled = store.shared.pool.take().await.unwrap();
            pooled.wire.raw(store.shared.sql.begin).await.unwrap();
            let named = vec![super::Arg::Name(name.as_str().to_owned())];
            pooled.wire.rows(&store.shared.sql.lock, named).await.unwrap();
            // And no more is heard of that connection.
            let waits = Claim::new(name, Kind::Mutex, 1, 1).unwrap();
            let joined = tokio::time::timeout(Duration::from_secs(30), async {
                loop {
                    if let Ok(joined) = store.join(&waits, Mode::Wait).await {
                        return joined;
                    }
                }
            });
            let joined = joined.await.expect("the row is free again");
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            store.leave(&waits, None).await.unwrap();
            assert!(store.leave(&claim, None).await.unwrap());
            // A connection that has been in a transaction may rest for longer than that.
            let mut pooled = store.shared.pool.take().await.unwrap();
            for sql in [store.shared.sql.begin, "COMMIT"] {
                pooled.wire.raw(sql).await.unwrap();
            }
            tokio::time::sleep(Duration::from_secs(4)).await;
            pooled.wire.raw("SELECT 1").await.unwrap();
        }
    }
}
