//! Shows a story on a terminal: a column for each lane, a line for each step.

use std::fmt::Write;
use std::io::IsTerminal;

use super::words::{WARNING, heading, lines, outcome, sign};
use crate::scene::{Belief, Cell, Half, Mark, Played, Step};
use crate::story::Story;

/// Width of a line.
const WIDTH: usize = 100;
/// Width of the step's number, before the first lane.
const NUMBER: usize = 5;
/// Minimum width of a lane.
const LANE: usize = 5;

const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// Whether to write in colors.
#[derive(Clone, Copy, Debug)]
pub struct Colours(bool);

impl Colours {
    /// No colors, as for a file.
    pub const NONE: Self = Self(false);

    /// Uses colors if standard output is a terminal, unless the user has set `NO_COLOR`.
    pub fn of_this_terminal() -> Self {
        Self(std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none())
    }

    fn on(self, colour: &str, text: &str) -> String {
        if self.0 { format!("{colour}{text}{PLAIN}") } else { text.to_owned() }
    }
}

/// Lists the stories, one per line, with the packages that are missing on this machine.
pub fn list(stories: &[Story]) -> String {
    let mut text = String::new();
    let longest = stories.iter().map(|story| story.name.len()).max().unwrap_or(0);
    for story in stories {
        let (name, server) = (story.name, story.server.name());
        let missing = match story.server.missing().join(" ") {
            none if none.is_empty() => none,
            packages => format!(" (not installed: {packages})"),
        };
        let _ = writeln!(text, "{name:longest$}  {server:10}  {}{missing}", story.line);
    }
    text.push_str("\nTo play stories: leasehold demo STORY…, or leasehold demo --all\n");
    text
}

/// Formats a story that was played.
pub fn story(story: &Story, played: &Played, colours: Colours) -> String {
    let title = format!("{}: {}", story.name, story.line);
    let mut text = format!("{}\n", colours.on(BOLD, &title));
    let _ = writeln!(text, "(on {})\n", story.server.name());
    for line in lines(&story.telling.join(" "), WIDTH) {
        let _ = writeln!(text, "{line}");
    }
    for half in [&played.naive, &played.ours] {
        text.push('\n');
        text.push_str(&half_of(half, colours));
    }
    text.push_str("\n  █ believes it holds   ▒ paused, still believes it holds   ┊ waits   × crashed   ‼ two at once\n");
    text
}

fn half_of(half: &Half, colours: Colours) -> String {
    let mut text = format!("  {}\n", colours.on(BOLD, &heading(half)));
    if half.is_naive {
        let _ = writeln!(text, "  {}", colours.on(RED, WARNING));
    }
    let widths = widths(half);
    let names = half.lanes.iter().zip(&widths);
    let names: String = names.map(|(lane, width)| format!("{:width$}", lane.name)).collect();
    let _ = writeln!(text, "\n{:NUMBER$}{}", "", names.trim_end());
    for (number, step) in (1..).zip(&half.steps) {
        row(&mut text, half, &widths, number, step, colours);
    }
    let colour = if half.is_kept { GREEN } else { RED };
    let verdict = format!("{} {}", outcome(half), half.verdict);
    let _ = writeln!(text, "\n  {}", colours.on(colour, &verdict));
    text
}

/// Returns the width of each lane.
fn widths(half: &Half) -> Vec<usize> {
    let shown = |at: usize| half.steps.iter().map(move |step| symbol(&step.cells[at]));
    let lanes = half.lanes.iter().enumerate();
    let widest = lanes.map(|(at, lane)| {
        let shown = shown(at).map(|text| text.chars().count()).max();
        shown.unwrap_or(0).max(lane.name.chars().count()) + 2
    });
    widest.map(|width| width.max(LANE)).collect()
}

fn row(
    text: &mut String,
    half: &Half,
    widths: &[usize],
    number: usize,
    step: &Step,
    colours: Colours,
) {
    let cells = step.cells.iter().zip(widths);
    let cells: String = cells.map(|(cell, width)| format!("{:width$}", symbol(cell))).collect();
    let cells = if step.is_shared() { colours.on(RED, &cells) } else { cells };
    let both = if step.is_shared() { colours.on(RED, "‼ ") } else { "  ".into() };
    let before = NUMBER + widths.iter().sum::<usize>() + 2;
    let name = half.lanes[step.lane].name;
    let label = format!("{}{name}: {}", sign(step.mark), step.says);
    for (line, part) in lines(&label, WIDTH.saturating_sub(before)).iter().enumerate() {
        let part = match step.mark {
            Mark::Plain => part.clone(),
            Mark::Bad => colours.on(RED, part),
            Mark::Good => colours.on(GREEN, part),
        };
        let _ = match line {
            0 => writeln!(text, "{number:3}  {cells}{both}{part}"),
            _ => writeln!(text, "{:before$}  {part}", ""),
        };
    }
}

fn symbol(cell: &Cell) -> &str {
    match cell {
        Cell::Client(Belief::Nothing) => "·",
        Cell::Client(Belief::Waits) => "┊",
        Cell::Client(Belief::Holds | Belief::HoldsAnother) => "█",
        Cell::Client(Belief::StandsStill) => "▒",
        Cell::Client(Belief::Dead) => "×",
        Cell::Thing(shows) => shows,
    }
}
