//! Tests of the command that must pass on every store.

/// Runs each of these functions on files, PostgreSQL, Redis and etcd. Each run has a store of its
/// own, except on etcd, where it has names of its own.
macro_rules! on_stores {
    ($($case:ident),* $(,)?) => {$(
        mod $case {
            #[test]
            fn on_files() {
                let place = crate::common::Place::new();
                super::$case(&place.store());
            }

            #[cfg(feature = "postgres")]
            #[test]
            fn on_postgres() {
                super::$case(&testbed::postgres().database());
            }

            #[cfg(feature = "redis")]
            #[test]
            fn on_redis() {
                super::$case(&testbed::Redis::start().url());
            }

            #[cfg(feature = "etcd")]
            #[test]
            fn on_etcd() {
                super::$case(&testbed::etcd().url());
            }
        }
    )*};
}
