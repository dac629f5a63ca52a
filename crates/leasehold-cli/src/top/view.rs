//! Draws a state. Nothing here polls or changes anything.
//!
//! From top to bottom there are the title, the table, important messages and the keys. Text from
//! other users is escaped before the layout. The layout uses the width of the text on a terminal.
//! All information is in the text, and colors only repeat it. The selected row has a marker of its
//! own.

use std::time::Duration;

use leasehold::Kind;
use leasehold::store::{ClaimState, LockInfo};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Widget, Wrap};

use super::colours::Colours;
use super::fitted::fitted;
use super::state::{At, HELP, Over, Question, Sort, State, longest_hold, oldest_wait};
use crate::list::{CLAIM, by, kind, row};
use crate::table::{clean, cut, short};

/// How long an answer may be overdue before the data is marked as stale.
const LATE: Duration = Duration::from_secs(2);
/// The headings of the table of locks.
const LOCK: [&str; 7] =
    ["NAME", "KIND", "HELD", "WAITING", "LONGEST HOLD", "LONGEST WAIT", "HELD BY"];
/// The markers of a selected and of an unselected row.
const SIGNS: [&str; 2] = ["> ", "  "];

/// Draws the state into all of `area`. `age` is the time since the last answer of the store.
pub(crate) fn draw(
    state: &State,
    age: Option<Duration>,
    colours: Colours,
    area: Rect,
    to: &mut Buffer,
) {
    let bottom = bottom(state, age, colours, area);
    let [head, body, foot] = parts(area, bottom.len());
    Line::styled(cut(&title(state), area.width.into()), Modifier::BOLD).render(head, to);
    match &state.over {
        Over::Help(line) => help(*line, body, to),
        Over::Question(asked) => question(asked, colours, body, to),
        Over::Nothing | Over::Filter => table(state, colours, body, to),
    }
    Text::from(bottom).render(foot, to);
}

/// Returns how many rows of a table are visible.
pub(crate) fn page(state: &State, age: Option<Duration>, area: Rect) -> usize {
    let bottom = bottom(state, age, Colours(false), area);
    let [_, body, _] = parts(area, bottom.len());
    body.height.saturating_sub(1).into()
}

fn parts(area: Rect, bottom: usize) -> [Rect; 3] {
    let foot = u16::try_from(bottom).unwrap_or(u16::MAX).min(area.height);
    let head = 1.min(area.height - foot);
    let line = |y, height| Rect { y: area.y + y, height, ..area };
    let body = area.height - foot - head;
    [line(0, head), line(head, body), line(head + body, foot)]
}

fn title(state: &State) -> String {
    let State { store, prefix, .. } = state;
    if let At::Queue(name) = &state.at {
        let kind = state.queue().map_or("free".to_owned(), kind);
        return format!("{} ({kind})  {store}", clean(name));
    }
    let all = state.all();
    let [held, waiting] = [ClaimState::Holding, ClaimState::Waiting].map(|claim_state| {
        all.iter().flat_map(|lock| &lock.claims).filter(|c| c.state == claim_state).count()
    });
    let by = match state.sort {
        Sort::LongestHold => "longest hold first",
        Sort::OldestWait => "longest wait first",
    };
    let mut title = format!("{} locks: {held} held, {waiting} waiting; {by}", all.len());
    if !state.filter.is_empty() {
        title.push_str(&format!("; filter {}", clean(&state.filter)));
    }
    title.push_str(&format!("  {store}"));
    if !prefix.is_empty() {
        title.push_str(&format!("  {prefix}…"));
    }
    title
}

/// Returns the important messages and the keys. If the terminal has too few lines, the first ones
/// take precedence.
fn bottom(
    state: &State,
    age: Option<Duration>,
    colours: Colours,
    area: Rect,
) -> Vec<Line<'static>> {
    let line = |text: &str, style: Style| Line::styled(cut(text, area.width.into()), style);
    let alarm = colours.of_text(Color::Red).add_modifier(Modifier::BOLD);
    let mut lines = Vec::new();
    if state.over == Over::Filter {
        lines.push(line(&format!("/{}_", clean(&state.filter)), Style::new()));
    }
    lines.extend(old(state, age).map(|text| line(&text, alarm)));
    lines.extend(state.status_line.iter().map(|words| line(words, Modifier::BOLD.into())));
    lines.push(line(keys(state), Style::new()));
    lines.truncate(area.height.saturating_sub(3).max(1).into());
    lines
}

/// Returns a message with the reason if the data is stale or missing.
fn old(state: &State, age: Option<Duration>) -> Option<String> {
    let why = state.away.as_deref();
    let Some(age) = age else { return why.map(|why| format!("no answer yet: {why}")) };
    match why {
        Some(why) => Some(format!("STALE, from {} ago: {why}", short(age))),
        None if age > state.every + LATE => {
            Some(format!("STALE, from {} ago: the store has not answered", short(age)))
        }
        None => None,
    }
}

fn keys(state: &State) -> &'static str {
    match (&state.over, &state.at) {
        (Over::Filter, _) => "Enter apply  Esc clear",
        (Over::Help(_), _) => "j k scroll  any other key: back",
        (Over::Question(_), _) => "y evict  n cancel",
        (Over::Nothing, At::Locks) => "q quit  ? help  Enter queue  s sort  / filter",
        (Over::Nothing, At::Queue(_)) => "q back  ? help  e evict",
    }
}

fn help(line: usize, area: Rect, to: &mut Buffer) {
    Text::from_iter(HELP.iter().skip(line).map(|text| Line::raw(*text))).render(area, to);
}

fn question(question: &Question, colours: Colours, area: Rect, to: &mut Buffer) {
    let Question { victim, who, holds } = question;
    let means = match holds {
        true => {
            "The holder may still be working, and is notified only after the next one has the lock. Check \
             fencing tokens at the resource to be safe."
        }
        false => "This ends the cooldown: the next client gets the lock early.",
    };
    let first = format!("Evict token {}? y/n", victim.token);
    let alarm = colours.of_text(Color::Red).add_modifier(Modifier::BOLD);
    let text = vec![
        Line::styled(first, alarm),
        Line::raw(format!("{}: {who}", clean(&victim.name))),
        Line::raw(means),
    ];
    Paragraph::new(text).wrap(Wrap { trim: true }).render(area, to);
}

/// The rows of a table with their colors.
type Rows = Vec<(Vec<String>, Option<Color>)>;

fn table(state: &State, colours: Colours, area: Rect, to: &mut Buffer) {
    let (rows, nothing): (Rows, _) = match (&state.at, state.queue()) {
        (At::Locks, _) => {
            let rows = state.shown().into_iter().map(|lock| (cells(lock), colour(lock)));
            (rows.collect(), "no locks in use")
        }
        (At::Queue(_), Some(lock)) => (claims(lock), lock.unreadable.as_deref().unwrap_or("")),
        (At::Queue(_), None) => (Vec::new(), "free: no holder, no waiter"),
    };
    if rows.is_empty() {
        let text = match state.has_picture() {
            true if state.all().is_empty() || matches!(state.at, At::Queue(_)) => clean(nothing),
            true => "no lock matches the filter".to_owned(),
            false => "loading …".to_owned(),
        };
        return Paragraph::new(text).wrap(Wrap { trim: true }).render(area, to);
    }
    let heading = if state.at == At::Locks { LOCK } else { CLAIM };
    let seen = usize::from(area.height.saturating_sub(1));
    let from = first_seen(state.index(), rows.len(), seen);
    let mut text = vec![heading.map(str::to_owned).to_vec()];
    let shown = rows.iter().skip(from).take(seen);
    text.extend(shown.clone().map(|(cells, _)| cells.clone()));
    let width = usize::from(area.width).saturating_sub(SIGNS[0].len());
    let lines = fitted(&text, width);
    let styles = shown.map(|(_, colour)| colour.map_or(Style::new(), |c| colours.of_text(c)));
    let styles = std::iter::once(Modifier::BOLD.into()).chain(styles);
    let drawn = lines.iter().zip(styles).enumerate().map(|(n, (line, style))| {
        // The first line is the heading.
        let chosen = n > 0 && n - 1 + from == state.index();
        let sign = SIGNS[usize::from(!chosen)];
        let style = if chosen { style.add_modifier(Modifier::REVERSED) } else { style };
        Line::styled(cut(&format!("{sign}{line}"), area.width.into()), style)
    });
    Text::from_iter(drawn).render(area, to);
}

/// Returns the first visible row. The selected row is in the middle if possible.
fn first_seen(index: usize, rows: usize, seen: usize) -> usize {
    index.saturating_sub(seen / 2).min(rows.saturating_sub(seen))
}

fn claims(lock: &LockInfo) -> Rows {
    let of = |claim_state| match claim_state {
        ClaimState::Holding => Color::Green,
        ClaimState::Waiting => Color::Yellow,
        ClaimState::Cooldown => Color::Magenta,
    };
    lock.claims.iter().map(|claim| (row(lock, claim), Some(of(claim.state)))).collect()
}

fn colour(lock: &LockInfo) -> Option<Color> {
    let waited_for = lock.waiters().next().map(|_| Color::Yellow);
    lock.unreadable.as_ref().map(|_| Color::Red).or(waited_for)
}

/// Returns the cells of one lock's row.
fn cells(lock: &LockInfo) -> Vec<String> {
    let none = || "-".to_owned();
    let name = clean(lock.name.as_str());
    if let Some(why) = &lock.unreadable {
        let unknown = [none(), none(), none(), none()];
        let known = [name, "UNREADABLE".to_owned()];
        return known.into_iter().chain(unknown).chain([clean(why)]).collect();
    }
    vec![
        name,
        kind(lock),
        held(lock),
        lock.waiters().count().to_string(),
        longest_hold(lock).map_or_else(none, short),
        oldest_wait(lock).map_or_else(none, short),
        by(lock),
    ]
}

/// Returns how much of the lock is held.
fn held(lock: &LockInfo) -> String {
    let taken: u64 = lock.holders().map(|claim| u64::from(claim.weight)).sum();
    match lock.kind {
        Kind::RwLock if lock.holders().any(|claim| claim.weight != 1) => "to write".to_owned(),
        Kind::RwLock => format!("{} read", lock.holders().count()),
        _ => format!("{taken}/{}", lock.capacity),
    }
}

#[cfg(test)]
mod tests {
    use leasehold::store::ClaimInfo;
    use leasehold::{Holder, Name, Token};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::keys::Key;
    use super::*;

    const EVIL: &str = "a\x1b]0;x\x07\u{9b}31m\u{202e}b";
    const NOW: Option<Duration> = Some(Duration::ZERO);

    fn claim(claim_state: ClaimState, token: u64, since: u64, label: &str) -> ClaimInfo {
        let holder = Holder { host: "web-1".into(), pid: 7, label: label.into() };
        let left = Some(Duration::from_secs(9));
        ClaimInfo::new(claim_state, holder, Token::new(token), 1, Duration::from_secs(since), left)
    }

    fn lock(name: &str, claims: Vec<ClaimInfo>) -> LockInfo {
        LockInfo::new(Name::new(name).unwrap(), Kind::Mutex, 1, claims)
    }

    fn busy(name: &str, label: &str) -> LockInfo {
        let holds = claim(ClaimState::Holding, 42, 75, label);
        let mut waits = claim(ClaimState::Waiting, 43, 60, "");
        waits.holder.pid = 8;
        lock(name, vec![holds, waits])
    }

    fn state(locks: Vec<LockInfo>) -> State {
        let mut state = State::new("file:/x", "", Duration::from_secs(1));
        state.see(locks);
        state
    }

    /// Returns the drawn characters with their styles.
    fn drawn(state: &State, age: Option<Duration>, colours: bool, size: (u16, u16)) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
        let drawn = |frame: &mut ratatui::Frame<'_>| {
            draw(state, age, Colours(colours), frame.area(), frame.buffer_mut());
        };
        terminal.draw(drawn).unwrap();
        terminal.backend().buffer().clone()
    }

    fn lines(buffer: &Buffer) -> Vec<String> {
        let width = usize::from(buffer.area.width).max(1);
        let line = |cells: &[ratatui::buffer::Cell]| {
            let text: String = cells.iter().map(|cell| cell.symbol()).collect();
            text.trim_end().to_owned()
        };
        buffer.content.chunks(width).map(line).collect()
    }

    fn seen(state: &State, size: (u16, u16)) -> Vec<String> {
        lines(&drawn(state, NOW, false, size))
    }

    fn press(state: &mut State, keys: &str) {
        for c in keys.chars() {
            state.press(if c == '\n' { Key::Enter } else { Key::Char(c) }, 3);
        }
    }

    #[test]
    fn table_shows_holders_waiters_and_durations() {
        let closed = claim(ClaimState::Cooldown, 1, 5, "frozen: moved");
        let mut state = state(vec![lock("deploy", vec![closed]), busy("x y", "nightly")]);
        assert_eq!(
            seen(&state, (100, 6)),
            [
                "2 locks: 1 held, 1 waiting; longest hold first  file:/x",
                "  NAME    KIND   HELD  WAITING  LONGEST HOLD  LONGEST WAIT  HELD BY",
                "> x y     mutex  1/1   1        1m 15s        1m 0s         web-1 pid 7 (nightly)",
                "  deploy  mutex  0/1   0        -             -             frozen for 9s more by web-1: moved",
                "",
                "q quit  ? help  Enter queue  s sort  / filter",
            ]
        );
        press(&mut state, "s/moved\n");
        let title = &seen(&state, (100, 6))[0];
        assert_eq!(title, "2 locks: 1 held, 1 waiting; longest wait first; filter moved  file:/x");
    }

    #[test]
    fn queue_view_matches_the_output_of_show() {
        let mut state = state(vec![busy("x y", "nightly")]);
        press(&mut state, "\nj");
        assert_eq!(
            seen(&state, (80, 5)),
            [
                "x y (mutex)  file:/x",
                "  STATE    HOST   PID  LABEL    TOKEN  SINCE   REMAINING",
                "  held     web-1  7    nightly  42     1m 15s  9s",
                "> waiting  web-1  8    -        43     1m 0s   9s",
                "q back  ? help  e evict",
            ]
        );
        state.see(Vec::new());
        let text = seen(&state, (80, 5)).join("\n");
        assert!(text.contains("x y (free)") && text.contains("free: no holder"), "{text}");
    }

    #[test]
    fn eviction_prompt_names_the_holder_and_the_risk() {
        let mut state = state(vec![busy("x", "nightly")]);
        press(&mut state, "\ne");
        let text = seen(&state, (60, 10)).join(" ");
        for part in [
            "Evict token 42? y/n",
            "x: held by web-1 pid 7 (nightly) for 1m 15s",
            "may still be working",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        // The question must be visible even on the smallest terminal.
        assert!(seen(&state, (20, 5)).contains(&"Evict token 42? y/n".to_owned()));
    }

    #[test]
    fn stale_view_is_marked_with_its_age() {
        let mut state = state(vec![busy("x", "")]);
        let footer = |state: &State, age: u64| {
            lines(&drawn(state, Some(Duration::from_secs(age)), false, (60, 6))).join("\n")
        };
        assert!(!footer(&state, 3).contains("STALE, from"));
        // The previous request has not been answered yet.
        assert!(footer(&state, 4).contains("STALE, from 4s ago"));
        state.miss("cannot reach it");
        let text = footer(&state, 1);
        assert!(
            text.contains("STALE, from 1s ago: cannot reach it") && text.contains("> x"),
            "{text}"
        );
        let mut empty = State::new("file:", "", Duration::from_secs(1));
        empty.miss("cannot reach it");
        let text = lines(&drawn(&empty, None, false, (60, 6))).join("\n");
        assert!(text.contains("no answer yet: cannot reach it"), "{text}");
    }

    // S90
    #[test]
    fn control_characters_from_other_clients_are_escaped() {
        let mut torn = LockInfo::unreadable(Name::new("torn").unwrap(), EVIL);
        torn.claims.clear();
        let mut state = state(vec![busy("a\u{202e}b", EVIL), torn]);
        state.see(state.all().to_vec());
        state.miss(EVIL);
        for keys in ["", "/\u{202e}", "\n\n", "e"] {
            press(&mut state, keys);
            let text = lines(&drawn(&state, NOW, true, (200, 20))).join("");
            let raw = |c: char| c.is_control() || c == '\u{202e}';
            assert!(!text.contains(raw), "{keys:?}: {text:?}");
            assert!(text.contains("\\u{1b}]0;x"), "{keys:?}: {text:?}");
        }
    }

    #[test]
    fn wide_characters_keep_columns_aligned() {
        let state = state(vec![busy("漢字", "x"), busy("abcd", "y")]);
        let buffer = drawn(&state, NOW, false, (80, 6));
        for y in [2, 3] {
            let kind: String = (8..13).map(|x| buffer[(x, y)].symbol()).collect();
            assert_eq!(kind, "mutex", "{:?}", lines(&buffer));
        }
    }

    /// Returns all kinds of screens, each with the keys that lead to it already pressed.
    fn everything() -> Vec<State> {
        let many = (0..30).map(|n| busy(&format!("漢字漢字-{n}"), &"é漢".repeat(n)));
        let torn = LockInfo::unreadable(Name::new("torn").unwrap(), "written by halves");
        let many = state(many.chain([torn]).collect());
        let mut all = vec![State::new("file:", "漢", Duration::from_secs(1)), state(Vec::new())];
        for keys in [
            "",
            "jjj",
            "?",
            "?jjjjjjjjjjjjjjjjjjjj",
            "/漢",
            "/none\n",
            "\n",
            "\nj",
            "\ne",
            "\nen",
            "\ney",
        ] {
            let mut one = many.clone();
            press(&mut one, keys);
            let mut old = one.clone();
            old.miss("cannot reach 漢字 or anything else that has a long name");
            all.extend([one, old]);
        }
        all
    }

    #[test]
    fn view_is_drawn_at_any_size() {
        for state in everything() {
            for size in (0..24).flat_map(|width| (0..9).map(move |height| (width, height))) {
                let lines = seen(&state, size);
                let area = Rect::new(0, 0, size.0, size.1);
                assert!(page(&state, NOW, area) <= usize::from(size.1));
                assert_eq!(lines.len(), if size.0 == 0 { 0 } else { size.1.into() });
            }
            assert_ne!(seen(&state, (20, 5)).join(""), "");
        }
    }

    #[test]
    fn selected_line_is_always_visible() {
        let many = (0..30).map(|n| busy(&format!("lock-{n:02}"), "")).collect();
        let mut state = state(many);
        for n in 0..30 {
            let lines = seen(&state, (20, 6));
            assert!(lines.iter().any(|l| l.starts_with(&format!("> lock-{n:02}"))), "{lines:?}");
            press(&mut state, "j");
        }
    }

    #[test]
    fn no_information_is_conveyed_by_color_alone() {
        let mut coloured = 0;
        for state in everything() {
            let [without, with] = [false, true].map(|c| drawn(&state, NOW, c, (80, 12)));
            assert_eq!(lines(&without), lines(&with));
            let has_colour =
                |cell: &&ratatui::buffer::Cell| (cell.fg, cell.bg) != Default::default();
            assert_eq!(without.content.iter().filter(has_colour).count(), 0);
            coloured += with.content.iter().filter(has_colour).count();
        }
        assert!(coloured > 0);
    }
}
