//! The page of `leasehold stress --html`, in a real browser.
//!
//! The page reports what it drew, below its picture and in attributes of the document. The tests
//! also compare pictures of one fixed history, in light and in dark mode. The pictures have no
//! text, because fonts differ. They are compared by squares of four by four pixels, because edges
//! differ. To make them again:
//!
//! ```sh
//! UPDATE_PICTURES=1 cargo test -p leasehold-cli --test torture page
//! ```
//!
//! Look at the new pictures before you commit them.

use std::path::{Path, PathBuf};

use crate::common::torture;
use serde_json::Value;
use testbed::Browser;

/// The history that contains each kind of event once. Its own lines explain it.
const HISTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torture/history.jsonl");

/// A script before all others that reports errors in the document.
const WATCHED: &str = "<script>onerror = what => { document.documentElement.dataset.error = what; }; \
    document.addEventListener('securitypolicyviolation', e => onerror('reached for ' + e.blockedURI));\
    </script>";

/// Writes the page of a history with `more` in its head, and with `last` after its end.
fn page(directory: &Path, history: &Path, more: &str, last: &str) -> PathBuf {
    let file = directory.join("page.html");
    let words = ["--check", history.to_str().unwrap(), "--html", file.to_str().unwrap()];
    let out = torture(&words);
    assert!(matches!(out.status.code(), Some(0 | 1 | 3)), "{out:?}");
    let page = std::fs::read_to_string(&file).unwrap();
    let (head, body) = page.split_once("</head>").unwrap();
    std::fs::write(&file, format!("{head}{WATCHED}{more}</head>{body}{last}")).unwrap();
    file
}

/// Returns an attribute of the document's root.
fn attribute(document: &str, name: &str) -> Option<String> {
    let root = document.split_once("<html")?.1.split_once('>')?.0;
    let value = root.split_once(&format!("data-{name}=\""))?.1.split_once('"')?.0;
    Some(value.replace("&quot;", "\"").replace("&lt;", "<").replace("&gt;", ">"))
}

fn number(document: &str, name: &str) -> f64 {
    let value = attribute(document, name)
        .unwrap_or_else(|| panic!("the attribute data-{name} is missing: {document}"));
    value.parse().unwrap()
}

/// Returns what a page without errors reports to have drawn.
fn drawn(document: &str) -> Value {
    assert_eq!(attribute(document, "error"), None);
    let drawn = attribute(document, "drawn");
    serde_json::from_str(&drawn.unwrap_or_else(|| panic!("nothing was drawn: {document}"))).unwrap()
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn entire_history_is_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let page = page(directory.path(), Path::new(HISTORY), "", "");
    let document = Browser::new(1200, 900).document(&page, "");
    let drawn = drawn(&document);
    let expected = serde_json::json!({
        // There are two locks and four workers. Each operation has a bar in its worker's lane, and
        // each hold has one in its lock's lane.
        "lanes": 6, "bars": 29, "held": 28,
        // There are eleven writes to either resource. Two are late, one because of a pause and one
        // because of a fail-over. Each was refused by the fenced resource. The other one accepted
        // it and lost the writes made in between.
        "marks": 22, "refused": 2, "lost": 4,
        "bands": 4,
    });
    assert_eq!(drawn, expected);
    for text in ["mutual exclusion: jobs: 3.0", "leasehold torture --store 'made up' --seed 7"] {
        assert!(document.contains(text), "{text}");
    }
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn violation_links_to_its_time_range() {
    let directory = tempfile::tempdir().unwrap();
    let page = page(directory.path(), Path::new(HISTORY), "", "");
    let document = Browser::new(1200, 900).document(&page, "#v1");
    drawn(&document);
    let (from, to) = (number(&document, "from"), number(&document, "to"));
    assert!((400e3..603e3).contains(&from) && (695e3..900e3).contains(&to), "{from} to {to}");
    let detail = document.split_once("id=\"detail\"").unwrap().1;
    assert!(detail.split_once("</p>").unwrap().0.contains("3.0 on jobs"), "{detail}");
    let document = Browser::new(1200, 900).document(&page, "#t=100,200");
    assert_eq!((number(&document, "from"), number(&document, "to")), (100e3, 200e3));
}

/// A script that presses keys in the picture, and records the window and the detail text after
/// each.
const KEYS: &str = "<script>
    const noted = [];
    for (const key of ['+', 'ArrowRight', '-', '0', 'v', ']', 'n', 'p', 'Home', 'End', 'x']) {
        const event = new KeyboardEvent('keydown', { key, cancelable: true, bubbles: true });
        document.getElementById('chart').dispatchEvent(event);
        noted.push([key, view.from, view.to, document.getElementById('detail').textContent, event.defaultPrevented]);
    }
    document.documentElement.dataset.noted = JSON.stringify(noted);
    document.getElementById('fit').click();
    const wheel = new WheelEvent('wheel', { deltaY: -1, ctrlKey: true, cancelable: true });
    document.getElementById('chart').dispatchEvent(wheel);
    document.documentElement.dataset.wheel = view.to - view.from;
    document.querySelectorAll('#violations a')[0].click();
    document.documentElement.dataset.clicked = document.getElementById('detail').textContent;
    // Each bar that is drawn, and each write, is found where it is.
    fit();
    const box = canvas.getBoundingClientRect();
    const at = (t, y) => under({ clientX: box.left + x(t), clientY: box.top + y - chart.scrollTop });
    const missed = [];
    for (const lane of lanes) {
        lane.rows.forEach((row, i) => row.ops.forEach(op => {
            const from = 'lock' in lane ? op.acquired : op.invoked;
            if (at((from + op.end) / 2, lane.y + lane.top + (i + 0.5) * lane.row) !== op) missed.push(op.index);
        }));
        lane.tracks.forEach((track, i) => track.forEach(op => {
            if (at(op.wrote, lane.y + lane.top + lane.bars + (i + 0.5) * TRACK) !== op) missed.push(op.index);
        }));
    }
    document.documentElement.dataset.missed = JSON.stringify([missed, at(data.span / 2, 2)]);
</script>";

#[test]
#[ignore = "runs with ./test.sh --all"]
fn everything_is_reachable_by_keyboard_and_mouse() {
    let directory = tempfile::tempdir().unwrap();
    let page = page(directory.path(), Path::new(HISTORY), "", KEYS);
    let document = Browser::new(1200, 900).document(&page, "");
    drawn(&document);
    let noted: Vec<(String, f64, f64, String, bool)> =
        serde_json::from_str(&attribute(&document, "noted").unwrap()).unwrap();
    let width = |i: usize| noted[i].2 - noted[i].1;
    let [zoomed, moved, out, all, violation, behind, fault, before, first, last, other] =
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    assert!(width(zoomed) < 0.7 * width(all), "{noted:?}");
    assert!(noted[moved].1 > noted[zoomed].1 && width(moved) == width(zoomed), "{noted:?}");
    assert!(width(out) > width(moved) && width(all) > 860e3, "{noted:?}");
    assert!(noted[violation].3.contains("3.0 (token 41"), "{noted:?}");
    assert!(noted[behind].3.starts_with("3.1 on jobs"), "{noted:?}");
    assert!(noted[fault].3.starts_with("pause of worker 0"), "{noted:?}");
    assert!(
        noted[before].3.starts_with("servers from"),
        "expected the fault of the servers: {noted:?}"
    );
    assert!(noted[first].1 <= 0.0 && noted[last].2 >= 859e3, "{noted:?}");
    assert!(noted[..other].iter().all(|(.., taken)| *taken) && !noted[other].4, "{noted:?}");
    assert!(number(&document, "wheel") < 0.9 * width(all));
    assert!(attribute(&document, "clicked").unwrap().contains("3.0 (token 41"));
    assert_eq!(attribute(&document, "missed").unwrap(), "[[],null]");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn untrusted_names_are_shown_as_text() {
    let directory = tempfile::tempdir().unwrap();
    let evil = "</script><img src=x onerror=\"document.title='taken over'\"><b>&amp;";
    let history = std::fs::read_to_string(HISTORY).unwrap();
    let name = serde_json::to_string(evil).unwrap();
    let history = history.replace("\"jobs\"", &name).replace("\"a store that is made up\"", &name);
    let file = directory.path().join("evil.jsonl");
    std::fs::write(&file, history.replace("jobs: still", &name[1..name.len() - 1])).unwrap();
    let page = page(directory.path(), &file, "", "");
    let document = Browser::new(1200, 900).document(&page, "#v1");
    assert_eq!(drawn(&document)["lanes"], 6);
    assert!(!document.contains("<img") && !document.contains("<b>"), "{document}");
    assert!(!document.contains("<title>taken over"), "{document}");
    // The names are escaped once, and not twice.
    let heading = document.split_once("<h1").unwrap().1.split_once("</h1>").unwrap().0;
    assert!(heading.contains("&lt;/script&gt;&lt;img src=x onerror="), "{heading}");
    assert!(heading.contains("&lt;b&gt;&amp;amp;"), "{heading}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn long_list_of_violations_is_truncated_with_a_count() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("many.jsonl");
    let history = std::fs::read_to_string(HISTORY).unwrap();
    let (all, end) = history.trim_end().rsplit_once('\n').unwrap();
    let left = "{\"event\":\"residue\",\"what\":\"something\"}\n".repeat(700);
    std::fs::write(&file, format!("{all}\n{left}{end}\n")).unwrap();
    let page = page(directory.path(), &file, "", "");
    let document = Browser::new(1200, 900).document(&page, "#v702");
    drawn(&document);
    let list =
        document.split_once("<ol id=\"violations\">").unwrap().1.split_once("</ol>").unwrap().0;
    assert_eq!(list.matches("<li>").count(), 501, "{list}");
    assert!(list.contains("<li>and 202 more"), "{list}");
    let detail = document.split_once("id=\"detail\"").unwrap().1.split_once("</p>").unwrap().0;
    assert!(detail.ends_with("something"), "{detail}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn crowded_lane_draws_operations_on_top_of_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("crowd.jsonl");
    let header = std::fs::read_to_string(HISTORY).unwrap();
    let header = header.lines().next().unwrap();
    // The later requests give up earlier, so that a row of several operations ends with one that
    // ended early.
    let asked = |n: u64| {
        let (from, to) = (1_000_000 + n, 900_000_000 - n * 20_000_000);
        format!(
            "{{\"event\":\"invoked\",\"worker\":0,\"n\":{n},\"at\":{from},\"lock\":0}}\n\
             {{\"event\":\"abandoned\",\"worker\":0,\"n\":{n},\"at\":{to}}}\n"
        )
    };
    let events: String = (0..40).map(asked).collect();
    std::fs::write(&file, format!("{header}\n{events}{{\"event\":\"end\",\"at\":900000000}}\n"))
        .unwrap();
    let page = page(directory.path(), &file, "", "");
    // All operations of the last row except the longest have ended by then.
    let drawn = drawn(&Browser::new(1200, 900).document(&page, "#t=420,430"));
    assert_eq!((&drawn["lanes"], &drawn["bars"]), (&3.into(), &24.into()));
}

/// The style that shows only the picture, without text.
const BARE: &str = "<style>
    :root { --ink: transparent !important; --faint: transparent !important; --on-hold: transparent !important; }
    body { padding: 0 !important; }
    body > *:not(#chart) { display: none !important; }
    #chart { position: fixed; inset: 0; height: auto !important; max-height: none !important; border: 0 !important; }
</style>";
/// Width and height of the squares that are compared, in pixels.
const SQUARE: usize = 4;
/// Maximum difference of a square's mean color, of 255.
const OFF: u8 = 40;
/// Maximum number of squares that differ more. A cross has at least eight.
const STRAY: usize = 5;

/// The mean colors of the squares of a picture, as red, green and blue.
#[derive(PartialEq)]
struct Squares {
    width: usize,
    height: usize,
    colors: Vec<u8>,
}

impl Squares {
    fn of(picture: &[u8]) -> Self {
        let (width, height, points) = decoded(picture);
        let (columns, rows) = (width / SQUARE, height / SQUARE);
        let mut colors = Vec::new();
        for (row, column, part) in (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .flat_map(|(row, column)| (0..3).map(move |part| (row, column, part)))
        {
            let inside = (0..SQUARE * SQUARE).map(|i| {
                let (x, y) = (column * SQUARE + i % SQUARE, row * SQUARE + i / SQUARE);
                usize::from(points[(y * width + x) * 3 + part])
            });
            colors.push(u8::try_from(inside.sum::<usize>() / (SQUARE * SQUARE)).unwrap());
        }
        Self { width: columns, height: rows, colors }
    }

    fn read(file: &Path) -> Self {
        let bytes = std::fs::read(file).unwrap_or_else(|e| {
            panic!("{}: {e}: create it with UPDATE_PICTURES=1", file.display());
        });
        let (width, height, colors) = decoded(&bytes);
        Self { width, height, colors }
    }

    fn write(&self, file: &Path) {
        let file = std::fs::File::create(file).unwrap();
        let (width, height) = (self.width.try_into().unwrap(), self.height.try_into().unwrap());
        let mut encoder = png::Encoder::new(file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_compression(png::Compression::High);
        encoder.write_header().unwrap().write_image_data(&self.colors).unwrap();
    }

    /// Returns the number of squares with another color.
    fn differing(&self, other: &Self) -> usize {
        let squares = self.colors.chunks(3).zip(other.colors.chunks(3));
        squares.filter(|(a, b)| a.iter().zip(*b).any(|(a, b)| a.abs_diff(*b) > OFF)).count()
    }
}

/// Returns the width, the height, and the red, green and blue of each pixel.
fn decoded(picture: &[u8]) -> (usize, usize, Vec<u8>) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(picture)).read_info().unwrap();
    let mut points = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut points).unwrap();
    points.truncate(info.buffer_size());
    assert_eq!(info.bit_depth, png::BitDepth::Eight);
    if info.color_type == png::ColorType::Rgba {
        points = points.chunks(4).flat_map(|point| point[..3].to_vec()).collect();
    }
    (info.width as usize, info.height as usize, points)
}

fn looks_as_before(browser: &Browser, name: &str) -> Squares {
    let directory = tempfile::tempdir().unwrap();
    let page = page(directory.path(), Path::new(HISTORY), BARE, "");
    let seen = Squares::of(&browser.picture(&page, ""));
    let file = Path::new(HISTORY).with_file_name(name);
    if std::env::var_os("UPDATE_PICTURES").is_some() {
        seen.write(&file);
    }
    let expected = Squares::read(&file);
    assert_eq!((seen.width, seen.height), (expected.width, expected.height));
    let differing = seen.differing(&expected);
    if differing > STRAY {
        let now = std::env::temp_dir().join(name);
        seen.write(&now);
        panic!(
            "{differing} squares differ from {}, the new picture is {}",
            file.display(),
            now.display()
        );
    }
    seen
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn page_matches_its_reference_images_in_light_and_dark_mode() {
    let light = looks_as_before(&Browser::new(1200, 260), "light.png");
    let dark = looks_as_before(&Browser::new(1200, 260).dark(), "dark.png");
    let paper = |squares: &Squares| *squares.colors.last().unwrap();
    assert!(paper(&light) > 240 && paper(&dark) < 60, "{} {}", paper(&light), paper(&dark));
}

/// A script that records sizes before, during and after printing.
const PRINTED: &str = "<script>
    const sizes = () => [canvas.height, document.documentElement.className, color.paper];
    const before = sizes();
    dispatchEvent(new Event('beforeprint'));
    const printing = sizes();
    dispatchEvent(new Event('afterprint'));
    document.documentElement.dataset.sizes = JSON.stringify([before, printing, sizes(), height]);
</script>";

#[test]
#[ignore = "runs with ./test.sh --all"]
fn all_lanes_are_printed_on_white() {
    let directory = tempfile::tempdir().unwrap();
    let page = page(directory.path(), Path::new(HISTORY), "", PRINTED);
    // The window is too low to show all lanes.
    let browser = Browser::new(1200, 160).dark();
    let document = browser.document(&page, "");
    drawn(&document);
    let sizes: Value = serde_json::from_str(&attribute(&document, "sizes").unwrap()).unwrap();
    assert!(sizes[0][0].as_f64() < sizes[3].as_f64(), "{sizes}");
    assert!(sizes[1][0].as_f64() >= sizes[3].as_f64(), "{sizes}");
    assert_eq!((&sizes[1][1], &sizes[1][2]), (&"printing".into(), &"#ffffff".into()), "{sizes}");
    assert_eq!(sizes[0], sizes[2], "the size must be restored");
    let paper = browser.print(&page);
    assert!(paper.starts_with(b"%PDF") && paper.len() > 10_000, "{} bytes", paper.len());
}

/// Returns a history of this many events. Twenty workers take ten locks in turn and write while
/// they hold them.
fn large(events: u64) -> String {
    use std::fmt::Write;
    let locks: Vec<String> = (0..10)
        .map(|n| format!("{{\"name\":\"lock {n}\",\"kind\":\"mutex\",\"capacity\":1}}"))
        .collect();
    let mut text = format!(
        "{{\"format\":\"leasehold-history\",\"version\":1,\"store\":\"large\",\"locks\":[{}],\"promises\":[\"exclusion\"]}}\n",
        locks.join(",")
    );
    for turn in 0..events / 6 {
        let (worker, n, lock) = (turn % 20, turn / 20, turn % 10);
        let at = turn * 100_000;
        let mut tell = |event: &str, after: u64, more: &str| {
            let at = at + after;
            writeln!(
                text,
                "{{\"event\":\"{event}\",\"worker\":{worker},\"n\":{n},\"at\":{at}{more}}}"
            )
            .unwrap();
        };
        tell("invoked", 0, &format!(",\"lock\":{lock}"));
        tell("acquired", 300_000, &format!(",\"token\":{}", turn + 1));
        tell("held", 310_000, "");
        tell("wrote", 700_000, ",\"plain\":false,\"fenced\":false");
        tell("releasing", 900_000, "");
        tell("released", 950_000, "");
    }
    writeln!(text, "{{\"event\":\"end\",\"at\":{}}}", events * 100_000).unwrap();
    text
}

/// A script that draws the whole history, which is the slowest case, and then zooms in to a
/// hundredth and out again. It reports the shortest time for the whole, because that is least
/// affected by other work of the machine.
const ZOOMS: &str = "<script>
    const took = [];
    for (let i = 0; i < 28; i++) {
        if (i > 7) zoom(i < 18 ? 0.6 : 1 / 0.6, data.span / 3);
        paint();
        took.push(Number(document.documentElement.dataset.took));
    }
    document.documentElement.dataset.whole = Math.min(...took.slice(0, 8));
</script>";

#[test]
#[ignore = "runs with ./test.sh --all"]
fn a_hundred_thousand_events_can_be_zoomed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("large.jsonl");
    std::fs::write(&file, large(100_000)).unwrap();
    let page = page(directory.path(), &file, "", ZOOMS);
    let document = Browser::new(1200, 900).document(&page, "");
    assert!(drawn(&document)["bars"].as_u64() > Some(1_000));
    let whole = number(&document, "whole");
    println!("{} bytes, {whole} ms", std::fs::metadata(&page).unwrap().len());
    // This takes about 20 ms on an idle machine.
    assert!(whole < 1_000.0, "{whole} ms");
}
