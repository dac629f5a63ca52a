//! The README's first picture: a run on Redis with a fail-over, in which the unfenced resource
//! loses an update and the fenced one does not.
//!
//! Each run of this test checks that such a picture can be made. To make it again:
//!
//! ```sh
//! UPDATE_PICTURES=1 cargo test -p leasehold-cli --all-features --test torture picture -- --ignored
//! ```
#![cfg(feature = "redis")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::unbroken;
use serde_json::Value;
use testbed::{Browser, Sentinel};

const PICTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pictures");

/// Runs the workers with fail-overs, and writes the files into `directory`.
fn run(servers: &Sentinel, directory: &Path) -> Value {
    let asked = directory.join("asked");
    let script = ": >\"$0\" && while [ -e \"$0\" ]; do sleep 0.02; done";
    let files = ["run.jsonl", "page.html"].map(|name| directory.join(name).display().to_string());
    let (url, asked_path) = (servers.url(), asked.display().to_string());
    let words = "--kind mutex --clients 2 --lease 3s --seconds 24 --fault pause";
    let mut words: Vec<&str> = words.split(' ').collect();
    words.extend(["--store", &url, "--history", &files[0], "--html", &files[1]]);
    words.extend(["--", "sh", "-c", script, &asked_path]);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| unbroken(&words));
        while !run.is_finished() {
            if asked.exists() {
                wait_for_a_pause(&url);
                let master = servers.master();
                let old = master.port();
                master.kill();
                servers.wait_for_failover(old);
                std::fs::remove_file(&asked).unwrap();
                // This prepares the next fail-over.
                master.restart();
                servers.master().wait_for_replicas(1);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        run.join().unwrap()
    })
}

/// Returns the paused workers of the run on this store.
fn stopped(store: &str) -> BTreeSet<u32> {
    // The name may contain any characters. After it come the state and the parent.
    let stat = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned);
        Some((fields.next()?, fields.next()?.parse::<u32>().ok()?))
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_ours = |pid: &u32| {
        let Some((state, parent)) = stat(*pid) else { return false };
        let of = std::fs::read_to_string(format!("/proc/{parent}/cmdline"));
        state == "T" && of.is_ok_and(|words| words.split('\0').any(|word| word == store))
    };
    pids.filter(is_ours).collect()
}

/// Waits until a worker has just been paused, or for ten seconds. It is most often a holder between
/// reading and writing. Its pause is longer than a fail-over takes.
fn wait_for_a_pause(store: &str) {
    let end = Instant::now() + Duration::from_secs(10);
    let mut before = stopped(store);
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
        let now = stopped(store);
        if !now.is_subset(&before) {
            return;
        }
        before = now;
    }
}

/// Returns the time window of a fail-over and a late write, in milliseconds since the start of the
/// run. The fenced resource refused the write, and the unfenced one accepted it.
fn window(history: &str) -> Option<(f64, f64)> {
    let lines: Vec<Value> =
        history.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |event: &'static str| lines.iter().filter(move |line| line["event"] == event);
    let at = |line: &Value, key: &str| line[key].as_f64().unwrap() / 1e6;
    let began = of("invoked").map(|line| at(line, "at")).fold(f64::MAX, f64::min);
    for fault in of("fault").filter(|line| line["fault"] == "servers") {
        let (from, to) = (at(fault, "from"), at(fault, "to"));
        for late in of("wrote").filter(|line| line["plain"] == true && line["fenced"] == false) {
            let wrote = at(late, "at");
            let same = |line: &&Value| line["worker"] == late["worker"] && line["n"] == late["n"];
            let held = at(of("acquired").find(same)?, "at");
            // The worker held the lock when the server was killed, and wrote soon after the
            // fail-over.
            if held < from && (to..to + 6_000.0).contains(&wrote) {
                let margin = (wrote - held) * 0.12;
                return Some((held - began - margin, wrote - began + margin));
            }
        }
    }
    None
}

/// The style that shows only the legend and the picture.
const ALONE: &str = "<style>
    header, #broken, nav .keys, #detail, #keys, #drawn, #report { display: none !important; }
    body { padding: 8px !important; }
    #chart { max-height: none !important; border: 0 !important; }
</style>";
const HIGH: &str = "<script>
    document.documentElement.dataset.high = document.getElementById('chart').getBoundingClientRect().bottom + 8;
</script>";

fn pictures(page: &Path, address: &str) {
    let text = std::fs::read_to_string(page).unwrap();
    std::fs::write(page, text.replace("</head>", &format!("{ALONE}</head>")) + HIGH).unwrap();
    let document = Browser::new(1000, 600).document(page, address);
    let high = document.split_once("data-high=\"").unwrap().1.split_once('"').unwrap().0;
    let high = high.parse::<f64>().unwrap().ceil() as u32;
    for (name, browser) in [
        ("torture-light", Browser::new(1000, high)),
        ("torture-dark", Browser::new(1000, high).dark()),
    ] {
        let file = PathBuf::from(PICTURES).join(format!("{name}.png"));
        std::fs::write(file, browser.picture(page, address)).unwrap();
    }
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn redis_fail_over_loses_only_unfenced_updates() {
    let servers = Sentinel::start();
    let directory = tempfile::tempdir().unwrap();
    let makes_pictures = std::env::var_os("UPDATE_PICTURES").is_some();
    // It depends on chance whether a holder is paused just when the master is killed, and whether
    // another worker writes meanwhile.
    for _ in 0..if makes_pictures { 12 } else { 4 } {
        let report = run(&servers, directory.path());
        let fenced = report["properties"].as_array().unwrap();
        let fenced = fenced.iter().find(|line| line["property"] == "updates").unwrap();
        assert_eq!((&fenced["claimed"], &fenced["violations"]), (&true.into(), &0.into()));
        let lost = report["negative_control"]["acknowledged_updates_lost"].as_u64();
        let shows = lost >= Some(1)
            && report["fenced_writes_refused"].as_u64() >= Some(1)
            && report["fenced_updates_kept"].as_u64() >= Some(10)
            && report["faults"]["servers"].as_u64() >= Some(1);
        if !makes_pictures && shows {
            return;
        }
        let history = std::fs::read_to_string(directory.path().join("run.jsonl")).unwrap();
        if let Some((from, to)) = window(&history).filter(|_| shows) {
            return pictures(&directory.path().join("page.html"), &format!("#t={from},{to}"));
        }
    }
    panic!("no run showed the violation");
}
