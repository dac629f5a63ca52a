//! ZooKeeper: one server, or an ensemble.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cert::Certificates;
use crate::command::program;
use crate::daemon::{Daemon, Launch, start_somewhere};
use crate::network::{Cut, Network};
use crate::version::{Server, Version};
use crate::{Proxy, port, reaper};

/// The configuration of a server or an ensemble.
#[derive(Clone, Debug)]
pub struct ZooKeeperSetup {
    tick: Duration,
    min_session: Duration,
    max_session: Duration,
    sequences_at: Vec<(String, i32)>,
    links: bool,
    tls: bool,
    client_certificates: bool,
    members: usize,
    syncs: bool,
    version: Option<Version>,
}

impl Default for ZooKeeperSetup {
    fn default() -> Self {
        Self {
            tick: Duration::from_millis(200),
            min_session: Duration::from_millis(400),
            max_session: Duration::from_secs(60),
            sequences_at: Vec::new(),
            links: false,
            tls: false,
            client_certificates: false,
            members: 3,
            syncs: false,
            version: None,
        }
    }
}

impl ZooKeeperSetup {
    /// Returns the default configuration, with ticks of 200 ms and sessions of 0.4 to 60 s.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the server sync each transaction before it acknowledges it, as by default.
    pub fn durable(mut self) -> Self {
        self.syncs = true;
        self
    }

    /// Sets the version, instead of the version of this run.
    pub fn version(mut self, version: Version) -> Self {
        self.version = Some(version);
        self
    }

    /// Returns the selected version, or the version of this run.
    fn the_version(&self) -> Version {
        self.version.unwrap_or_else(Version::of_this_run)
    }

    /// Sets the tick, which is the unit of the servers' times.
    pub fn tick(mut self, tick: Duration) -> Self {
        self.tick = tick;
        self
    }

    /// Sets the shortest and the longest session of clients.
    pub fn sessions(mut self, min: Duration, max: Duration) -> Self {
        (self.min_session, self.max_session) = (min, max);
        self
    }

    /// Makes the server start with a node at `path` (one level, such as `/name`). The node's
    /// counter shows that `children` children have been created and deleted, so the next sequential
    /// child gets that number.
    pub fn sequences_at(mut self, path: &str, children: i32) -> Self {
        self.sequences_at.push((path.to_owned(), children));
        self
    }

    /// Enables TLS on a [separate port](ZooKeeper::tls_port). The other port stays plain. (Only for
    /// a single server.)
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Enables TLS, and accepts only clients with a [certificate](Certificates::client) of the same
    /// authority.
    pub fn client_certificates(mut self) -> Self {
        self.client_certificates = true;
        self.tls()
    }

    /// Sets the number of members of an ensemble.
    pub fn members(mut self, members: usize) -> Self {
        self.members = members;
        self
    }

    /// Connects the members of an ensemble through proxies, so that one can be [cut
    /// off](ZooKeepers::cut_off) from the others.
    pub fn links(mut self) -> Self {
        self.links = true;
        self
    }
}

/// A ZooKeeper server: alone, or a member of an ensemble. Acknowledged writes survive
/// [`kill`](Self::kill), but not a power failure.
#[derive(Debug)]
pub struct ZooKeeper {
    daemon: Daemon,
    port: u16,
    tls: Option<(u16, Certificates)>,
}

impl ZooKeeper {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(&ZooKeeperSetup::new())
    }

    /// Starts a private server with this setup.
    pub fn with(setup: &ZooKeeperSetup) -> Self {
        start_somewhere(|port| {
            let directory = reaper::directory("zookeeper");
            write_config(&directory, setup, port, &[]);
            if !setup.sequences_at.is_empty() {
                write_snapshot(&directory, &setup.sequences_at);
            }
            let tls = setup.tls.then(|| (port::free(), Certificates::make(&directory)));
            if let Some((port, certificates)) = &tls {
                let shown = if setup.client_certificates { "need" } else { "want" };
                add_tls(&directory, *port, certificates, shown);
            }
            let launch = launch(&directory, setup.the_version());
            let daemon = Daemon::start("zookeeper", directory, launch, None, &|| is_ready(port))?;
            Ok(Self { daemon, port, tls })
        })
    }

    /// Returns the port for clients.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns `zookeeper://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("zookeeper://127.0.0.1:{}", self.port)
    }

    /// Returns the port for TLS clients, with [`ZooKeeperSetup::tls`].
    pub fn tls_port(&self) -> u16 {
        self.tls.as_ref().expect("ask for ZooKeeperSetup::tls first").0
    }

    /// Returns the server's certificates. Panics without [`ZooKeeperSetup::tls`].
    pub fn certificates(&self) -> &Certificates {
        &self.tls.as_ref().expect("ask for ZooKeeperSetup::tls first").1
    }

    /// Returns the ID of the server's only process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Returns the answer to a four-letter word, such as `mntr`, or an empty text if the server
    /// does not answer.
    pub fn ask(&self, word: &str) -> String {
        four_letters(self.port, word).unwrap_or_default()
    }

    /// Returns one of the numbers of `mntr`, such as `zk_watch_count`.
    pub fn metric(&self, name: &str) -> i64 {
        let end = Instant::now() + PATIENCE;
        let mut reply = self.ask("mntr");
        // A busy server may not answer in time.
        while reply.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
            reply = self.ask("mntr");
        }
        let value = reply.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {reply}"))
    }

    /// Returns whether the server leads its ensemble now.
    pub fn is_leader(&self) -> bool {
        self.ask("srvr").contains("Mode: leader")
    }

    /// Sends SIGSTOP to the server.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Sends SIGCONT to the server.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// Sends SIGKILL to the server.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same port with the same data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }

    /// Like [`restart`](Self::restart), but does not wait until the server is ready. Use it if the
    /// server's ensemble has no quorum yet.
    pub fn restart_without_waiting(&self) {
        self.daemon.restart(&|| true);
    }

    /// Waits until the server is ready.
    pub fn until_ready(&self) {
        wait_for("serves", || is_ready(self.port));
    }
}

/// An ensemble of several servers.
#[derive(Debug)]
pub struct ZooKeepers {
    members: Vec<ZooKeeper>,
    /// Links between two members, by their numbers: from, to.
    links: Vec<(usize, usize, Proxy)>,
    network: Option<Network>,
}

impl ZooKeepers {
    /// Starts three members.
    pub fn start() -> Self {
        Self::with(&ZooKeeperSetup::new())
    }

    /// Starts three members, or as many as the setup requires. (`sequences_at` is not supported.)
    pub fn with(setup: &ZooKeeperSetup) -> Self {
        start_somewhere(|_| Self::start_on(setup, None))
    }

    /// Starts three members that can be [cut](Self::cut) from each other, even in one direction
    /// only. Only within [`in_own_network`](crate::in_own_network), and one at a time there.
    pub fn separable(setup: &ZooKeeperSetup) -> Self {
        let all = Self::start_on(setup, Some(Network::new()));
        all.unwrap_or_else(|why| panic!("{why}"))
    }

    fn start_on(setup: &ZooKeeperSetup, network: Option<Network>) -> Result<Self, String> {
        let all: Vec<[u16; 3]> =
            (0..setup.members).map(|_| [port::free(), port::free(), port::free()]).collect();
        let (mut members, mut links) = (Vec::new(), Vec::new());
        for (i, ports) in all.iter().enumerate() {
            let directory = reaper::directory("zookeeper");
            let mut seen = all.clone();
            for (j, other) in seen.iter_mut().enumerate().filter(|(j, _)| setup.links && *j != i) {
                let link = Proxy::before(other[1]);
                other[1] = link.port();
                links.push((i, j, link));
            }
            write_config(&directory, setup, ports[0], &seen);
            let id = (i + 1).to_string();
            std::fs::write(directory.join("data/myid"), id).expect("our own directory");
            let mut launch = launch(&directory, setup.the_version());
            if let Some(network) = &network {
                network.admit(i, &mut launch, &directory);
            }
            // No member is ready before a majority runs.
            let daemon = Daemon::start("zookeeper", directory, launch, None, &|| true)?;
            members.push(ZooKeeper { daemon, port: ports[0], tls: None });
        }
        let all = Self { members, links, network };
        let end = Instant::now() + PATIENCE;
        while !all.members.iter().all(|m| is_ready(m.port)) {
            // Another process may have taken one of the ports.
            if let Some(taken) = all.members.iter().find(|m| m.log().contains("BindException")) {
                return Err(format!("Address already in use: {}", taken.log()));
            }
            assert!(Instant::now() < end, "no quorum: {}", all.members[0].log());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(all)
    }

    /// Restarts all members on their ports and with their data, and waits until they are ready.
    /// Kills those that run first.
    pub fn restart_all(&self) {
        self.members.iter().for_each(|member| member.daemon.kill());
        self.members.iter().for_each(|member| member.daemon.restart(&|| true));
        self.members.iter().for_each(ZooKeeper::until_ready);
    }

    /// Returns all members.
    pub fn members(&self) -> &[ZooKeeper] {
        &self.members
    }

    /// Returns `zookeeper://127.0.0.1:P1,127.0.0.1:P2,…`.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.port)).collect();
        format!("zookeeper://{}", hosts.join(","))
    }

    /// Stops all data between this member and the others, without closing connections. The member
    /// continues to serve its clients until its time limit for messages from the others has passed.
    /// Requires [`ZooKeeperSetup::links`].
    pub fn cut_off(&self, member: &ZooKeeper) {
        for link in self.links_of(member) {
            link.freeze();
        }
    }

    /// Reconnects a member that was [cut off](Self::cut_off).
    pub fn heal(&self, member: &ZooKeeper) {
        for link in self.links_of(member) {
            link.thaw();
        }
    }

    /// Cuts a member from the others, but not from its clients. Requires
    /// [`separable`](Self::separable).
    pub fn cut(&self, member: &ZooKeeper, cut: Cut) {
        self.network().cut(self.number(member), cut, &[member.port]);
    }

    /// Ends all [cuts](Self::cut) and waits until every member is ready.
    pub fn uncut(&self) {
        self.network().heal();
        self.members.iter().for_each(ZooKeeper::until_ready);
    }

    fn number(&self, member: &ZooKeeper) -> usize {
        self.members.iter().position(|m| m.port == member.port).expect("one of ours")
    }

    fn network(&self) -> &Network {
        self.network.as_ref().expect("ask for ZooKeepers::separable first")
    }

    fn links_of(&self, member: &ZooKeeper) -> impl Iterator<Item = &Proxy> {
        assert!(!self.links.is_empty(), "ask for ZooKeeperSetup::links first");
        let number = self.number(member);
        let touches = move |from, to| from == number || to == number;
        self.links.iter().filter(move |(from, to, _)| touches(*from, *to)).map(|(_, _, link)| link)
    }

    /// Waits until the ensemble has a leader, and returns it.
    pub fn leader(&self) -> &ZooKeeper {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(leader) = self.members.iter().find(|m| m.is_leader()) {
                return leader;
            }
            assert!(Instant::now() < end, "the ensemble has no leader: {}", self.members[0].log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the followers.
    pub fn followers(&self) -> Vec<&ZooKeeper> {
        let leader = self.leader().port;
        self.members.iter().filter(|m| m.port != leader).collect()
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

fn wait_for(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < end, "zookeeper: {what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn launch(directory: &Path, version: Version) -> Launch {
    let mut args: Vec<String> =
        ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
            .map(Into::into)
            .into();
    args.push("-Dzookeeper.jmx.log4j.disable=true".into());
    // This enables container nodes, which are removed soon after they become empty.
    args.push("-Dzookeeper.extendedTypesEnabled=true".into());
    args.push("-Dznode.container.checkIntervalMs=1000".into());
    // These are libraries of Netty that TLS needs and that the package's own list lacks. That list
    // has absolute paths, so libraries of the server's own version must come first.
    let class_path = ["zookeeper-jute", "zookeeper", "netty-codec", "netty-resolver"];
    let class_path =
        class_path.map(|jar| Server::ZooKeeper.jar(version, jar).display().to_string());
    args.extend(["-cp".into(), class_path.join(":")]);
    args.push("org.apache.zookeeper.server.quorum.QuorumPeerMain".into());
    args.push(directory.join("zoo.cfg").display().to_string());
    Launch { program: program("java", &[], "default-jre-headless"), args, user: None }
}

fn write_config(directory: &Path, setup: &ZooKeeperSetup, port: u16, ensemble: &[[u16; 3]]) {
    let data = directory.join("data");
    std::fs::create_dir(&data).expect("a directory in our directory");
    let mut config = format!(
        "tickTime={}\ninitLimit=50\nsyncLimit=25\ndataDir={}\nclientPort={port}\n\
         clientPortAddress=127.0.0.1\nadmin.enableServer=false\n4lw.commands.whitelist=*\n\
         maxClientCnxns=0\nminSessionTimeout={}\nmaxSessionTimeout={}\nforceSync={}\n",
        setup.tick.as_millis(),
        data.display(),
        setup.min_session.as_millis(),
        setup.max_session.as_millis(),
        if setup.syncs { "yes" } else { "no" },
    );
    for (i, [_, peers, election]) in ensemble.iter().enumerate() {
        config.push_str(&format!("server.{}=127.0.0.1:{peers}:{election}\n", i + 1));
    }
    std::fs::write(directory.join("zoo.cfg"), config).expect("a file in our directory");
}

/// Adds a TLS port to the configuration. The server expects the certificate and its key in one
/// file.
fn add_tls(directory: &Path, port: u16, certificates: &Certificates, client_auth: &str) {
    let read = |path: &Path| std::fs::read_to_string(path).expect("a file that we made");
    let own = directory.join("own.pem");
    std::fs::write(&own, read(&certificates.key) + &read(&certificates.certificate))
        .expect("a file in our directory");
    let config = directory.join("zoo.cfg");
    let text = format!(
        "{}secureClientPort={port}\nsecureClientPortAddress=127.0.0.1\n\
         serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
         ssl.keyStore.location={own}\nssl.keyStore.type=PEM\n\
         ssl.trustStore.location={authority}\nssl.trustStore.type=PEM\nssl.clientAuth={client_auth}\n",
        read(&config),
        own = own.display(),
        authority = certificates.authority().display(),
    );
    std::fs::write(config, text).expect("a file in our directory");
}

fn four_letters(port: u16, word: &str) -> Option<String> {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(word.as_bytes()).ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).ok()?;
    Some(reply)
}

fn is_ready(port: u16) -> bool {
    four_letters(port, "srvr").is_some_and(|reply| reply.contains("Mode: "))
}

/// Writes a snapshot with additional nodes, in the server's own format. No client could bring a
/// node's child counter this far in a test's time.
fn write_snapshot(directory: &Path, nodes: &[(String, i32)]) {
    let mut file = Vec::new();
    let int = |file: &mut Vec<u8>, n: i32| file.extend(n.to_be_bytes());
    let long = |file: &mut Vec<u8>, n: i64| file.extend(n.to_be_bytes());
    let text = |file: &mut Vec<u8>, s: &str| {
        file.extend(i32::try_from(s.len()).expect("short").to_be_bytes());
        file.extend(s.as_bytes());
    };
    // Header: magic, version, database id.
    file.extend(b"ZKSN");
    int(&mut file, 2);
    long(&mut file, -1);
    // The snapshot has no sessions, and one access list with number 1, which permits everything to
    // everyone.
    int(&mut file, 0);
    int(&mut file, 1);
    long(&mut file, 1);
    int(&mut file, 1);
    int(&mut file, 31);
    text(&mut file, "world");
    text(&mut file, "anyone");
    let bare = [(String::new(), 0), ("/zookeeper".to_owned(), 0)];
    for (path, cversion) in bare.iter().chain(nodes) {
        text(&mut file, path);
        // The fields are: no data, the access list, created and modified (zxid and time each), data
        // version, children version, access list version, owner, and last change of children.
        int(&mut file, 0);
        long(&mut file, 1);
        for _ in 0..4 {
            long(&mut file, 0);
        }
        int(&mut file, 0);
        int(&mut file, *cversion);
        int(&mut file, 0);
        long(&mut file, 0);
        long(&mut file, 0);
    }
    text(&mut file, "/");
    let sum = adler32(&file);
    long(&mut file, i64::from(sum));
    text(&mut file, "/");
    let data: PathBuf = directory.join("data/version-2");
    std::fs::create_dir(&data).expect("a directory in our directory");
    std::fs::write(data.join("snapshot.0"), file).expect("a file in our directory");
    // Without a log the server would take the snapshot as a sign of lost data.
    std::fs::write(directory.join("data/initialize"), "").expect("a file in our directory");
    let config = directory.join("zoo.cfg");
    let mut text = std::fs::read_to_string(&config).expect("the file that we wrote");
    text.push_str("snapshot.trust.empty=true\n");
    std::fs::write(config, text).expect("a file in our directory");
}

fn adler32(bytes: &[u8]) -> u32 {
    let (mut a, mut b) = (1_u32, 0_u32);
    for byte in bytes {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    b << 16 | a
}
