//! A client beside a pool that its caller has already.

use leasehold_core::kit::Escaped;
use leasehold_core::store::Store;
use leasehold_core::{Builder, Error, ErrorKind, Leasehold, Opening, Result};
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Handle;

use super::SqlStore;
use super::callers::CallersPool;
use super::url::SqlUrl;

/// Connects beside a pool of sqlx's that a service has already, instead of by a URL.
///
/// Whom to connect to, as whom and how (TLS, sockets, passwords out of a vault) is read from the pool, so
/// it is said once. `parameters` is what a URL has after its `?` of leasehold's own: `"prefix=jobs_"`,
/// `"schema=locks&pool=8"`, or nothing, `""`.
///
/// What it does to the number of connections:
///
/// | | connections of the client's own | borrowed from the pool |
/// |---|---|---|
/// | `postgres` | one at rest; under load up to three more for some seconds, for renewals and to hear of turns | at most `pool` (4) at once, each for a statement or a short transaction, while ours is busy |
/// | `mysql` | `pool` (1) for calls, and for moments two for renewals and one for who waits | none |
/// | `sqlite` | `pool` (4), which cost a server nothing | none |
///
/// On the one of its own holds are renewed and turns are heard of: a pool of which all is in use, and a
/// runtime that is blocked, cost no lease. A connection that was borrowed comes back as it was (no setting is
/// changed, nothing is prepared on it); if the call that had it was dropped or failed, it is closed, and the
/// pool makes another. A call on it costs as many round trips as on ours, and one more for sqlx's
/// `test_before_acquire`, which is its default.
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
    /// On the server of this pool; see [`PoolExt`]. To be called on the pool's own runtime.
    ///
    /// # Cancel safety
    /// Dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) outside of a runtime, and for parameters that are not leasehold's; otherwise
    /// as [`Builder::connect`].
    #[cfg(feature = "postgres")]
    fn postgres(
        self,
        pool: &sqlx::PgPool,
        parameters: &str,
    ) -> impl Future<Output = Result<Leasehold>> + Send;

    /// On the server of this pool; see [`PoolExt`].
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
    /// Dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) for parameters that are not leasehold's; otherwise as [`Builder::connect`].
    #[cfg(feature = "mysql")]
    fn mysql(
        self,
        pool: &sqlx::MySqlPool,
        parameters: &str,
    ) -> impl Future<Output = Result<Leasehold>> + Send;

    /// In the file of this pool; see [`PoolExt`].
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
    /// Dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) for a database in memory, which no other connection sees, and for parameters
    /// that are not leasehold's; otherwise as [`Builder::connect`].
    #[cfg(feature = "sqlite")]
    fn sqlite(
        self,
        pool: &sqlx::SqlitePool,
        parameters: &str,
    ) -> impl Future<Output = Result<Leasehold>> + Send;
}

impl PoolExt for Builder {
    #[cfg(feature = "postgres")]
    async fn postgres(self, pool: &sqlx::PgPool, parameters: &str) -> Result<Leasehold> {
        let options = pool.connect_options();
        let host = match options.get_socket() {
            Some(socket) => socket.to_string_lossy().into_owned(),
            None => options.get_host().to_owned(),
        };
        let database = options.get_database().unwrap_or_else(|| options.get_username());
        let url = url("postgres", &host, options.get_port(), database, parameters);
        let runtime = Handle::try_current().map_err(|_| {
            let what = "this is called outside of a runtime: call it where the pool was made";
            Error::new(ErrorKind::Config, what).during("connect").at(&url)
        })?;
        beside(self, url, Some(CallersPool::Postgres(pool.clone(), runtime))).await
    }

    #[cfg(feature = "mysql")]
    async fn mysql(self, pool: &sqlx::MySqlPool, parameters: &str) -> Result<Leasehold> {
        let options = pool.connect_options();
        let host = match options.get_socket() {
            Some(socket) => socket.to_string_lossy().into_owned(),
            None => options.get_host().to_owned(),
        };
        let database = options.get_database().unwrap_or_default();
        // None is borrowed, so there are no more than one, unless that is asked for.
        let parameters = format!("pool=1&{parameters}");
        let url = url("mysql", &host, options.get_port(), database, &parameters);
        beside(self, url, Some(CallersPool::MySql(pool.clone()))).await
    }

    #[cfg(feature = "sqlite")]
    async fn sqlite(self, pool: &sqlx::SqlitePool, parameters: &str) -> Result<Leasehold> {
        let options = pool.connect_options();
        let file = options.get_filename().to_string_lossy();
        // As sqlx calls those in memory, and as SQLite does.
        if file.starts_with("file:") || file.contains(":memory:") || file.contains('?') {
            let what = "no other connection sees this database, or its name has a question mark: \
                        locks are kept in a file";
            return Err(Error::new(ErrorKind::Config, what).during("connect").at("sqlite:"));
        }
        beside(self, format!("sqlite:{file}?{parameters}"), None).await
    }
}

/// What errors name, and the parameters are read from.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn url(scheme: &str, host: &str, port: u16, database: &str, parameters: &str) -> String {
    let host = if host.starts_with('/') { Escaped(host).to_string() } else { host.to_owned() };
    format!("{scheme}://{host}:{port}/{}?{parameters}", Escaped(database))
}

async fn beside(builder: Builder, url: String, callers: Option<CallersPool>) -> Result<Leasehold> {
    let shown = url.split_once('?').map_or(&*url, |(base, _)| base).to_owned();
    let parsed = SqlUrl::parse(&url).and_then(|parsed| match parsed.driver.contains('?') {
        true => {
            let what = "what connections are like is said by the pool: give parameters of leasehold's \
                        alone (prefix, schema, pool)";
            Err(Error::new(ErrorKind::Config, what))
        }
        false => Ok(SqlUrl { callers, ..parsed }),
    });
    let parsed = parsed.map_err(|e| e.during("connect").at(&shown))?;
    let opened = |runtime: Handle| -> Opening {
        let (parsed, shown) = (parsed.clone(), shown.clone());
        Box::pin(async move {
            let opened = SqlStore::open_parsed(parsed, shown.clone(), &runtime).await;
            Ok(opened.map_err(|e| e.during("connect").at(&shown))? as Arc<dyn Store>)
        })
    };
    builder.connect_by(opened).await
}
