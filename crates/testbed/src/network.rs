//! A loopback network of a test's own, in which members of a cluster can be parted from each other.
//!
//! Members talk to each other over connections that either may have opened, all of them from
//! 127.0.0.1: no proxy and no port tells who speaks. So each member runs as a user of its own; the
//! kernel marks every connection in which that user ever sent a packet (nft, conntrack), and packets are
//! dropped by these marks. The rules are in a network namespace of the test's own, which ends with it,
//! in whatever way.

use std::path::Path;
use std::process::Command;

use crate::command::{run, succeeds};
use crate::daemon::{Launch, give_to};

/// Set in the process that runs inside the namespace.
const INSIDE: &str = "TESTBED_OWN_NETWORK";
const TABLE: &str = "inet testbed";

/// The users as whom members run, by their numbers: the rules tell members apart by them.
const USERS: [&str; 3] = ["61001", "61002", "61003"];

/// Runs the body of the test of this name, as the test harness knows it, in a network of its own: in
/// another process of the same test binary, whose failure is ours. Where the machine allows no
/// such network (it takes root), it says so and does nothing, but fails where CI is set: there
/// nobody reads what is said.
pub fn in_own_network(test: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    if !succeeds(Command::new("unshare").args(["--net", "true"])) {
        assert!(std::env::var_os("CI").is_none(), "{test}: `unshare --net` is not allowed here");
        eprintln!("{test}: not run: `unshare --net` is not allowed here");
        return;
    }
    let ourselves = std::env::current_exe().expect("the test's own program");
    // It is not to outlive us.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "unshare", "--net"]);
    command.args(["sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""]);
    command
        .arg(ourselves)
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(INSIDE, "1");
    let printed = run(&mut command);
    assert!(printed.contains("1 passed"), "no test of the name {test}: {printed}");
}

/// What does not pass between a member and the others any more. No connection ends by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Nothing, either way.
    Off,
    /// Nothing that it says.
    Mute,
    /// Nothing that is said to it.
    Deaf,
}

/// The rules of this network.
#[derive(Debug)]
pub(crate) struct Network;

impl Network {
    /// To be made before the members start: connections are marked from their first packet.
    pub(crate) fn new() -> Self {
        assert!(std::env::var_os(INSIDE).is_some(), "only within in_own_network");
        let chain = |name: &str, priority: i32| {
            let hook = format!("type filter hook output priority {priority};");
            nft(&format!("add chain {TABLE} {name} {{ {hook} }}"));
        };
        nft(&format!("add table {TABLE}"));
        chain("marks", -10);
        chain("cuts", 0);
        for (member, user) in USERS.iter().enumerate() {
            let bit = bit(member);
            nft(&format!("add rule {TABLE} marks meta skuid {user} ct mark set ct mark or {bit}"));
        }
        Self
    }

    /// Has a member, which works in this directory, run as its own user.
    pub(crate) fn admit(&self, member: usize, launch: &mut Launch, directory: &Path) {
        launch.user = Some(USERS[member]);
        give_to(USERS[member], directory);
    }

    /// Cuts a member from the others, but not from who calls one of the `open` ports.
    pub(crate) fn cut(&self, member: usize, cut: Cut, open: &[u16]) {
        let (bit, user) = (bit(member), USERS[member]);
        let open: Vec<String> = open.iter().map(ToString::to_string).collect();
        let open = open.join(", ");
        let whose = match cut {
            Cut::Off => String::new(),
            Cut::Mute => format!("meta skuid {user}"),
            Cut::Deaf => format!("meta skuid != {user}"),
        };
        nft(&format!(
            "add rule {TABLE} cuts ct mark and {bit} == {bit} {whose} \
             tcp sport != {{ {open} }} tcp dport != {{ {open} }} drop"
        ));
    }

    /// Ends all cuts.
    pub(crate) fn mend(&self) {
        nft(&format!("flush chain {TABLE} cuts"));
    }
}

fn bit(member: usize) -> u32 {
    1 << member
}

fn nft(rule: &str) {
    run(Command::new("nft").arg(rule));
}
