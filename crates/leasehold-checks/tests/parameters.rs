//! No store accepts an unknown URL parameter.

use leasehold::ErrorKind;

// F34
/// A misspelled parameter would silently have no effect, such as a namespace or TLS.
#[test]
fn stores_reject_unknown_url_parameters() {
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
            "http://127.0.0.1:1/?prefx=a",
        ] {
            let error = leasehold::connect(url).await.expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
        }
    });
}
