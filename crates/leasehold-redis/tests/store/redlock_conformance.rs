//! The suite on five independent Redis servers.
//!
//! They have just been started, so the delay after a restart is off; and they have long to
//! answer, since the cases are about what is answered, on however slow a machine.

leasehold_conformance::conformance_suite!(redlock, async {
    let url = testbed::redlock().url() + "?restart_delay_ms=0&node_timeout_ms=20000";
    leasehold::connect(url).await.unwrap()
});
