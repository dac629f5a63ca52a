//! Host names with several addresses, the first of which drops packets, and servers with high
//! latency.

use std::time::Duration;

use leasehold_test_support::*;
use testbed::{
    Memcached, Nats, Proxy, SeaweedFs, Setup, TWO_ADDRESSES, TWO_OF_A_FAMILY, drop_ipv6,
    drop_second_ipv4, in_own_network,
};

/// Takes and releases a lock through a host name whose first address drops packets.
fn assert_served_by_the_second_address(test: &str, start: impl FnOnce() -> String) {
    in_own_network(test, || {
        run(async {
            let url = start().replace("127.0.0.1", TWO_ADDRESSES);
            drop_ipv6();
            let locks = connect(&url).await;
            release(locks.mutex("a").lock_timeout(PATIENCE).await.unwrap()).await;
        });
    });
}

#[test]
fn memcached_connects_to_the_address_that_responds() {
    let test = "addresses::memcached_connects_to_the_address_that_responds";
    assert_served_by_the_second_address(test, || {
        let server = Box::leak(Box::new(Memcached::start()));
        server.url() + "?restart_delay_ms=0"
    });
}

#[test]
fn nats_connects_to_the_address_that_responds() {
    let test = "addresses::nats_connects_to_the_address_that_responds";
    assert_served_by_the_second_address(test, || Box::leak(Box::new(Nats::start())).url());
}

/// A connection used to get 1.5 s for each address, which was more than a short session allowed a
/// request.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn object_stores_connect_to_the_address_that_responds() {
    in_own_network("addresses::object_stores_connect_to_the_address_that_responds", || {
        run(async {
            let server = SeaweedFs::start();
            drop_second_ipv4();
            let url = server.url("addresses").replace("127.0.0.1", TWO_OF_A_FAMILY);
            let locks = connect(&format!("{url}&session_ms=5000")).await;
            release(locks.mutex("a").lock_timeout(PATIENCE).await.unwrap()).await;
        });
    });
}

/// TCP, the greeting, TLS and the login are five round trips.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn nats_with_tls_connects_over_a_slow_network() {
    run(async {
        let server = Nats::with(Setup::new().tls());
        let proxy = Proxy::before(server.port());
        proxy.delay(Duration::from_millis(220));
        let ca = server.certificates().authority().display().to_string();
        let locks = connect(&format!("natss://127.0.0.1:{}?ca={ca}", proxy.port())).await;
        release(locks.mutex("a").lock_timeout(PATIENCE).await.unwrap()).await;
    });
}
