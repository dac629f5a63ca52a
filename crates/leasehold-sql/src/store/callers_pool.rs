//! Clients that use an existing pool of the caller.

#[cfg(any(feature = "postgres", feature = "mysql"))]
use leasehold_core::kit::Escaped;
use leasehold_core::store::Store;
use leasehold_core::{Builder, Client, Error, ErrorKind, Opening, Result};
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Handle;

use super::SqlStore;
use super::callers::CallersPool;
use super::url::SqlUrl;

/// Connects to the database of an existing `sqlx` pool instead of a URL.
///
/// Server, user and connection settings (TLS, sockets, passwords from a vault) come from the pool.
/// `parameters` contains leasehold's own parameters, as after the `?` of a URL: `"prefix=jobs_"`,
/// `"schema=locks&pool=8"`, or `""` for none.
///
/// Number of connections:
///
/// | | own connections of the client | borrowed from the pool |
/// |---|---|---|
/// | `postgres` | one when idle; under load up to three more for a few seconds, for renewals and notifications | at most `pool` (4) at a time, each for one statement or a short transaction, while its own connection is busy |
/// | `mysql` | `pool` (1) for calls; temporarily two for renewals and one for waiters | none |
/// | `sqlite` | `pool` (4), without cost for a server | none |
///
/// Renewals and notifications use the client's own connections. No lease is lost when the pool is
/// exhausted or the runtime is blocked. Borrowed connections are returned unchanged: leasehold
/// changes no setting and prepares nothing on them. If a call that uses one fails or is dropped,
/// the connection is closed and the pool opens another. A call on a borrowed connection costs one
/// more round trip for sqlx's `test_before_acquire`, which is on by default.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold::store::sql::PoolExt;
/// let pool = sqlx::PgPool::connect("postgres://service@db/shop").await?;
/// let locks = leasehold::builder().label("shop 3").postgres(&pool, "").await?;
/// let guard = locks.mutex("order:42").lock().await?;
/// # Ok(()) }
/// ```
pub trait PoolExt: Sized {
    /// Connects to the PostgreSQL server of this pool, see [`PoolExt`]. Call it on the pool's own
    /// runtime.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): called outside of a runtime, or with a parameter that is
    ///   not one of leasehold's own.
    /// - The errors of [`Builder::connect`].
    #[cfg(feature = "postgres")]
    fn postgres(
        self,
        pool: &sqlx::PgPool,
        parameters: &str,
    ) -> impl Future<Output = Result<Client>> + Send;

    /// Connects to the MySQL server of this pool, see [`PoolExt`].
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold::store::sql::PoolExt;
    /// let pool = sqlx::MySqlPool::connect("mysql://service@db/shop").await?;
    /// let locks = leasehold::builder().mysql(&pool, "pool=2").await?;
    /// # drop(locks); Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): a parameter is not one of leasehold's own.
    /// - The errors of [`Builder::connect`].
    #[cfg(feature = "mysql")]
    fn mysql(
        self,
        pool: &sqlx::MySqlPool,
        parameters: &str,
    ) -> impl Future<Output = Result<Client>> + Send;

    /// Uses the SQLite file of this pool, see [`PoolExt`].
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use leasehold::store::sql::PoolExt;
    /// let pool = sqlx::SqlitePool::connect("sqlite:/var/lib/shop/shop.db").await?;
    /// let locks = leasehold::builder().sqlite(&pool, "").await?;
    /// # drop(locks); Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the database is in memory, where no other connection can
    ///   see it, or a parameter is not one of leasehold's own.
    /// - The errors of [`Builder::connect`].
    #[cfg(feature = "sqlite")]
    fn sqlite(
        self,
        pool: &sqlx::SqlitePool,
        parameters: &str,
    ) -> impl Future<Output = Result<Client>> + Send;
}

impl PoolExt for Builder {
    #[cfg(feature = "postgres")]
    async fn postgres(self, pool: &sqlx::PgPool, parameters: &str) -> Result<Client> {
        let options = pool.connect_options();
        let host = match options.get_socket() {
            Some(socket) => socket.to_string_lossy().into_owned(),
            None => options.get_host().to_owned(),
        };
        let database = options.get_database().unwrap_or_else(|| options.get_username());
        let url = url("postgres", &host, options.get_port(), database, parameters);
        let runtime = Handle::try_current().map_err(|_| {
            let what = "called outside of a Tokio runtime";
            let error =
                Error::new(ErrorKind::Config, what).with_operation("connect").with_store(&url);
            error.with_hint("call it in the runtime in which the pool was created")
        })?;
        beside(self, url, Some(CallersPool::Postgres(pool.clone(), runtime))).await
    }

    #[cfg(feature = "mysql")]
    async fn mysql(self, pool: &sqlx::MySqlPool, parameters: &str) -> Result<Client> {
        let options = pool.connect_options();
        let host = match options.get_socket() {
            Some(socket) => socket.to_string_lossy().into_owned(),
            None => options.get_host().to_owned(),
        };
        let database = options.get_database().unwrap_or_default();
        // The client does not borrow from this pool. It uses one connection, unless the parameters
        // request more.
        let parameters = format!("pool=1&{parameters}");
        let url = url("mysql", &host, options.get_port(), database, &parameters);
        beside(self, url, Some(CallersPool::MySql(pool.clone()))).await
    }

    #[cfg(feature = "sqlite")]
    async fn sqlite(self, pool: &sqlx::SqlitePool, parameters: &str) -> Result<Client> {
        let options = pool.connect_options();
        let name = options.get_filename();
        let file = name.to_string_lossy();
        // Names of databases in memory, according to sqlx and SQLite.
        if file.starts_with("file:") || file.contains(":memory:") || file.contains('?') {
            let what =
                "the pool's database is in memory, or its file name contains a question mark";
            let error =
                Error::new(ErrorKind::Config, what).with_operation("connect").with_store("sqlite:");
            return Err(error
                .with_hint("use a pool of a database file, such as sqlite:/var/lib/app/locks.db"));
        }
        let file = std::path::absolute(name).unwrap_or_else(|_| name.to_path_buf());
        beside(self, format!("sqlite:{}?{parameters}", file.display()), None).await
    }
}

/// Returns the URL that errors contain and from which the parameters are parsed.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn url(scheme: &str, host: &str, port: u16, database: &str, parameters: &str) -> String {
    let host = if host.starts_with('/') { Escaped(host).to_string() } else { host.to_owned() };
    format!("{scheme}://{host}:{port}/{}?{parameters}", Escaped(database))
}

async fn beside(builder: Builder, url: String, callers: Option<CallersPool>) -> Result<Client> {
    let shown = url.split_once('?').map_or(&*url, |(base, _)| base).to_owned();
    let parsed = SqlUrl::parse(&url).and_then(|parsed| match parsed.driver.contains('?') || parsed.password.is_some() {
        true => {
            let what = "a parameter belongs to the database driver, but the pool already defines \
                        the connections";
            let hint = "use leasehold's own parameters only: prefix, schema, pool, create";
            Err(Error::new(ErrorKind::Config, what).with_hint(hint))
        }
        false => Ok(SqlUrl { callers, ..parsed }),
    });
    let parsed = parsed.map_err(|e| e.with_operation("connect").with_store(&shown))?;
    let opened = |runtime: Handle| -> Opening {
        let (parsed, shown) = (parsed.clone(), shown.clone());
        Box::pin(async move {
            let opened = SqlStore::open_parsed(parsed, shown.clone(), &runtime).await;
            Ok(opened.map_err(|e| e.with_operation("connect").with_store(&shown))?
                as Arc<dyn Store>)
        })
    };
    builder.connect_by(opened).await
}
