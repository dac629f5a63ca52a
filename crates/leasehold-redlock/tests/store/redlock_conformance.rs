//! Runs the suite on five independent Redis servers.
//!
//! The servers have just been started, so the delay after a restart is off. They have a long time
//! to respond, because the cases check the replies, on however slow a machine.

leasehold_conformance::conformance_suite!(redlock, async {
    let url = testbed::redlock().url() + "?restart_delay_ms=0&node_timeout_ms=20000";
    leasehold::connect(url).await.unwrap()
});
