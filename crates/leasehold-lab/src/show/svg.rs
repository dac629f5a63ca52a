//! Draws a story as a picture: a lane for each participant, a row for each step, both halves.
//!
//! The picture does not depend on when or where the story was played, nor on the fonts of a
//! reader's machine. Lines are broken by counting characters.

use std::fmt::Write;

use super::words::{WARNING, escaped, heading, lines, outcome, sign};
use crate::scene::{Belief, Cell, Half, Mark, Played, Step};
use crate::story::Story;

const WIDTH: usize = 960;
const MARGIN: usize = 16;
/// The x coordinate at which the first lane begins, after the steps' numbers.
const LANES: usize = MARGIN + 28;
const LANE: usize = 58;
/// Height of one line of text, and the additional height of a row.
const LINE: usize = 17;
const ROW: usize = 9;
/// Maximum width of a character in the text of a step, and of a bold one. Marked text is bold.
const LETTER: usize = 7;
const BOLD_LETTER: usize = 8;

/// The colors of a picture, in the reader's light or dark mode.
pub(super) const STYLE: &str = "\
.lab{--paper:#ffffff;--ink:#1c2126;--faint:#5c6670;--rule:#d4dae0;--lane:#f3f5f7;--wait:#aeb9c4;--hold:#2b6cb0;--two:#c5221f;--late:#c98a00;--bad:#c5221f;--good:#2f7d4f}
@media (prefers-color-scheme:dark){.lab{--paper:#14181c;--ink:#e6eaee;--faint:#9aa5b0;--rule:#343c45;--lane:#1b2127;--wait:#5a6876;--hold:#5a9bdc;--two:#ff6b66;--late:#d9a441;--bad:#ff7b76;--good:#5fc48e}}
.lab text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--ink)}
.lab .paper{fill:var(--paper)}
.lab .h{font-size:15px;font-weight:600}
.lab .n,.lab .s{fill:var(--faint);font-size:12px}
.lab .t{text-anchor:middle;font-size:12px}
.lab .l{text-anchor:middle;font-weight:600}
.lab .e{text-anchor:end}
.lab .bad{fill:var(--bad);font-weight:600}
.lab .good{fill:var(--good);font-weight:600}
.lab .row{fill:var(--lane)}
.lab .life{stroke:var(--rule);stroke-width:1}
.lab .wait{fill:var(--wait)}
.lab .hold{fill:var(--hold)}
.lab .two{fill:var(--two)}
.lab .late{fill:var(--late)}
.lab .new{font-weight:700}
.lab .still{fill-opacity:.45}
.lab .act{fill:var(--paper);stroke:var(--ink);stroke-width:1.5}
.lab .dead{stroke:var(--ink);stroke-width:2}
";

/// Returns a self-contained picture.
pub fn picture(story: &Story, played: &Played) -> String {
    drawn(story, played, &format!("<style>\n{STYLE}</style>\n"))
}

/// Returns the picture for a page that contains its style.
pub(super) fn within(story: &Story, played: &Played) -> String {
    drawn(story, played, "")
}

fn drawn(story: &Story, played: &Played, style: &str) -> String {
    let mut body = String::new();
    let mut y = MARGIN;
    for half in [&played.naive, &played.ours] {
        y = half_at(&mut body, half, y);
    }
    body.push_str(&legend(y));
    let height = y + LINE + MARGIN / 2;
    let (name, line) = (escaped(story.name), escaped(story.line));
    let says = escaped(&format!("{} {}", played.naive.verdict, played.ours.verdict));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"lab\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n<title>{name}: {line}</title>\n\
         <desc>{says}</desc>\n{style}<rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
         {body}</svg>\n"
    )
}

/// Draws a half from the y coordinate `top` on, and returns the y coordinate of its end.
fn half_at(body: &mut String, half: &Half, top: usize) -> usize {
    let mut y = top + LINE;
    text(body, MARGIN, y, "h", &heading(half));
    if half.is_naive {
        text(body, WIDTH - MARGIN, y, "bad e", WARNING);
    }
    y += LINE + 8;
    for (at, lane) in half.lanes.iter().enumerate() {
        text(body, middle(at), y, "l", lane.name);
    }
    y += 6;
    for (number, step) in (1..).zip(&half.steps) {
        y = step_at(body, half, number, step, y);
    }
    let class = if half.is_kept { "good" } else { "bad" };
    y += LINE + 6;
    text(body, MARGIN, y, class, &format!("{} {}", outcome(half), half.verdict));
    y + LINE
}

/// Returns the x coordinate of the middle of a lane.
fn middle(lane: usize) -> usize {
    LANES + lane * LANE + LANE / 2
}

fn step_at(body: &mut String, half: &Half, number: usize, step: &Step, y: usize) -> usize {
    let x = LANES + half.lanes.len() * LANE + 10;
    let name = half.lanes[step.lane].name;
    let label = format!("{}{name}: {}", sign(step.mark), step.says);
    let letter = if step.mark == Mark::Plain { LETTER } else { BOLD_LETTER };
    let parts = lines(&label, (WIDTH - MARGIN - x) / letter);
    let height = parts.len() * LINE + ROW;
    if number % 2 == 1 {
        let wide = WIDTH - 2 * MARGIN + 12;
        let _ = writeln!(
            body,
            "<rect class=\"row\" x=\"{}\" y=\"{y}\" width=\"{wide}\" height=\"{height}\"/>",
            MARGIN - 6
        );
    }
    let base = y + LINE;
    text(body, MARGIN + 16, base, "n e", &number.to_string());
    for (at, cell) in step.cells.iter().enumerate() {
        let held = match (step.is_shared(), half.is_naive) {
            (false, _) => "hold",
            (true, true) => "two",
            (true, false) => "late",
        };
        let look = Look { is_act: at == step.lane, is_new: is_new(half, number, at), held };
        cell_at(body, (middle(at), y, height), cell, &look);
    }
    let class = match step.mark {
        Mark::Plain => "",
        Mark::Bad => "bad",
        Mark::Good => "good",
    };
    for (line, part) in parts.iter().enumerate() {
        text(body, x, base + line * LINE, class, part);
    }
    y + height
}

/// Returns whether this step, counted from 1, changed what a lane shows.
fn is_new(half: &Half, number: usize, lane: usize) -> bool {
    let before = number.checked_sub(2).and_then(|at| half.steps.get(at));
    before.is_some_and(|before| before.cells[lane] != half.steps[number - 1].cells[lane])
}

/// How a cell is drawn.
struct Look {
    /// Whether the cell's client takes this step.
    is_act: bool,
    /// Whether the cell differs from the one in the previous step.
    is_new: bool,
    /// The CSS class of a holder's bar.
    held: &'static str,
}

fn cell_at(body: &mut String, (x, y, height): (usize, usize, usize), cell: &Cell, look: &Look) {
    let Look { is_act, is_new, held } = *look;
    let belief = match cell {
        Cell::Thing(shows) => {
            return text(body, x, y + LINE, if is_new { "t new" } else { "t" }, shows);
        }
        Cell::Client(belief) => *belief,
    };
    let bottom = y + height;
    let mut bar = |class: &str, wide: usize| {
        let left = x - wide / 2;
        let _ = writeln!(
            body,
            "<rect class=\"{class}\" x=\"{left}\" y=\"{y}\" width=\"{wide}\" height=\"{height}\"/>"
        );
    };
    match belief {
        Belief::Holds => bar(held, 18),
        Belief::HoldsAnother => bar("hold", 18),
        Belief::StandsStill => bar(&format!("{held} still"), 18),
        Belief::Waits => bar("wait", 6),
        Belief::Nothing | Belief::Dead => {
            let _ = writeln!(body, "<path class=\"life\" d=\"M{x} {y}V{bottom}\"/>");
        }
    }
    let centre = y + (LINE + ROW) / 2;
    match (belief, is_act) {
        (Belief::Dead, _) => {
            let (left, up) = (x - 5, centre - 5);
            let _ = writeln!(body, "<path class=\"dead\" d=\"M{left} {up}l10 10m0 -10l-10 10\"/>");
        }
        (_, true) => {
            let _ = writeln!(body, "<circle class=\"act\" cx=\"{x}\" cy=\"{centre}\" r=\"4\"/>");
        }
        (_, false) => {}
    }
}

fn legend(y: usize) -> String {
    let mut body = String::new();
    let mut x = MARGIN;
    for (class, words) in [
        ("hold", "believes it holds"),
        ("hold still", "paused, still believes it holds"),
        ("two", "two holders at once"),
        ("late", "two believe it, harmless"),
        ("wait", "waits"),
    ] {
        let top = y - 2;
        let _ = writeln!(
            body,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{top}\" width=\"12\" height=\"12\"/>"
        );
        text(&mut body, x + 18, y + 9, "s", words);
        x += 18 + words.len() * 7 + 16;
    }
    body
}

fn text(body: &mut String, x: usize, y: usize, class: &str, text: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\"{class}>{}</text>", escaped(text));
}
