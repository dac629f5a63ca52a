//! What a reader understands in ten seconds: one line a store, and one picture, out of the figures of the
//! last run.
//!
//! Each line names the tables and subjects that it is made of. *Raw* is what the store's own protocol
//! allows at best, without lease, queue or token; *others* are what people would pick instead. Those who
//! poll are left out of the hand-over: whoever gives such a lock back mostly takes it again, so
//! that what is counted as a hand-over is an exception, and not what a waiter waits.

use std::fmt::Write;

use crate::figures::{Figures, Kind};
use crate::numbers::{digits, duration, median};

/// One measurement of a store's: the subjects of one table.
struct Measurement {
    kind: Kind,
    table: &'static str,
    raw: &'static str,
    others: &'static [&'static str],
    /// A table of the benchmark `rivals`, and those of it who are others too.
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

/// The names that ours have in the tables.
const OURS: [&str; 3] =
    ["leasehold, lock + release", "leasehold", "leasehold, 8 contenders on 8 clients"];

/// What one measurement of one store showed, in nanoseconds.
struct Shown {
    ours: f64,
    raw: Option<f64>,
    /// How many times ours takes what raw does, the median over the rounds.
    times: Option<f64>,
    best_other: Option<(&'static str, f64)>,
}

impl Measurement {
    fn shown(&self, figures: &Figures) -> Option<Shown> {
        let of = |subject: &str| figures.of(self.kind, self.table, subject);
        let ours = OURS.iter().find_map(|ours| of(ours))?;
        // A window too short for a single hand-over tells nothing.
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

/// The first table of the page, in Markdown: of the stores that were measured.
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
        // To a string: it cannot fail.
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
        raw.map_or_else(none, |(raw, times)| {
            format!("{} (×{})", duration(raw), digits(times))
        }),
        shown.best_other.map_or_else(none, |(name, nanos)| {
            let told = format!("{name} {}", duration(nanos));
            if nanos < shown.ours { format!("**{told}**") } else { told }
        }),
    ]
}

/// From left to right, in nanoseconds: from 100 ns to 100 ms.
const DECADES: std::ops::RangeInclusive<i32> = 2..=8;
const LEFT: f64 = 92.0;
const DECADE: f64 = 104.0;
const LINE: f64 = 30.0;
const TOP: f64 = 58.0;

fn x(nanos: f64) -> f64 {
    let (first, last) = (f64::from(*DECADES.start()), f64::from(*DECADES.end()));
    LEFT + DECADE * (nanos.max(1.0).log10().clamp(first, last) - first)
}

/// Hand-over by store, with eight who wait, on a logarithmic scale.
pub(crate) fn picture(figures: &Figures) -> String {
    let lines: Vec<(&str, Shown)> = STORES
        .iter()
        .filter_map(|(store, _, hand_over)| Some((*store, hand_over.shown(figures)?)))
        .collect();
    let right = x(1e8);
    let bottom = TOP + LINE * lines.len() as f64;
    let (width, height) = (right + 64.0, bottom + 34.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n\
         <title>Hand-over latency with eight waiters</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    legend(&mut svg);
    for decade in DECADES {
        let nanos = 10_f64.powi(decade);
        let at = x(nanos);
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\" stroke=\"#ddd\"/>\n\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
            TOP - 6.0,
            bottom + 18.0,
            round(nanos),
        );
    }
    for (n, (store, shown)) in lines.iter().enumerate() {
        bar(&mut svg, TOP + LINE * n as f64, store, shown);
    }
    svg.push_str("</svg>\n");
    svg
}

/// A power of ten.
fn round(nanos: f64) -> String {
    match nanos {
        n if n < 1e3 => format!("{n:.0} ns"),
        n if n < 1e6 => format!("{:.0} µs", n / 1e3),
        n => format!("{:.0} ms", n / 1e6),
    }
}

const OUR_COLOUR: &str = "#2b6cb0";
const RAW_COLOUR: &str = "#222";
const OTHER_COLOUR: &str = "#dd6b20";

fn legend(svg: &mut String) {
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"20\" font-weight=\"bold\">Hand-over latency with eight waiters \
         (median, logarithmic scale)</text>\n\
         <rect x=\"{LEFT}\" y=\"31\" width=\"22\" height=\"10\" fill=\"{OUR_COLOUR}\"/>\
         <text x=\"{:.1}\" y=\"41\">leasehold</text>\n\
         <rect x=\"{:.1}\" y=\"29\" width=\"3\" height=\"14\" fill=\"{RAW_COLOUR}\"/>\
         <text x=\"{:.1}\" y=\"41\">raw protocol</text>\n\
         <circle cx=\"{:.1}\" cy=\"36\" r=\"5\" fill=\"{OTHER_COLOUR}\"/>\
         <text x=\"{:.1}\" y=\"41\">best other</text>",
        LEFT + 28.0,
        LEFT + 110.0,
        LEFT + 119.0,
        LEFT + 220.0,
        LEFT + 230.0,
    );
}

fn bar(svg: &mut String, y: f64, store: &str, shown: &Shown) {
    let end = x(shown.ours);
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{store}</text>\n\
         <rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"18\" fill=\"{OUR_COLOUR}\"/>",
        LEFT - 8.0,
        y + 14.0,
        end - LEFT,
    );
    if let Some(raw) = shown.raw {
        let at = x(raw);
        let _ = writeln!(
            svg,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"3\" height=\"24\" fill=\"{RAW_COLOUR}\"/>",
            at - 1.5,
            y - 3.0,
        );
    }
    if let Some((name, other)) = shown.best_other {
        let at = x(other);
        let _ = writeln!(
            svg,
            "<circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{OTHER_COLOUR}\">\
             <title>{name}: {}</title></circle>",
            y + 9.0,
            duration(other),
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        x(1e8) + 56.0,
        y + 14.0,
        duration(shown.ours),
    );
}
