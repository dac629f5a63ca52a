//! A private loopback network for a test, in which members of a cluster can be separated from each
//! other.
//!
//! Members talk to each other over connections that either of them may have opened, all from
//! 127.0.0.1. So neither a proxy nor a port can identify the sender. Instead, each member runs as
//! its own user. The kernel marks every connection in which that user ever sent a packet (nft,
//! conntrack), and packets are dropped by these marks. The rules are in the test's own network
//! namespace, which ends with the test, however it ends.

use std::path::Path;
use std::process::Command;

use crate::command::{run, succeeds};
use crate::daemon::{Launch, give_to};
use crate::reaper;

/// Environment variable that is set in the process inside the namespace.
const INSIDE: &str = "TESTBED_OWN_NETWORK";
/// The table of the packet filter.
const TABLE: &str = "inet testbed";

/// A host name with two addresses in a [private network](in_own_network). Clients try ::1 before
/// 127.0.0.1.
pub const TWO_ADDRESSES: &str = "two-addresses.test";

/// A host name with two IPv4 addresses in a [private network](in_own_network). Clients try
/// 127.0.0.2 before 127.0.0.1.
pub const TWO_OF_A_FAMILY: &str = "two-of-a-family.test";

/// The numeric users of the members. The rules distinguish the members by their users.
const USERS: [&str; 3] = ["61001", "61002", "61003"];

/// Runs the body of a test in a network of its own. `test` is its name in the test harness. The
/// body runs in another process of the same test binary, and fails this test if it fails. If the
/// machine does not allow such a network (this requires root), this prints a message and does
/// nothing. Where CI is set, it fails instead, because messages are not read there.
pub fn in_own_network(test: &str, body: impl FnOnce()) {
    if is_private() {
        return body();
    }
    if !is_allowed() {
        assert!(
            std::env::var_os("CI").is_none(),
            "{test}: `unshare --net --mount` is not allowed here"
        );
        eprintln!("{test}: not run: `unshare --net --mount` is not allowed here");
        return;
    }
    let hosts = reaper::directory("network").join("hosts");
    let names = format!(
        "127.0.0.1 localhost\n::1 {TWO_ADDRESSES}\n127.0.0.1 {TWO_ADDRESSES}\n\
         127.0.0.2 {TWO_OF_A_FAMILY}\n127.0.0.1 {TWO_OF_A_FAMILY}\n"
    );
    std::fs::write(&hosts, names).expect("a file in our directory");
    let begin = "ip link set lo up && mount --bind \"$0\" /etc/hosts && exec \"$@\"";
    let mut command = this_program_inside(begin, &hosts);
    let printed = run(command.args(["--exact", test, "--nocapture", "--include-ignored"]));
    assert!(printed.contains("1 passed"), "no test of the name {test}: {printed}");
}

/// Runs this program again, with the same arguments, in a network of its own, and ends with its
/// exit code. Returns if this program runs in such a network already, or if the machine does not
/// allow one (this requires root).
pub fn enter_own_network() {
    if is_private() || !is_allowed() {
        return;
    }
    let mut command = this_program_inside("ip link set lo up && exec \"$@\"", Path::new("sh"));
    let status = command.args(std::env::args_os().skip(1)).status();
    let status = status.unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
    std::process::exit(status.code().unwrap_or(1));
}

/// Returns whether this process runs in a network and with mounts of its own.
pub(crate) fn is_private() -> bool {
    std::env::var_os(INSIDE).is_some()
}

fn is_allowed() -> bool {
    succeeds(Command::new("unshare").args(["--net", "--mount", "true"]))
}

/// Returns a command that runs this program in a network of its own, after a line of shell that
/// gets `argument` as `$0`. The process does not outlive this one.
fn this_program_inside(begin: &str, argument: &Path) -> Command {
    let ourselves = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "unshare", "--net", "--mount"]);
    command.args(["sh", "-c", begin]).arg(argument).arg(ourselves).env(INSIDE, "1");
    command
}

/// Drops all packets to 127.0.0.2 without an answer, in a [private network](in_own_network).
pub fn drop_second_ipv4() {
    assert!(is_private(), "only within in_own_network");
    nft("add table ip dropped");
    nft("add chain ip dropped output { type filter hook output priority 0; }");
    nft("add rule ip dropped output ip daddr 127.0.0.2 drop");
}

/// Drops all packets from and to this TCP port without an answer, in a [private
/// network](in_own_network).
pub fn drop_port(port: u16) {
    assert!(is_private(), "only within in_own_network");
    nft("add table inet dropped");
    nft("add chain inet dropped output { type filter hook output priority 0; }");
    nft(&format!("add rule inet dropped output tcp sport {port} drop"));
    nft(&format!("add rule inet dropped output tcp dport {port} drop"));
}

/// Drops all packets to ::1 without an answer, in a [private network](in_own_network).
pub fn drop_ipv6() {
    assert!(is_private(), "only within in_own_network");
    nft("add table ip6 dropped");
    nft("add chain ip6 dropped output { type filter hook output priority 0; }");
    nft("add rule ip6 dropped output ip6 daddr ::1 drop");
}

/// Which packets between a member and the others are dropped. Connections stay open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All packets in both directions.
    Off,
    /// Only the packets that the member sends.
    Mute,
    /// Only the packets that are sent to the member.
    Deaf,
}

/// The rules of a [private network](in_own_network) by which members are separated.
#[derive(Debug)]
pub(crate) struct Network;

impl Network {
    /// Creates the rules. This must be done before the members start, because connections are
    /// marked from their first packet.
    pub(crate) fn new() -> Self {
        assert!(is_private(), "only within in_own_network");
        let chain = |name: &str, priority: i32| {
            let hook = format!("type filter hook output priority {priority};");
            nft(&format!("add chain {TABLE} {name} {{ {hook} }}"));
        };
        // A campaign starts one cluster after another here.
        nft(&format!("add table {TABLE}"));
        nft(&format!("delete table {TABLE}"));
        nft(&format!("add table {TABLE}"));
        chain("marks", -10);
        chain("cuts", 0);
        for (member, user) in USERS.iter().enumerate() {
            let bit = bit(member);
            nft(&format!("add rule {TABLE} marks meta skuid {user} ct mark set ct mark or {bit}"));
        }
        Self
    }

    /// Makes a member, which works in this directory, run as its own user.
    pub(crate) fn admit(&self, member: usize, launch: &mut Launch, directory: &Path) {
        launch.user = Some(USERS[member]);
        give_to(USERS[member], directory);
    }

    /// Cuts a member from the others, but not from clients of the `open` ports.
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

    /// Removes all cuts, which reconnects all members.
    pub(crate) fn heal(&self) {
        nft(&format!("flush chain {TABLE} cuts"));
    }
}

fn bit(member: usize) -> u32 {
    1 << member
}

fn nft(rule: &str) {
    run(Command::new("nft").arg(rule));
}
