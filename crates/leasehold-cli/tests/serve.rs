//! `leasehold serve`, as people run it.

mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Place, Running};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::Certificates;

/// A running server.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(place: &Place, words: &[&str]) -> Self {
        Self::run(place, place.leasehold([&["serve"], words].concat()))
    }

    fn run(place: &Place, mut command: Command) -> Self {
        command.env("XDG_RUNTIME_DIR", place.path(""));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}"));
        Self { address: address.to_owned(), child }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    fn end(mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        let status = self.child.wait().unwrap();
        status.code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn shell(place: &Place, script: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(place.path(""));
    command.env("XDG_RUNTIME_DIR", place.path("")).output().unwrap()
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{out}{err}")
}

/// Runs the first command of the guide.
#[test]
fn a_shell_holds_a_lock_with_curl_alone() {
    let place = Place::new();
    let guide = include_str!("../../../docs/guide/lock-service.md");
    let first = guide.find("curl -sN").unwrap();
    let lines = guide[first..].split("```").next().unwrap();
    let show = "curl -s --unix-socket leasehold.sock http://localhost/v1/locks/backup";
    place.script("backup.sh", &format!("{show} > during.json"));
    let server = Server::start(&place, &[]);
    assert_eq!(server.address, format!("unix:{}", place.path("leasehold.sock").display()));
    let output = shell(&place, lines);
    let during = std::fs::read_to_string(place.path("during.json"));
    let during = during.unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert!(during.contains("\"standing\":\"holding\""), "{during}");
    // curl has ended, but the server may need a moment to notice.
    common::eventually("the lock is released", || text(&shell(&place, show)).contains(":null"));
    // Other commands that use the same store see the lock.
    assert_eq!(place.code(&["run", "--try", "backup", "true"]), 0);
    assert_eq!(server.end(Signal::SIGTERM), Some(0));
    assert!(!place.path("leasehold.sock").exists(), "the socket was not deleted");
}

#[test]
fn an_address_that_others_can_reach_needs_tokens() {
    let place = Place::new();
    for (words, hint) in [
        (vec!["serve", "--listen", "127.0.0.1:0"], "--tokens"),
        (vec!["serve", "--listen", "0.0.0.0:0", "--no-auth"], "--tokens"),
        (vec!["serve", "--listen", "127.0.0.1:0", "--tokens", "/none"], "token_sha256"),
    ] {
        let output = place.output(&words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        assert!(text(&output).contains("hint: "), "{output:?}");
        assert!(text(&output).contains(hint), "{output:?}");
    }
    let server = Server::start(&place, &["--listen", "127.0.0.1:0", "--no-auth"]);
    let script =
        format!("curl -sN -X POST '{}/v1/locks/a/hold?wait=0s' | head -n 1", server.address);
    assert!(text(&shell(&place, &script)).contains("\"event\":\"held\""));
    let bad = format!("curl -s -H 'Host: evil.example' {}/v1/locks", server.address);
    assert!(text(&shell(&place, &bad)).contains("denied"));
}

#[test]
fn only_the_socket_of_a_dead_server_is_replaced() {
    let place = Place::new();
    let server = Server::start(&place, &[]);
    let mut second = place.leasehold(["serve"]);
    let second = second.env("XDG_RUNTIME_DIR", place.path("")).output().unwrap();
    assert_eq!(second.status.code(), Some(71), "{second:?}");
    server.end(Signal::SIGKILL);
    assert!(place.path("leasehold.sock").exists());
    let server = Server::start(&place, &[]);
    let get = "curl -s --unix-socket leasehold.sock http://localhost/readyz";
    assert_eq!(text(&shell(&place, get)), "ok\n");
    assert_eq!(server.end(Signal::SIGINT), Some(0));
}

#[test]
fn a_server_that_ends_does_not_remove_the_socket_of_its_successor() {
    let place = Place::new();
    let first = Server::start(&place, &[]);
    std::fs::remove_file(place.path("leasehold.sock")).unwrap();
    let second = Server::start(&place, &[]);
    assert_eq!(first.end(Signal::SIGTERM), Some(0));
    let get = "curl -s --unix-socket leasehold.sock http://localhost/readyz";
    assert_eq!(text(&shell(&place, get)), "ok\n");
    assert_eq!(second.end(Signal::SIGTERM), Some(0));
}

/// Returns `leasehold serve` with a socket that another process has opened, as systemd does.
fn activated(place: &Place, socket: &str, words: &[&str]) -> Command {
    let script = format!(
        "import os, socket, sys\n\
         {socket}\n\
         s.listen()\n\
         if s.fileno() != 3: os.dup2(s.fileno(), 3)\n\
         os.set_inheritable(3, True)\n\
         os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))\n\
         os.execv(sys.argv[1], sys.argv[1:])"
    );
    let leasehold = place.leasehold([&["serve"], words].concat());
    let mut command = Command::new("python3");
    command.args(["-c", &script]).arg(leasehold.get_program()).args(leasehold.get_args());
    let set = leasehold.get_envs().filter_map(|(name, value)| Some((name, value?)));
    command.envs(set).current_dir(place.path(""));
    command
}

#[test]
fn systemd_opens_the_socket() {
    let place = Place::new();
    let unix = "s = socket.socket(socket.AF_UNIX); s.bind('activated.sock')";
    let server = Server::run(&place, activated(&place, unix, &[]));
    assert!(server.address.ends_with("activated.sock"), "{}", server.address);
    let get = "curl -s --unix-socket activated.sock http://localhost/readyz";
    assert_eq!(text(&shell(&place, get)), "ok\n");
    assert!(!place.path("leasehold.sock").exists(), "the default socket is also open");
    assert_eq!(server.end(Signal::SIGTERM), Some(0));
    assert!(
        place.path("activated.sock").exists(),
        "the socket belongs to systemd and must not be deleted"
    );
    // The rules for addresses are the same.
    let tcp = "s = socket.create_server(('127.0.0.1', 0))";
    let refused = activated(&place, tcp, &[]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(text(&refused).contains("--tokens"), "{refused:?}");
    let server = Server::run(&place, activated(&place, tcp, &["--no-auth"]));
    let get = format!("curl -s {}/readyz", server.address);
    assert_eq!(text(&shell(&place, &get)), "ok\n");
}

/// Returns the text of a file in `contrib/`.
fn contrib(path: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    std::fs::read_to_string(folder.join(path)).unwrap()
}

/// The service must start with the arguments and the token file of the files in `contrib/`.
#[test]
fn the_files_in_contrib_start_the_service() {
    let unit = contrib("systemd/leasehold.service");
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let of_unit: Vec<String> = start.split(' ').skip(1).map(str::to_owned).collect();
    let image = contrib("container/Containerfile");
    let command = image.lines().find_map(|line| line.strip_prefix("CMD ")).unwrap();
    let of_image: Vec<String> = serde_json::from_str(command).unwrap();
    let manifest = contrib("kubernetes/leasehold.yaml");
    let list = manifest.lines().find_map(|line| line.trim().strip_prefix("args: [")).unwrap();
    let list = list.trim_end_matches(']').split(", ");
    let of_manifest: Vec<String> = list.map(|word| word.trim_matches('"').to_owned()).collect();

    let place = Place::new();
    let hash = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    let tokens = format!(
        r#"{{"identities": [{{"name": "a", "token_sha256": ["{hash}"], "prefixes": [""], "rights": ["hold"]}}]}}"#
    );
    std::fs::write(place.path("tokens.json"), tokens).unwrap();
    let path = place.path("tokens.json").display().to_string();
    for words in [of_unit, of_image, of_manifest] {
        assert!(words.contains(&"/etc/leasehold/tokens.json".to_owned()), "{words:?}");
        let words = words.iter().map(|word| match word.as_str() {
            "/etc/leasehold/tokens.json" => path.clone(),
            "0.0.0.0:8484" => "0.0.0.0:0".to_owned(),
            word => word.to_owned(),
        });
        let server = Server::run(&place, place.leasehold(words));
        assert_eq!(server.end(Signal::SIGTERM), Some(0));
    }
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn systemd_accepts_the_units_in_contrib() {
    let place = Place::new();
    let program = place.leasehold([""; 0]).get_program().to_owned();
    let unit = contrib("systemd/leasehold.service");
    let unit = unit.replace("/usr/local/bin/leasehold", program.to_str().unwrap());
    std::fs::write(place.path("leasehold.service"), unit).unwrap();
    std::fs::write(place.path("leasehold.socket"), contrib("systemd/leasehold.socket")).unwrap();
    let verify = "systemd-analyze verify --man=no ./leasehold.service ./leasehold.socket";
    let output = shell(&place, verify);
    assert!(output.status.success() && text(&output).is_empty(), "{output:?}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn kubernetes_accepts_the_manifest_in_contrib() {
    let place = Place::new();
    std::fs::write(place.path("leasehold.yaml"), contrib("kubernetes/leasehold.yaml")).unwrap();
    let mut validate = Command::new(testbed::python().with_file_name("kubernetes-validate"));
    let output = validate.args(["--strict", "leasehold.yaml"]).current_dir(place.path("")).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output).matches("passed for resource").count(), 3, "{output:?}");
}

#[test]
fn tokens_are_reloaded_on_sighup() {
    let place = Place::new();
    let tokens: PathBuf = place.path("tokens.json");
    let identity = |token: &str| {
        let hash = text(&shell(&place, &format!("printf %s {token} | sha256sum | cut -c1-64")));
        format!(
            r#"{{"identities": [{{"name": "ci", "token_sha256": ["{}"], "prefixes": [""],
                "rights": ["hold", "inspect"]}}]}}"#,
            hash.trim()
        )
    };
    std::fs::write(&tokens, identity("first")).unwrap();
    let words = ["--listen", "127.0.0.1:0", "--tokens", tokens.to_str().unwrap()];
    let server = Server::start(&place, &words);
    let status = |token: &str| {
        let head = "curl -s -o /dev/null -w '%{http_code}' -H";
        let script = format!("{head} 'Authorization: Bearer {token}' {}/v1/store", server.address);
        text(&shell(&place, &script))
    };
    assert_eq!((status("first"), status("second")), ("200".into(), "401".into()));
    std::fs::write(&tokens, identity("second")).unwrap();
    server.signal(Signal::SIGHUP);
    let end = std::time::Instant::now() + common::PATIENCE;
    while status("second") != "200" {
        assert!(std::time::Instant::now() < end, "the new token is not accepted");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(status("first"), "401");
}

#[test]
fn history_in_a_file_survives_a_restart() {
    let place = Place::new();
    let file = place.path("history.jsonl");
    let words = ["--history", file.to_str().unwrap()];
    let server = Server::start(&place, &words);
    let curl = "curl -s --unix-socket leasehold.sock";
    let held =
        format!("{curl} -N -X POST 'http://localhost/v1/locks/x/hold?label=nightly' | head -n 1");
    assert!(text(&shell(&place, &held)).contains("\"event\":\"held\""));
    let history = format!("{curl} http://localhost/v1/locks/x/history");
    let has_ended = || text(&shell(&place, &history)).contains("\"end\":\"released\"");
    common::eventually("the hold has ended", has_ended);
    let store = place.store();
    let script = format!(
        "timeout -s KILL 60 {} serve --store {store} --listen unix:other --history {}",
        common::LEASEHOLD,
        words[1]
    );
    let second = shell(&place, &script);
    assert_eq!(second.status.code(), Some(2), "{second:?}");
    assert!(text(&second).contains("another server uses this file"), "{second:?}");
    assert_eq!(server.end(Signal::SIGTERM), Some(0));
    let _server = Server::start(&place, &words);
    let after = text(&shell(&place, &history));
    assert!(after.contains("\"label\":\"nightly\"") && has_ended(), "{after}");
}

/// The disk of the history fills up, and the server is killed when there is space again.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn history_is_complete_after_a_full_disk_and_a_crash() {
    testbed::in_own_network("history_is_complete_after_a_full_disk_and_a_crash", || {
        let place = Place::new();
        let mount = "mkdir small && mount -t tmpfs -o size=256k none small";
        assert!(shell(&place, mount).status.success());
        let file = place.path("small/history.jsonl");
        let words = ["--history", file.to_str().unwrap()];
        let curl = "curl -s --unix-socket leasehold.sock";
        let hold = |name: &str| {
            let url = format!("http://localhost/v1/locks/{name}/hold");
            text(&shell(&place, &format!("{curl} -N -X POST {url} | head -n 1")))
        };
        let is_in_file = |name: &str| {
            let name = format!("\"lock\":\"{name}\"");
            std::fs::read_to_string(&file).is_ok_and(|content| content.contains(&name))
        };
        let server = Server::start(&place, &words);
        hold("before");
        common::eventually("the hold is in the file", || is_in_file("before"));
        shell(&place, "head -c 1M /dev/zero > small/filler");
        // The last page of the file has space for about 20 holds.
        let url = "http://localhost/v1/locks/full$n/hold";
        let script =
            format!("for n in $(seq 0 59); do {curl} -N -X POST {url} | head -n 1 & done; wait");
        let held = text(&shell(&place, &script));
        let count = held.matches("\"event\":\"held\"").count();
        assert_eq!(count, 60, "the server does not grant all locks: {held}");
        std::thread::sleep(Duration::from_secs(1));
        let is_complete = || (0..60).all(|n| is_in_file(&format!("full{n}")));
        assert!(!is_complete(), "the disk is not full");
        shell(&place, "rm small/filler");
        common::eventually("the history is complete", is_complete);
        assert_eq!(server.end(Signal::SIGKILL), None);
        let _server = Server::start(&place, &words);
        for name in ["before", "full0", "full30", "full59"] {
            let url = format!("http://localhost/v1/locks/{name}/history");
            let history = text(&shell(&place, &format!("{curl} {url}")));
            assert!(history.contains("\"token\":"), "{name}: {history}");
        }
    });
}

/// Starts curl, which holds the lock `x` with a stream, and waits until the lock is held.
fn hold(address: &str, more: &[&str]) -> Running {
    let url = format!("{address}/v1/locks/x/hold?grace=0s");
    let mut curl = Command::new("curl");
    curl.args(["-sN", "-X", "POST"]).args(more).arg(url);
    let mut stream = Running::start(curl);
    wait_for(&mut stream, "held");
    stream
}

/// Reads a stream until this event.
fn wait_for(stream: &mut Running, event: &str) {
    let wanted = format!("\"event\":\"{event}\"");
    let mut line = stream.line();
    while !line.contains(&wanted) {
        assert!(!line.is_empty(), "the stream ended without {event}");
        line = stream.line();
    }
}

const ON_TCP: [&str; 3] = ["--no-auth", "--listen", "127.0.0.1:0"];

/// The client's machine is gone, or a firewall drops its packets. No side learns that.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn half_open_stream_releases_its_lock() {
    testbed::in_own_network("half_open_stream_releases_its_lock", || {
        let place = Place::new();
        let server = Server::start(&place, &ON_TCP);
        let mut stream = hold(&server.address, &["--local-port", "45555"]);
        assert_eq!(place.code(&["run", "--try", "x", "true"]), 75);
        testbed::drop_port(45555);
        assert_eq!(place.code(&["run", "--wait", "60s", "x", "true"]), 0);
        assert_eq!(stream.child.try_wait().unwrap(), None, "the connection was closed");
    });
}

#[test]
fn reader_that_is_paused_keeps_its_lock_and_delays_no_other_stream() {
    let place = Place::new();
    let server = Server::start(&place, &ON_TCP);
    let mut stream = hold(&server.address, &[]);
    stream.signal(Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(place.code(&["run", "--try", "x", "true"]), 75);
    let other = ["run", "--store", &server.address, "y", "true"];
    assert_eq!(place.code(&other), 0);
    stream.signal(Signal::SIGCONT);
    wait_for(&mut stream, "ping");
    drop(stream);
    assert_eq!(place.code(&["run", "--wait", "60s", "x", "true"]), 0);
}

/// Starts a reverse proxy that closes connections without data for `idle`. Returns it and its
/// address.
fn proxy(place: &Place, server: &str, idle: &str) -> (Running, String) {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = server.strip_prefix("http://").unwrap();
    let config = format!(
        "defaults\n mode http\n timeout connect 5s\n timeout client {idle}\n timeout server {idle}\n\
         frontend front\n bind {address}\n default_backend back\n\
         backend back\n server one {server}\n"
    );
    std::fs::write(place.path("haproxy.cfg"), config).unwrap();
    let mut haproxy = Command::new("/usr/sbin/haproxy");
    haproxy.args(["-db", "-f"]).arg(place.path("haproxy.cfg"));
    let haproxy = Running::start(haproxy);
    common::eventually("the proxy listens", || std::net::TcpStream::connect(address).is_ok());
    (haproxy, format!("http://{address}"))
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn stream_outlives_the_idle_timeout_of_a_proxy() {
    let place = Place::new();
    let server = Server::start(&place, &ON_TCP);
    // Pings come at least every five seconds, unless the machine is busy.
    let (_proxy, address) = proxy(&place, &server.address, "10s");
    let mut stream = hold(&address, &[]);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(25) {
        wait_for(&mut stream, "ping");
    }
    assert_eq!(place.code(&["run", "--try", "x", "true"]), 75);
    drop(stream);
    assert_eq!(place.code(&["run", "--wait", "60s", "x", "true"]), 0);
}

#[test]
fn why_reports_processes_that_wait_for_each_other() {
    let place = Place::new();
    let server = Server::start(&place, &ON_TCP);
    let join = |id: u32, name: &str, pid: u32| {
        let body = format!(
            r#"{{"id": "{id:032x}", "mode": "wait", "claim":
                {{"name": "{name}", "host": "h", "pid": {pid}, "lease_ms": 60000}}}}"#
        );
        let post = format!("curl -s --json '{body}' {}/v1/claims", server.address);
        assert!(text(&shell(&place, &post)).contains("\"status\""), "{body}");
    };
    join(1, "a", 1);
    join(2, "b", 2);
    join(3, "b", 1);
    // Two tasks of one process contend for `c`. This is not a deadlock.
    join(4, "c", 3);
    join(5, "c", 3);
    let why = |name: &str| place.output(&["why", "--store", &server.address, name]);
    let free = why("a");
    assert_eq!((free.status.code(), text(&free).contains("deadlock")), (Some(0), false));
    assert_eq!(why("c").status.code(), Some(0));
    join(6, "a", 2);
    let stuck = why("a");
    assert_eq!(stuck.status.code(), Some(1), "{stuck:?}");
    for party in
        ["h pid 1 holds \"a\" and waits for \"b\"", "h pid 2 holds \"b\" and waits for \"a\""]
    {
        assert!(text(&stuck).contains(party), "{stuck:?}");
    }
}

/// A server with TLS. The identity `ci` has the testbed's client certificate, and `web` a token.
struct Encrypted {
    place: Place,
    files: PathBuf,
    certificates: Certificates,
    server: Server,
}

impl Encrypted {
    fn start() -> Self {
        let place = Place::new();
        let files = place.path("certificates");
        std::fs::create_dir(&files).unwrap();
        let certificates = Certificates::make(&files);
        let hash = text(&shell(&place, "printf %s secret | sha256sum | cut -c1-64"));
        let tokens = format!(
            r#"{{"identities": [
                {{"name": "ci", "certificate_names": ["Client.example"], "prefixes": ["ci/"],
                  "rights": ["hold", "inspect"]}},
                {{"name": "web", "token_sha256": ["{}"], "prefixes": [""], "rights": ["inspect"]}}]}}"#,
            hash.trim()
        );
        std::fs::write(place.path("tokens.json"), tokens).unwrap();
        let options = "--listen 127.0.0.1:0 --tokens tokens.json --tls-cert certificates/tls.pem \
            --tls-key certificates/tls.key --tls-client-ca certificates/authority.pem";
        let mut command = place.leasehold(["serve"]);
        command.args(options.split_whitespace()).current_dir(place.path(""));
        let server = Server::run(&place, command);
        assert!(server.address.starts_with("https://127.0.0.1:"), "{}", server.address);
        Self { place, files, certificates, server }
    }

    /// Returns the status and the body of a request with these options of curl.
    fn curl(&self, options: &str, path: &str) -> String {
        let address = &self.server.address;
        let script = format!(
            "cd certificates; curl -s --max-time 60 --cacert authority.pem {options} -w '%{{http_code}}' '{address}{path}'"
        );
        text(&shell(&self.place, &script))
    }
}

#[test]
fn clients_are_identified_by_certificate_or_token() {
    let tls = Encrypted::start();
    let own = "--cert client.pem --key client.key";
    assert!(tls.curl("", "/v1/locks/ci%2Fa").ends_with("401"));
    let bearer = "-H 'Authorization: Bearer secret'";
    assert!(tls.curl(bearer, "/v1/locks/other").ends_with("200"));
    assert!(tls.curl(own, "/v1/locks/ci%2Fa").ends_with("200"));
    let other = tls.curl(own, "/v1/locks/other");
    assert!(other.contains(r#"the identity \"ci\" may not use the lock"#), "{other}");
    assert!(other.ends_with("403"), "{other}");
    // A page of another site, in a browser that has the certificate.
    let plain = tls.server.address.replace("https:", "http:");
    for origin in ["https://evil.example", &plain] {
        let site = format!("{own} -H 'Origin: {origin}'");
        assert!(tls.curl(&site, "/v1/locks/ci%2Fa").contains("a page of another site"), "{origin}");
    }
    let page = format!("{own} -H 'Origin: {}'", tls.server.address);
    assert!(tls.curl(&page, "/v1/locks/ci%2Fa").ends_with("200"));
    // A token has precedence, and a certificate does not replace a wrong one.
    assert!(tls.curl(&format!("{own} {bearer}"), "/v1/locks/other").ends_with("200"));
    let wrong = format!("{own} -H 'Authorization: Bearer wrong'");
    assert!(tls.curl(&wrong, "/v1/locks/ci%2Fa").ends_with("401"));
    // The certificate of another authority, with the same name.
    let foreign = tls.place.path("foreign");
    std::fs::create_dir(&foreign).unwrap();
    Certificates::make(&foreign);
    let refused = tls.curl("--cert ../foreign/client.pem --key ../foreign/client.key", "/healthz");
    assert!(refused.ends_with("000"), "{refused}");

    let (certificate, key) = tls.certificates.client();
    let store = |host: &str| {
        let authority = tls.certificates.authority().display();
        let (certificate, key) = (certificate.display(), key.display());
        format!("{host}/?ca={authority}&cert={certificate}&key={key}")
    };
    let url = store(&tls.server.address);
    assert_eq!(tls.place.code(&["run", "--store", &url, "ci/a", "true"]), 0);
    let denied = tls.place.output(&["run", "--store", &url, "other", "true"]);
    assert!(text(&denied).contains("may not use the lock"), "{denied:?}");
}

#[test]
fn plain_http_to_a_tls_address_is_answered_with_a_hint() {
    let tls = Encrypted::start();
    let plain = tls.server.address.replace("https:", "http:");
    let answer = shell(&tls.place, &format!("curl -s {plain}/v1/locks"));
    assert!(answer.status.success() && text(&answer).contains("needs https:"), "{answer:?}");
}

#[test]
fn renewed_certificate_is_used_without_a_restart() {
    let tls = Encrypted::start();
    let broken = tls.files.join("tls.pem");
    let before = std::fs::read(&broken).unwrap();
    std::fs::write(&broken, "nothing").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(tls.curl("", "/healthz").ends_with("200"), "the earlier certificate is not used");
    std::fs::write(&broken, before).unwrap();
    // All files are replaced, also the authority that clients trust.
    Certificates::make(&tls.files);
    common::eventually("the new certificate is used", || {
        tls.curl("--cert client.pem --key client.key", "/v1/locks/ci%2Fa").ends_with("200")
    });
}

#[test]
fn unusable_certificates_are_reported_with_the_file() {
    let place = Place::new();
    Certificates::make(&place.path(""));
    let serve = |words: &[&str]| {
        let mut command = place.leasehold(["serve", "--listen", "unix:socket"]);
        let output = command.args(words).current_dir(place.path("")).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        text(&output)
    };
    let with = |certificate: &str, key: &str, more: &[&str]| {
        serve(&[&["--tls-cert", certificate, "--tls-key", key], more].concat())
    };
    for (message, wanted) in [
        (with("none.pem", "tls.key", &[]), "cannot use none.pem: "),
        (with("tls.pem", "tls.pem", &[]), "cannot use tls.pem: "),
        (with("tls.key", "tls.key", &[]), "cannot use tls.key: it contains no certificate"),
        (with("tls.pem", "client.key", &[]), "client.key does not match tls.pem"),
        (with("tls.pem", "tls.key", &["--tls-client-ca", "tls.key"]), "cannot use tls.key: "),
    ] {
        assert!(message.contains(wanted) && message.contains("hint: "), "{message}");
    }
    let alone = serve(&["--tls-cert", "tls.pem"]);
    assert!(alone.contains("--tls-key"), "{alone}");
}
