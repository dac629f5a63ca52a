//! The overview of the last run's results: one line per store, and one picture.
//!
//! Each line names the tables and subjects that it is made of. *Raw* is the best that the store's
//! own protocol allows, without lease, queue or token. *Others* are the usual alternatives. Polling
//! alternatives are left out of the hand-over, because the client that releases such a lock mostly
//! acquires it again. So a measured hand-over would be an exception, and not a waiter's usual wait.

use std::fmt::Write;

use crate::figures::{Figures, Kind};
use crate::numbers::{digits, duration, median};

/// One measurement of a store, with the subjects of one table.
struct Measurement {
    kind: Kind,
    table: &'static str,
    raw: &'static str,
    others: &'static [&'static str],
    /// A table of the benchmark `rivals`, and its subjects that count as others too.
    rivals: (&'static str, &'static [&'static str]),
}

impl Measurement {
    const fn rivals(self, table: &'static str, others: &'static [&'static str]) -> Self {
        Self { rivals: (table, others), ..self }
    }
}

const fn pair(
    table: &'static str,
    raw: &'static str,
    others: &'static [&'static str],
) -> Measurement {
    Measurement { kind: Kind::Pair, table, raw, others, rivals: ("", &[]) }
}

const fn hand_over(
    table: &'static str,
    raw: &'static str,
    others: &'static [&'static str],
) -> Measurement {
    Measurement { kind: Kind::HandOver, table, raw, others, rivals: ("", &[]) }
}

const STORES: [(&str, Measurement, Measurement); 12] = [
    (
        "memory",
        pair("memory:, uncontended pair", "tokio::sync::Mutex", &[]),
        hand_over("memory:, 8 tasks on two threads", "tokio::sync::Mutex", &[]),
    ),
    (
        "file",
        pair("file:, uncontended pair", "flock + unlock on an open file", &[])
            .rivals("rivals: file:, uncontended pair", &["distributed-lock-file"]),
        hand_over("file:, 8 processes", "ring", &[]),
    ),
    (
        "sqlite",
        pair("sqlite:, synchronous=full, uncontended pair", "insert + delete of a row", &[]),
        hand_over("sqlite:, 8 contenders", "", &[]),
    ),
    (
        "postgres",
        pair(
            "postgres:, on disk, uncontended pair",
            "insert + delete of a row",
            &["pg_advisory_lock + unlock"],
        )
        .rivals("rivals: postgres:, uncontended pair", &["distributed-lock"]),
        hand_over("postgres:, 8 contenders", "", &["pg_advisory_lock"])
            .rivals("rivals: postgres:, 8 contenders", &["distributed-lock"]),
    ),
    (
        "mysql",
        pair(
            "mysql: (MariaDB), on disk, uncontended pair",
            "insert + delete of a row",
            &["GET_LOCK + RELEASE_LOCK"],
        ),
        hand_over("mysql: (MariaDB), 8 contenders", "", &["GET_LOCK"]),
    ),
    (
        "redis",
        pair(
            "redis:, uncontended pair",
            "SET NX PX + compare-and-delete",
            &["rslock", "redis-py, Lock"],
        )
        .rivals("rivals: redis:, uncontended pair", &["python-redis-lock", "node-redlock"]),
        hand_over("redis:, 8 contenders", "ring", &[])
            .rivals("rivals: redis:, 8 contenders", &["python-redis-lock"]),
    ),
    (
        "redlock",
        pair(
            "redlock: on 3 servers, uncontended pair",
            "SET NX PX + compare-and-delete, one server",
            &["rslock on 3 servers"],
        ),
        hand_over("redlock: on 3 servers, 8 contenders", "", &[]),
    ),
    (
        "zookeeper",
        pair(
            "zookeeper:, uncontended pair",
            "create + delete",
            &["the driver's lock recipe", "kazoo"],
        )
        .rivals("rivals: zookeeper:, uncontended pair", &["Curator"]),
        hand_over(
            "zookeeper:, 8 contenders",
            "change + watch event, bare",
            &["the driver's lock recipe", "kazoo"],
        )
        .rivals("rivals: zookeeper:, 8 contenders", &["Curator"]),
    ),
    (
        "etcd",
        pair(
            "etcd:, uncontended pair",
            "transaction + deletion",
            &["etcdctl lock, a process each"],
        )
        .rivals("rivals: etcd:, uncontended pair", &["etcd-client"]),
        hand_over(
            "etcd:, many want one lock",
            "write + event, bare",
            &["etcdctl lock, 8 loops of processes"],
        )
        .rivals("rivals: etcd:, 8 contenders", &["etcd-client"]),
    ),
    (
        "memcached",
        pair("memcached:, uncontended pair", "add + delete", &[]),
        hand_over("memcached:, 8 contenders", "", &[]),
    ),
    (
        "nats",
        pair("nats:, uncontended pair", "create + delete", &[]),
        hand_over("nats:, 8 contenders", "", &[]),
    ),
    (
        "s3",
        pair("s3:, uncontended pair", "two conditional writes", &[]),
        hand_over("s3:, 8 contenders", "", &[]),
    ),
];

/// The names of leasehold's subjects in the tables.
const OURS: [&str; 3] =
    ["leasehold, lock + release", "leasehold", "leasehold, 8 contenders on 8 clients"];

/// The results of one measurement of one store, in nanoseconds.
struct Shown {
    ours: f64,
    raw: Option<f64>,
    /// leasehold's time divided by the raw time, as the median over the rounds.
    times: Option<f64>,
    best_other: Option<(&'static str, f64)>,
}

impl Measurement {
    fn shown(&self, figures: &Figures) -> Option<Shown> {
        let of = |subject: &str| figures.of(self.kind, self.table, subject);
        let ours = OURS.iter().find_map(|ours| of(ours))?;
        // A window too short for a single hand-over has no result.
        if !median(ours.to_vec()).is_finite() {
            return None;
        }
        let raw = of(self.raw);
        let times =
            raw.map(|raw| median(ours.iter().zip(raw).map(|(ours, raw)| ours / raw).collect()));
        let (beside, rivals) = self.rivals;
        let tables = [(self.table, self.others), (beside, rivals)];
        let others = tables
            .into_iter()
            .flat_map(|(table, names)| names.iter().map(move |name| (table, *name)))
            .filter_map(|(table, name)| {
                let rounds = figures.of(self.kind, table, name)?;
                Some((name, median(rounds.to_vec())))
            })
            .filter(|(_, nanos)| nanos.is_finite());
        Some(Shown {
            ours: median(ours.to_vec()),
            raw: raw.map(|raw| median(raw.to_vec())),
            times,
            best_other: others.min_by(|a, b| a.1.total_cmp(&b.1)),
        })
    }
}

/// Returns the first table of the page in Markdown, with the stores that were measured.
pub(crate) fn table(figures: &Figures) -> String {
    let mut table = "\
| store | acquire + release | raw protocol | best other | hand-over, 8 waiters | raw protocol | best other |
|---|--:|--:|--:|--:|--:|--:|
"
    .to_owned();
    for (store, pair, hand_over) in &STORES {
        let (pair, hand_over) = (pair.shown(figures), hand_over.shown(figures));
        if pair.is_none() && hand_over.is_none() {
            continue;
        }
        let cells: Vec<String> = [pair, hand_over].into_iter().flat_map(cells).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(table, "| `{store}:` | {} |", cells.join(" | "));
    }
    table
}

fn cells(shown: Option<Shown>) -> [String; 3] {
    let none = || "–".to_owned();
    let Some(shown) = shown else { return [none(), none(), none()] };
    let raw = shown.raw.zip(shown.times);
    [
        duration(shown.ours),
        raw.map_or_else(none, |(raw, times)| format!("{} (×{})", duration(raw), digits(times))),
        shown.best_other.map_or_else(none, |(name, nanos)| {
            let text = format!("{name} {}", duration(nanos));
            if nanos < shown.ours { format!("**{text}**") } else { text }
        }),
    ]
}

/// The scale from left to right, from 100 ns to 100 ms.
const DECADES: std::ops::RangeInclusive<i32> = 2..=8;
const LEFT: f64 = 92.0;
const DECADE: f64 = 104.0;
const LINE: f64 = 24.0;
const TOP: f64 = 58.0;

fn x(nanos: f64) -> f64 {
    let (first, last) = (f64::from(*DECADES.start()), f64::from(*DECADES.end()));
    LEFT + DECADE * (nanos.max(1.0).log10().clamp(first, last) - first)
}

/// Light or dark colors, by the preference of the reader's system.
const STYLE: &str = "\
text{fill:#24292f}.axis{fill:#57606a}.grid{stroke:#d0d7de}.ours{fill:#0969da}.raw{fill:#57606a}.other{fill:#bc4c00}
.back{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.axis{fill:#8d96a0}.grid{stroke:#30363d}.ours{fill:#58a6ff}
.raw{fill:#8d96a0}.other{fill:#f0883e}.back{fill:#0d1117}}";

/// Draws the hand-over latency of each store with eight waiters as dots on a logarithmic scale, the
/// fastest first.
pub(crate) fn picture(figures: &Figures) -> String {
    let mut lines: Vec<(&str, Shown)> = STORES
        .iter()
        .filter_map(|(store, _, hand_over)| Some((*store, hand_over.shown(figures)?)))
        .collect();
    lines.sort_by(|one, other| one.1.ours.total_cmp(&other.1.ours));
    let bottom = TOP + LINE * lines.len() as f64;
    let (width, height) = (x(1e8) + NAMES, bottom + 34.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n\
         <title>Hand-over latency with eight waiters</title>\n<style>{STYLE}</style>\n\
         <rect class=\"back\" width=\"100%\" height=\"100%\"/>\n"
    );
    legend(&mut svg);
    for decade in DECADES {
        let nanos = 10_f64.powi(decade);
        let at = x(nanos);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\"/>\n\
             <text class=\"axis\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            TOP - 6.0,
            bottom + 18.0,
            round(nanos),
        );
    }
    for (n, (store, shown)) in lines.iter().enumerate() {
        dots(&mut svg, TOP + LINE * (n as f64 + 0.5), store, shown);
    }
    svg.push_str("</svg>\n");
    svg
}

/// The space for the labels next to the scale.
const NAMES: f64 = 280.0;

/// Formats a power of ten.
fn round(nanos: f64) -> String {
    match nanos {
        n if n < 1e3 => format!("{n:.0} ns"),
        n if n < 1e6 => format!("{:.0} µs", n / 1e3),
        n => format!("{:.0} ms", n / 1e6),
    }
}

fn legend(svg: &mut String) {
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"20\" font-weight=\"bold\">Hand-over latency with eight waiters \
         (median, logarithmic scale)</text>"
    );
    for (n, (class, name)) in
        [("ours", "leasehold"), ("raw", "raw protocol"), ("other", "best other")].iter().enumerate()
    {
        let at = LEFT + 6.0 + 120.0 * n as f64;
        let _ = writeln!(
            svg,
            "{}<text x=\"{:.1}\" y=\"41\">{name}</text>",
            dot(class, at, 36.0),
            at + 10.0
        );
    }
}

fn dot(class: &str, x: f64, y: f64) -> String {
    match class {
        "raw" => {
            format!(
                "<rect class=\"raw\" x=\"{:.1}\" y=\"{:.1}\" width=\"3\" height=\"14\"/>",
                x - 1.5,
                y - 7.0
            )
        }
        _ => format!("<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\"/>"),
    }
}

fn dots(svg: &mut String, y: f64, store: &str, shown: &Shown) {
    let text = y + 4.5;
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{text:.1}\" text-anchor=\"end\">{store}</text>",
        LEFT - 8.0
    );
    if let Some(raw) = shown.raw {
        let _ = writeln!(svg, "{}", dot("raw", x(raw), y));
    }
    let _ = writeln!(svg, "{}", dot("ours", x(shown.ours), y));
    let mut ours_shown = duration(shown.ours);
    if let Some((name, other)) = shown.best_other {
        let _ = writeln!(svg, "{}", dot("other", x(other), y));
        let _ = write!(ours_shown, ", {name} {}", duration(other));
    }
    let _ = writeln!(
        svg,
        "<text class=\"axis\" x=\"{:.1}\" y=\"{text:.1}\">{ours_shown}</text>",
        x(1e8) + 12.0
    );
}
