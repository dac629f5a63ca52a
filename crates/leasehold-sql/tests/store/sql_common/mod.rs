//! Shared code of the tests against SQL servers, with one trait for PostgreSQL, MariaDB and MySQL.

use std::sync::Arc;
use std::time::Duration;

use leasehold::store::sql::SqlStore;
use leasehold::store::{Claim, ClaimState, Joined, LockInfo, Renew, Renewal, Store};
use leasehold::{Kind, Name, Token};
pub(crate) use leasehold_test_support::*;
use sqlx::Connection;
#[cfg(feature = "mysql")]
use testbed::MariaDb;
#[cfg(feature = "postgres")]
use testbed::Postgres;
use testbed::Setup;
use tokio::runtime::Handle;

/// Cases for PostgreSQL, MariaDB and MySQL.
macro_rules! on_all {
    ($($case:ident),+ $(,)?) => {
        #[cfg(feature = "postgres")]
        mod postgres {
            $(#[test] fn $case() { super::run(super::$case::<testbed::Postgres>()); })+
        }
        #[cfg(feature = "mysql")]
        mod mariadb {
            $(#[test] fn $case() { super::run(super::$case::<testbed::MariaDb>()); })+
        }
        #[cfg(feature = "mysql")]
        mod mysql {
            $(#[test] fn $case() {
                if <testbed::MySql as super::Server>::is_here() {
                    super::run(super::$case::<testbed::MySql>());
                }
            })+
        }
    };
}

/// Cases for PostgreSQL and MariaDB.
macro_rules! without_mysql {
    ($($case:ident),+ $(,)?) => {
        mod without_mysql {
            mod postgres { $(#[test] fn $case() { super::super::run(super::super::$case::<testbed::Postgres>()); })+ }
            mod mariadb { $(#[test] fn $case() { super::super::run(super::super::$case::<testbed::MariaDb>()); })+ }
        }
    };
}

pub(crate) use {on_all, without_mysql};

/// A server with databases for tests.
pub(crate) trait Server: Send + Sync + Sized + 'static {
    /// Returns whether this server is part of this run. If not, that is reported.
    fn is_here() -> bool;
    fn with(setup: Setup) -> Self;
    fn shared() -> &'static Self;
    /// Creates a database for the user `lh`.
    fn database(&self) -> String;
    fn port(&self) -> u16;
    fn kill(&self);
    fn restart(&self);
    fn stop(&self);
    fn cont(&self);
    fn shift_clock(&self, seconds: i64);
    /// Runs SQL as the administrator in the database of this URL.
    fn admin(&self, url: &str, sql: &str) -> String;
    /// Ends every session of `lh`, as an administrator may.
    fn end_sessions(&self);
    /// Returns how many sessions `lh` has in the database of this URL, and how many have open
    /// transactions. (MariaDB updates the latter only when it was not queried for 100 ms.)
    fn sessions(&self, url: &str) -> (usize, usize);
    /// Returns the tables of the database.
    fn tables(&self, url: &str) -> Vec<String>;
    /// Creates a user with this name and password, with these permissions on all existing tables.
    fn user(&self, url: &str, user: &str, rights: &str);
    /// Returns the certificate of this server's authority ([`Setup::tls`]).
    fn authority(&self) -> std::path::PathBuf;
    /// Returns the parameters of a URL that requires TLS and trusts only this authority.
    fn verified(&self, authority: &std::path::Path) -> String;
    /// Runs a statement in a transaction that stays open until the value is dropped.
    fn hold(&self, url: &str, sql: &'static str) -> impl Future<Output = impl Send> + Send;
    /// Makes transactions serializable by default.
    fn serializable(&self, url: &str);
    /// Makes the server refuse to write.
    fn read_only(&self, url: &str, on: bool);
    /// Runs SQL as the administrator, as one message.
    fn script(&self, url: &str, sql: &str) -> impl Future<Output = ()> + Send;
    /// Runs `first` in a transaction, and `then` after a signal.
    fn in_two_steps(
        &self,
        url: &str,
        steps: [&'static str; 2],
        begun: tokio::sync::oneshot::Sender<()>,
        go_on: tokio::sync::oneshot::Receiver<()>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send + 'static;
    /// Returns how many sessions wait for a lock.
    fn blocked(&self) -> usize;
    /// Returns how many deadlocks there were.
    fn deadlocks(&self) -> usize;
    /// Returns the server's log.
    fn log(&self) -> String;
}

/// [`Server::in_two_steps`] on a connection of any kind.
macro_rules! two_steps {
    ($connection:ty, $url:expr, $steps:expr, $begun:expr, $go_on:expr) => {{
        let (url, [first, then], begun, go_on) = ($url.to_owned(), $steps, $begun, $go_on);
        async move {
            let mut connection = <$connection>::connect(&url).await?;
            for sql in ["BEGIN", first] {
                sqlx::raw_sql(sql).execute(&mut connection).await?;
            }
            begun.send(()).expect("the test does not wait for the first step");
            go_on.await.expect("the test ended before the second step");
            for sql in [then, "COMMIT"] {
                sqlx::raw_sql(sql).execute(&mut connection).await?;
            }
            Ok(())
        }
    }};
}

/// Returns the database's name in a URL.
pub(crate) fn database_of(url: &str) -> &str {
    url.rsplit('/').next().expect("a URL")
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

#[cfg(feature = "postgres")]
impl Server for Postgres {
    fn is_here() -> bool {
        testbed::Server::Postgres.in_this_run()
    }

    fn with(setup: Setup) -> Self {
        Postgres::with(setup)
    }

    fn shared() -> &'static Self {
        testbed::postgres()
    }

    fn database(&self) -> String {
        Postgres::database(self)
    }

    fn port(&self) -> u16 {
        Postgres::port(self)
    }

    fn kill(&self) {
        Postgres::kill(self);
    }

    fn restart(&self) {
        Postgres::restart(self);
    }

    fn stop(&self) {
        Postgres::stop(self);
    }

    fn cont(&self) {
        Postgres::cont(self);
    }

    fn shift_clock(&self, seconds: i64) {
        Postgres::shift_clock(self, seconds);
    }

    fn admin(&self, url: &str, sql: &str) -> String {
        Postgres::admin(self, database_of(url), sql)
    }

    fn end_sessions(&self) {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'lh'";
        Postgres::admin(self, "postgres", sql);
    }

    fn sessions(&self, url: &str) -> (usize, usize) {
        let sql = format!(
            "SELECT xact_start IS NOT NULL FROM pg_stat_activity WHERE usename = 'lh' AND \
             datname = '{}'",
            database_of(url)
        );
        let found = lines(&Postgres::admin(self, "postgres", &sql));
        (found.len(), found.iter().filter(|open| *open == "t").count())
    }

    fn tables(&self, url: &str) -> Vec<String> {
        lines(&Server::admin(
            self,
            url,
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'",
        ))
    }

    fn user(&self, url: &str, user: &str, rights: &str) {
        Server::admin(self, url, &format!("CREATE ROLE {user} LOGIN PASSWORD '{user}'"));
        Server::admin(
            self,
            url,
            &format!("GRANT {rights} ON ALL TABLES IN SCHEMA public TO {user}"),
        );
    }

    fn authority(&self) -> std::path::PathBuf {
        self.certificates().authority().to_owned()
    }

    fn verified(&self, authority: &std::path::Path) -> String {
        format!("sslmode=verify-full&sslrootcert={}", authority.display())
    }

    async fn hold(&self, url: &str, sql: &'static str) -> impl Send {
        let mut connection = sqlx::PgConnection::connect(url).await.expect("a connection");
        for sql in ["BEGIN", sql] {
            sqlx::raw_sql(sql).execute(&mut connection).await.expect("the statement failed");
        }
        connection
    }

    fn serializable(&self, url: &str) {
        let database = database_of(url);
        let setting = "default_transaction_isolation = 'serializable'";
        Server::admin(self, url, &format!("ALTER DATABASE {database} SET {setting}"));
    }

    fn read_only(&self, url: &str, on: bool) {
        let database = database_of(url);
        // From another database, which can be written to.
        let beside = url.replace(&format!("/{database}"), "/postgres");
        let set = format!("ALTER DATABASE {database} SET default_transaction_read_only = {on}");
        self.admin(&beside, &set);
        if on {
            self.end_sessions();
        }
    }

    async fn script(&self, url: &str, sql: &str) {
        Server::admin(self, url, sql);
    }

    fn in_two_steps(
        &self,
        url: &str,
        steps: [&'static str; 2],
        begun: tokio::sync::oneshot::Sender<()>,
        go_on: tokio::sync::oneshot::Receiver<()>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send + 'static {
        two_steps!(sqlx::PgConnection, url, steps, begun, go_on)
    }

    fn blocked(&self) -> usize {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        Postgres::admin(self, "postgres", sql).parse().expect("a number")
    }

    fn deadlocks(&self) -> usize {
        Server::log(self).matches("deadlock detected").count()
    }

    fn log(&self) -> String {
        Postgres::log(self)
    }
}

/// MariaDB, and MySQL, which behaves the same for these tests.
#[cfg(feature = "mysql")]
macro_rules! mysql_server {
    ($server:ty, $which:expr, $shared:expr) => {
impl Server for $server {
    fn is_here() -> bool {
        $which.in_this_run()
    }

    fn with(setup: Setup) -> Self {
        Self::with(setup)
    }

    fn shared() -> &'static Self {
        $shared
    }

    fn database(&self) -> String {
        MariaDb::database(self)
    }

    fn port(&self) -> u16 {
        MariaDb::port(self)
    }

    fn kill(&self) {
        MariaDb::kill(self);
    }

    fn restart(&self) {
        MariaDb::restart(self);
    }

    fn stop(&self) {
        MariaDb::stop(self);
    }

    fn cont(&self) {
        MariaDb::cont(self);
    }

    fn shift_clock(&self, seconds: i64) {
        MariaDb::shift_clock(self, seconds);
    }

    fn admin(&self, url: &str, sql: &str) -> String {
        MariaDb::admin(self, &format!("USE {}; {sql}", database_of(url)))
    }

    fn end_sessions(&self) {
        let all = "SELECT id FROM information_schema.processlist WHERE user = 'lh'";
        for id in lines(&MariaDb::admin(self, all)) {
            // The session may have ended already.
            MariaDb::admin_may_fail(self, &format!("KILL {id}"));
        }
    }

    fn sessions(&self, url: &str) -> (usize, usize) {
        let database = database_of(url);
        let all = "SELECT count(*) FROM information_schema.processlist WHERE db";
        let open = "SELECT count(*) FROM information_schema.innodb_trx t JOIN \
                    information_schema.processlist p ON p.id = t.trx_mysql_thread_id WHERE p.db";
        let count = |sql: &str| {
            let counted = MariaDb::admin(self, &format!("{sql} = '{database}'"));
            counted.parse().expect("a number")
        };
        (count(all), count(open))
    }

    fn tables(&self, url: &str) -> Vec<String> {
        lines(&Server::admin(self, url, "SHOW TABLES"))
    }

    fn user(&self, url: &str, user: &str, rights: &str) {
        let at = format!("'{user}'@'127.0.0.1'");
        let create = format!("CREATE USER IF NOT EXISTS {at} IDENTIFIED BY '{user}'");
        let grant = format!("GRANT {rights} ON {}.* TO {at}", database_of(url));
        MariaDb::admin(self, &format!("{create}; {grant}"));
    }

    fn authority(&self) -> std::path::PathBuf {
        self.certificates().authority().to_owned()
    }

    fn verified(&self, authority: &std::path::Path) -> String {
        format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={}", authority.display())
    }

    async fn hold(&self, url: &str, sql: &'static str) -> impl Send {
        let mut connection = sqlx::MySqlConnection::connect(url).await.expect("a connection");
        for sql in ["BEGIN", sql] {
            sqlx::raw_sql(sql).execute(&mut connection).await.expect("the statement failed");
        }
        connection
    }

    fn serializable(&self, _url: &str) {
        MariaDb::admin(self, "SET GLOBAL TRANSACTION ISOLATION LEVEL SERIALIZABLE");
    }

    fn read_only(&self, _url: &str, on: bool) {
        MariaDb::admin(self, &format!("SET GLOBAL read_only = {on}"));
    }

    async fn script(&self, url: &str, sql: &str) {
        let url = url.replace("lh:lh@", "admin:admin@");
        let mut connection = sqlx::MySqlConnection::connect(&url).await.expect("a connection");
        let sql = sqlx::AssertSqlSafe(sql.to_owned());
        sqlx::raw_sql(sql).execute(&mut connection).await.expect("the statement failed");
    }

    fn in_two_steps(
        &self,
        url: &str,
        steps: [&'static str; 2],
        begun: tokio::sync::oneshot::Sender<()>,
        go_on: tokio::sync::oneshot::Receiver<()>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send + 'static {
        two_steps!(sqlx::MySqlConnection, url, steps, begun, go_on)
    }

    fn blocked(&self) -> usize {
        // Not `innodb_trx`, because InnoDB updates it only when it was not read for 100 ms. More
        // frequent queries would always return the same.
        let row = MariaDb::admin(self, "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'");
        row.rsplit('\t').next().and_then(|n| n.parse().ok()).expect("a number")
    }

    fn deadlocks(&self) -> usize {
        let sql = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'";
        MariaDb::admin(self, sql).parse().expect("a number")
    }

    fn log(&self) -> String {
        MariaDb::log(self)
    }
}
    };
}

#[cfg(feature = "mysql")]
mysql_server!(MariaDb, testbed::Server::MariaDb, testbed::mariadb());
#[cfg(feature = "mysql")]
mysql_server!(testbed::MySql, testbed::Server::MySql, testbed::mysql());

/// Locks one lock's row, as a transaction in progress does.
pub(crate) const BLOCK: &str = "SELECT name FROM leasehold_locks WHERE name = 'blocked' FOR UPDATE";

/// Returns the error of a client that is refused when it connects or, at the latest, at its first
/// lock.
pub(crate) async fn refusal(url: &str) -> leasehold::Error {
    match leasehold::connect(url).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex("refused").try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was granted on {}", locks.url()),
        },
    }
}

pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const SHORT: Duration = Duration::from_millis(300);

pub(crate) type Two = [Arc<SqlStore>; 2];

pub(crate) async fn two(url: &str) -> Two {
    let open = async || SqlStore::open(url, &Handle::current()).await.unwrap();
    [open().await, open().await]
}

pub(crate) fn claim(name: &str, lease: Duration, waiter_lease: Duration) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    (claim.lease, claim.waiter_lease) = (lease, waiter_lease);
    claim
}

#[track_caller]
pub(crate) fn holding(joined: &Joined) -> Token {
    match joined {
        Joined::Holding { token, .. } => *token,
        other => panic!("expected a hold, got {other:?}"),
    }
}

#[track_caller]
pub(crate) fn waiting(joined: &Joined) -> Token {
    match joined {
        Joined::Waiting(place) => place.token.expect("the claim has no token"),
        other => panic!("expected to wait, got {other:?}"),
    }
}

pub(crate) async fn renewed(store: &SqlStore, claim: &Claim) -> Renewal {
    let renewal = Renew { claim: claim.clone(), lease: claim.lease };
    store.renew(&[renewal]).await.unwrap().remove(0)
}

pub(crate) fn claim_states(info: Option<LockInfo>) -> Vec<(ClaimState, Option<Token>)> {
    let claims = info.map(|info| info.claims).unwrap_or_default();
    claims.into_iter().map(|c| (c.state, c.token)).collect()
}

/// Limits that an administrator sets for a user's statements and connections.
pub(crate) trait Hasty {
    fn hasty(&self, url: &str);
    fn few_connections(&self, url: &str);
    /// Returns how many statements the server has aborted.
    fn cut_short(&self) -> usize;
}

#[cfg(feature = "postgres")]
impl Hasty for Postgres {
    fn hasty(&self, url: &str) {
        Server::admin(self, url, "ALTER ROLE hasty SET statement_timeout = '300ms'");
    }
    fn few_connections(&self, url: &str) {
        Server::admin(self, url, "ALTER ROLE few CONNECTION LIMIT 1");
    }
    fn cut_short(&self) -> usize {
        Server::log(self).matches("canceling statement due to statement timeout").count()
    }
}

#[cfg(feature = "mysql")]
impl Hasty for MariaDb {
    fn hasty(&self, url: &str) {
        Server::admin(self, url, "ALTER USER 'hasty'@'127.0.0.1' WITH MAX_STATEMENT_TIME 0.3");
    }
    fn few_connections(&self, url: &str) {
        Server::admin(self, url, "ALTER USER 'few'@'127.0.0.1' WITH MAX_USER_CONNECTIONS 1");
    }
    fn cut_short(&self) -> usize {
        let count = MariaDb::admin(self, "SHOW GLOBAL STATUS LIKE 'Max_statement_time_exceeded'");
        count.rsplit('\t').next().and_then(|n| n.parse().ok()).expect("a number")
    }
}
