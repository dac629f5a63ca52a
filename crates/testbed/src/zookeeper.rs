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

/// How a server or an ensemble is set up.
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
            version: None,
        }
    }
}

impl ZooKeeperSetup {
    /// Ticks of 200 ms, sessions of 0.4 to 60 s.
    pub fn new() -> Self {
        Self::default()
    }

    /// One end of the range of versions that is tested, and not what this run uses.
    pub fn version(mut self, version: Version) -> Self {
        self.version = Some(version);
        self
    }

    /// The version that was asked for, or that of this run.
    fn the_version(&self) -> Version {
        self.version.unwrap_or_else(Version::of_this_run)
    }

    /// The unit of all the servers' times.
    pub fn tick(mut self, tick: Duration) -> Self {
        self.tick = tick;
        self
    }

    /// The shortest and the longest session that clients get.
    pub fn sessions(mut self, min: Duration, max: Duration) -> Self {
        (self.min_session, self.max_session) = (min, max);
        self
    }

    /// Starts with a node at `path` (one level, such as `/name`) under which `children` children
    /// have been created and deleted, so that the next sequential one gets that number.
    pub fn sequences_at(mut self, path: &str, children: i32) -> Self {
        self.sequences_at.push((path.to_owned(), children));
        self
    }

    /// Speaks TLS on a [port of its own](ZooKeeper::tls_port), and plainly on the other. (One server.)
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// The same, and only with clients that show a [certificate](Certificates::client) of the same
    /// authority.
    pub fn client_certificates(mut self) -> Self {
        self.client_certificates = true;
        self.tls()
    }

    /// An ensemble of so many.
    pub fn members(mut self, members: usize) -> Self {
        self.members = members;
        self
    }

    /// Lets the members of an ensemble talk through proxies, so that one can be
    /// [cut off](ZooKeepers::cut_off) from the others.
    pub fn links(mut self) -> Self {
        self.links = true;
        self
    }
}

/// One ZooKeeper server: alone, or a member of an ensemble. Keeps what it acknowledged over
/// [`kill`](Self::kill), but not over a power cut.
#[derive(Debug)]
pub struct ZooKeeper {
    daemon: Daemon,
    port: u16,
    tls: Option<(u16, Certificates)>,
}

impl ZooKeeper {
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(&ZooKeeperSetup::new())
    }

    /// The same, with more wishes.
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

    /// Where clients connect.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `zookeeper://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("zookeeper://127.0.0.1:{}", self.port)
    }

    /// Where clients connect that speak TLS, with [`ZooKeeperSetup::tls`].
    pub fn tls_port(&self) -> u16 {
        self.tls.as_ref().expect("ask for ZooKeeperSetup::tls first").0
    }

    /// Its certificates, with [`ZooKeeperSetup::tls`].
    pub fn certificates(&self) -> &Certificates {
        &self.tls.as_ref().expect("ask for ZooKeeperSetup::tls first").1
    }

    /// Its one process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// What it logged.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// What it answers to one of its four-letter words, such as `mntr`; empty if it does not.
    pub fn ask(&self, word: &str) -> String {
        four_letters(self.port, word).unwrap_or_default()
    }

    /// One of the numbers of `mntr`, such as `zk_watch_count`.
    pub fn metric(&self, name: &str) -> i64 {
        let end = Instant::now() + PATIENCE;
        let mut told = self.ask("mntr");
        // A busy server may not answer in time.
        while told.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
            told = self.ask("mntr");
        }
        let value = told.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {told}"))
    }

    /// Whether it leads its ensemble now.
    pub fn is_leader(&self) -> bool {
        self.ask("srvr").contains("Mode: leader")
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// kill -9.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Up again on the same port with the same data, and serving; killed before if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }

    /// As [`restart`](Self::restart), without waiting for it to serve: alone it cannot, if its
    /// ensemble has no quorum without it.
    pub fn restart_without_waiting(&self) {
        self.daemon.restart(&|| true);
    }

    /// Waits until it serves.
    pub fn until_ready(&self) {
        wait_for("serves", || is_ready(self.port));
    }
}

/// Several servers that agree on everything.
#[derive(Debug)]
pub struct ZooKeepers {
    members: Vec<ZooKeeper>,
    /// Between two of them, by their numbers: from, to.
    links: Vec<(usize, usize, Proxy)>,
    network: Option<Network>,
}

impl ZooKeepers {
    /// Three members.
    pub fn start() -> Self {
        Self::with(&ZooKeeperSetup::new())
    }

    /// The same, or as many as are wished for, with more wishes. (Not `sequences_at`.)
    pub fn with(setup: &ZooKeeperSetup) -> Self {
        start_somewhere(|_| Self::start_on(setup, None))
    }

    /// Three members that can be [cut](Self::cut) from each other in one way only. Within
    /// [`in_own_network`](crate::in_own_network) only, and once there.
    pub fn separable() -> Self {
        let all = Self::start_on(&ZooKeeperSetup::new(), Some(Network::new()));
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
            // None of them serves before there are most of them.
            let daemon = Daemon::start("zookeeper", directory, launch, None, &|| true)?;
            members.push(ZooKeeper { daemon, port: ports[0], tls: None });
        }
        let all = Self { members, links, network };
        let end = Instant::now() + PATIENCE;
        while !all.members.iter().all(|m| is_ready(m.port)) {
            // Another may have taken one of the ports meanwhile.
            if let Some(taken) = all.members.iter().find(|m| m.log().contains("BindException")) {
                return Err(format!("Address already in use: {}", taken.log()));
            }
            assert!(Instant::now() < end, "no quorum: {}", all.members[0].log());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(all)
    }

    /// All of them.
    pub fn members(&self) -> &[ZooKeeper] {
        &self.members
    }

    /// `zookeeper://127.0.0.1:P1,127.0.0.1:P2,…`.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.port)).collect();
        format!("zookeeper://{}", hosts.join(","))
    }

    /// Nothing passes between this member and the others any more, and no connection ends: it serves
    /// its clients until it has missed the others for too long. For [`ZooKeeperSetup::links`].
    pub fn cut_off(&self, member: &ZooKeeper) {
        for link in self.links_of(member) {
            link.freeze();
        }
    }

    /// Ends [`cut_off`](Self::cut_off).
    pub fn mend(&self, member: &ZooKeeper) {
        for link in self.links_of(member) {
            link.thaw();
        }
    }

    /// Cuts a member from the others, but not from its clients. For [`separable`](Self::separable).
    pub fn cut(&self, member: &ZooKeeper, cut: Cut) {
        self.network().cut(self.number(member), cut, &[member.port]);
    }

    /// Ends all [cuts](Self::cut); returns when every member serves.
    pub fn uncut(&self) {
        self.network().mend();
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

    /// The one that leads, once there is one.
    pub fn leader(&self) -> &ZooKeeper {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(leader) = self.members.iter().find(|m| m.is_leader()) {
                return leader;
            }
            assert!(Instant::now() < end, "nobody leads: {}", self.members[0].log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The ones that follow.
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
    // Containers, and reaped soon.
    args.push("-Dzookeeper.extendedTypesEnabled=true".into());
    args.push("-Dznode.container.checkIntervalMs=1000".into());
    // What TLS needs of Netty, and the package's own list lacks. That list has absolute paths: what
    // must be of the server's own version comes before it.
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
         maxClientCnxns=0\nminSessionTimeout={}\nmaxSessionTimeout={}\nforceSync=no\n",
        setup.tick.as_millis(),
        data.display(),
        setup.min_session.as_millis(),
        setup.max_session.as_millis(),
    );
    for (i, [_, peers, election]) in ensemble.iter().enumerate() {
        config.push_str(&format!("server.{}=127.0.0.1:{peers}:{election}\n", i + 1));
    }
    std::fs::write(directory.join("zoo.cfg"), config).expect("a file in our directory");
}

/// A second port, with the certificate and its key in one file, as the server wants them.
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
    let mut told = String::new();
    stream.read_to_string(&mut told).ok()?;
    Some(told)
}

fn is_ready(port: u16) -> bool {
    four_letters(port, "srvr").is_some_and(|told| told.contains("Mode: "))
}

/// A snapshot with some nodes beside what every new server has, written as the server itself writes
/// it: no client can bring a node's child counter this far in a test's time.
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
    // No sessions; one access list, number 1: the world may do everything.
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
        // No data; the access list; then created, modified (zxid, time each), data version,
        // children version, access list version, owner, last change of children.
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
    // Without a log the server would take the snapshot for a sign of lost data.
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
