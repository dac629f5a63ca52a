//! The stores of this build, by the schemes of their URLs.

use leasehold_core::Registry;

/// The name of a store, which is the name of its feature unless another one is given.
#[allow(unused_macros, reason = "used for the stores that are compiled in")]
macro_rules! name {
    ($feature:literal) => {
        $feature
    };
    ($feature:literal $name:literal) => {
        $name
    };
}

/// Generates `BUILT_IN` and `registry` from one table.
macro_rules! stores {
    ($($feature:literal $(as $name:literal)?: $schemes:expr, $open:path;)+) => {
        /// The names of the stores that are compiled in.
        pub const BUILT_IN: &[&str] =
            &["memory", $(#[cfg(feature = $feature)] name!($feature $($name)?)),+];

        /// Returns the stores that are compiled in, for a [`Builder`](crate::Builder) of your own;
        /// see [`builder`](crate::builder).
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// assert!(leasehold::registry().names().any(|name| name == "memory"));
        /// let locks = leasehold::Builder::new(leasehold::registry()).connect("memory:").await?;
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn registry() -> Registry {
            let registry = Registry::default();
            $(
                #[cfg(feature = $feature)]
                let registry = registry.with(name!($feature $($name)?), $schemes, $open);
                #[cfg(not(feature = $feature))]
                let registry = registry.without($feature, $schemes);
            )+
            registry
        }
    };
}

stores! {
    "file": &["file"], leasehold_file::open;
    "sqlite": &["sqlite"], leasehold_sql::store::open;
    "postgres": &["postgres", "postgresql"], leasehold_sql::store::open;
    "mysql": &["mysql", "mariadb"], leasehold_sql::store::open;
    // Each of these may be followed by a `+` and a deployment.
    "redis": &["redis+", "rediss+", "valkey+", "valkeys+"], leasehold_redis::redis::open;
    "zookeeper": &["zookeeper", "zookeepers"], leasehold_zookeeper::open;
    "etcd": &["etcd", "etcds"], leasehold_etcd::open;
    "redlock": &["redlock", "redlocks"], leasehold_redlock::open;
    "memcached": &["memcached", "memcacheds"], leasehold_cell::memcached::open;
    "nats": &["nats", "natss"], leasehold_cell::nats::open;
    "s3": &["s3"], leasehold_cell::objects::open;
    "gs": &["gs"], leasehold_cell::objects::open;
    "az": &["az"], leasehold_cell::objects::open;
    // The feature `http` is for fences, so this store's feature has another name.
    "http-store" as "http": &["http", "https", "http+unix"], leasehold_http::store::open;
}
