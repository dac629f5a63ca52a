//! No store accepts a URL parameter that it does not know.

use leasehold::ErrorKind;

/// A parameter that is misspelt means something that is not there: a namespace, or TLS.
#[test]
fn f34_no_store_takes_a_parameter_that_it_does_not_know() {
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        for url in [
            "memory:?prefx=a",
            "redis://127.0.0.1:1/0?prefx=a",
            "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?prefx=a",
            "zookeeper://127.0.0.1:1/a?sesion=4s",
            "etcd://127.0.0.1:1/a?prefx=a",
            "sqlite:/nowhere/a.db?prefx=a",
            "postgres://127.0.0.1:1/d?sslmod=require",
            "mysql://127.0.0.1:1/d?prefx=a",
        ] {
            let error = leasehold::connect(url).await.expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
        }
    });
}
