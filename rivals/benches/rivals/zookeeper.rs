//! ZooKeeper: Curator's InterProcessMutex.

use std::cell::RefCell;
use std::process::Command;

use testbed::ZooKeeper;

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair;
use crate::peer::Peer;
use crate::scratch::Scratch;
use crate::{CONTENDERS, clients, ours, two_threads};

const JARS: [&str; 8] = [
    "curator-recipes",
    "curator-framework",
    "curator-client",
    "zookeeper",
    "zookeeper-jute",
    "guava",
    "slf4j-api",
    "slf4j-nop",
];

pub(crate) fn all(effort: Effort) -> Result<()> {
    let server = ZooKeeper::start();
    let compiled = Scratch::new()?;
    let jars = JARS.map(|jar| format!("/usr/share/java/{jar}.jar")).join(":");
    let path = format!("{}:{jars}", compiled.path().display());
    let mut javac = Command::new("javac");
    javac.args(["-nowarn", "-cp", &path, "-d"]).arg(compiled.path());
    javac.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/CuratorPeer.java"));
    if !javac.status()?.success() {
        return Err("javac failed; it says above why".into());
    }
    let address = format!("127.0.0.1:{}", server.port());
    let mut java = Command::new("java");
    let curator = Peer::start(java.args(["-cp", &path, "CuratorPeer", &address]))?;
    let curator = RefCell::new(curator);

    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let mut subjects = vec![Subject::new("Curator", || curator.borrow_mut().pair(effort))];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("rivals: zookeeper:, uncontended pair", &alternate(effort, subjects)?, 1);
    let runtime = two_threads()?;
    let clients = clients(&runtime, &server.url())?;
    for n in CONTENDERS {
        let subjects = vec![
            Subject::new("Curator", || curator.borrow_mut().contend(n, effort)),
            ours(&runtime, &clients, n, effort),
        ];
        let title = format!("rivals: zookeeper:, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 1);
    }
    Ok(())
}
