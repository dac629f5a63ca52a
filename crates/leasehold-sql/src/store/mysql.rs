//! The connection to MySQL and MariaDB with InnoDB.

mod plain;
pub(super) mod wake;

use std::net::IpAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlQueryResult, MySqlRow};
use sqlx::{ConnectOptions, Row};

use super::callers::CallersPool;
use super::fault::{self, Failure};
use super::identity;
use super::limits::LOGIN;
use super::message::{self, Message};
use super::url::SqlUrl;
use super::version;
use super::wire::{Arg, Connect, Done, Row as Cells, Statement, Step, Wire, wire};
use leasehold_core::Result;
use leasehold_core::kit::Addresses;

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
/// A client that is paused or crashes must not keep a lock's row locked for long. MariaDB ends a
/// transaction that is idle for a second (`idle_transaction_timeout`). MySQL has no such limit, but
/// it has one for an idle session, which can be changed before each statement. So the limit is set
/// together with BEGIN and reset together with the end of the transaction. Outside of transactions
/// the session's limit does not change.
struct Session {
    connection: MySqlConnection,
    /// Whether transactions are limited by the session's idle timeout.
    is_watched: bool,
}

const BEGIN: &str = "SET SESSION wait_timeout = 2; START TRANSACTION";
const COMMIT: &str = "COMMIT; SET SESSION wait_timeout = DEFAULT";
const ROLLBACK: &str = "ROLLBACK; SET SESSION wait_timeout = DEFAULT";

/// Fails with error 1242 unless the previous statement changed exactly one row.
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

/// Returns the literal for an argument. A name is bytes, and all other text is `utf8mb4`.
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
    url: SqlUrl,
    addresses: Addresses,
    /// Whether this client has connected before.
    was_connected: AtomicBool,
    /// The query for the mark of the tables (see [`Shared::mark`](super::shared::Shared::mark)),
    /// and the mark that was found when the store was opened.
    ask: String,
    mark: OnceLock<String>,
}

/// The error for a connection that leads to other tables.
const ELSEWHERE: &str = "the URL now leads to other tables, which do not have this client's locks: restart this client to \
                         use them";

impl MySql {
    pub(super) fn new(url: &SqlUrl) -> Result<Self> {
        options(url)?;
        Ok(Self {
            url: url.clone(),
            addresses: Addresses::new(LOGIN),
            was_connected: AtomicBool::new(false),
            ask: identity::mark_of(url),
            mark: OnceLock::new(),
        })
    }

    /// Sets the tables' identity mark. From then on, connections to tables with a different mark
    /// are refused.
    pub(super) fn expects(&self, mark: Option<String>) {
        if let Some(mark) = mark {
            let _ = self.mark.set(mark);
        }
    }

    async fn new_connection(&self) -> sqlx::Result<MySqlConnection> {
        let options = options(&self.url).map_err(fault::refused)?;
        let host = options.get_host();
        let host = options.get_socket().is_none().then_some((host, options.get_port()));
        let connect = |by: Option<IpAddr>| {
            let options = match by {
                Some(ip) => options.clone().host(&ip.to_string()),
                None => options.clone(),
            };
            async move { options.connect().await }
        };
        self.addresses.connect(host, connect).await
    }

    /// Returns an error for another product, which may not understand the statements that follow.
    async fn first_arrival(&self, connection: &mut MySqlConnection) -> sqlx::Result<()> {
        let asked = sqlx::raw_sql("SELECT VERSION(), @@version_comment");
        let row = asked.fetch_one(connection).await?;
        let arrival = [text(&row, 0)?, text(&row, 1)?].map(Option::unwrap_or_default).join(" ");
        match version::other_product(&arrival, "MySQL or MariaDB") {
            Some(error) => Err(fault::refused(error)),
            None => Ok(()),
        }
    }

    /// Prepares a new session, and refuses one that leads to other tables. This is one message.
    async fn arrive(&self, connection: &mut MySqlConnection) -> sqlx::Result<()> {
        let Some(mark) = self.mark.get() else { return Wire::raw(connection, SESSION).await };
        let sql = sqlx::AssertSqlSafe(format!("{SESSION}; {}", self.ask));
        match sqlx::raw_sql(sql).fetch_all(connection).await {
            Ok(rows) => {
                let found = rows.first().map(|row| text(row, 0)).transpose()?.flatten();
                // A missing or empty mark proves nothing.
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

/// Returns the driver's options, with the current password.
fn options(url: &SqlUrl) -> Result<MySqlConnectOptions> {
    let options = match &url.callers {
        Some(CallersPool::MySql(pool)) => Ok((*pool.connect_options()).clone()),
        _ => url.driver.replacen("mariadb:", "mysql:", 1).parse().map_err(Failure::from),
    };
    let options: MySqlConnectOptions = options.map_err(Failure::into_error)?;
    let options = options.disable_statement_logging();
    Ok(match &url.password {
        Some(password) => options.password(&password.now()),
        None => options,
    })
}

/// The settings of a session.
/// - Each statement sees what was committed before it, and locks no gaps.
/// - The time zone has no daylight saving time, so SYSDATE() can be converted back unambiguously.
/// - The SQL mode is fixed, because some modes change the meaning of a statement (MariaDB's
///   SIMULTANEOUS_ASSIGNMENT).
/// - No statement waits for a row or table lock longer than its caller does. Table locks include a
///   backup's FLUSH TABLES WITH READ LOCK. The server does not notice that a client has gone while
///   its statement waits, so each attempt would leave a thread behind.
const SESSION: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
                       SET SESSION time_zone = '+00:00', autocommit = 1, innodb_lock_wait_timeout = 2, \
                       lock_wait_timeout = 2, sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'";

#[async_trait]
impl Connect for MySql {
    async fn connect(&self) -> sqlx::Result<Box<dyn Wire>> {
        let was_connected = self.was_connected.load(Ordering::SeqCst);
        let connected = self.new_connection().await;
        let mut connection = match was_connected && self.url.can_change_password() {
            true => connected.map_err(fault::while_password_changes)?,
            false => connected?,
        };
        if !was_connected {
            self.first_arrival(&mut connection).await?;
            self.was_connected.store(true, Ordering::SeqCst);
        }
        self.arrive(&mut connection).await?;
        // MariaDB has a setting that ends the transaction of a paused client.
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

    // F38
    /// A client crashes or is paused while it has a lock's row locked. The server unlocks the row,
    /// on MySQL too.
    #[tokio::test]
    async fn open_transaction_ends_with_its_client() {
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
            // Nothing else is sent on the connection that has the row locked.
            let waits = Claim::new(name, Kind::Mutex, 1, 1).unwrap();
            let joined = tokio::time::timeout(Duration::from_secs(30), async {
                loop {
                    if let Ok(joined) = store.join(&waits, Mode::Wait).await {
                        return joined;
                    }
                }
            });
            let joined = joined.await.expect("the row is still locked");
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            store.leave(&waits, None).await.unwrap();
            assert!(store.leave(&claim, None).await.unwrap());
            // A connection that had a transaction may be idle for longer than the limit.
            let mut pooled = store.shared.pool.take().await.unwrap();
            for sql in [store.shared.sql.begin, "COMMIT"] {
                pooled.wire.raw(sql).await.unwrap();
            }
            tokio::time::sleep(Duration::from_secs(4)).await;
            pooled.wire.raw("SELECT 1").await.unwrap();
        }
    }
}
