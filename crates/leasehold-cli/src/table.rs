//! Tables for people: aligned columns, without control characters that a terminal would interpret.

use std::time::Duration;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Returns the rows as lines. Each column is as wide as its widest cell.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |i: usize| rows.iter().filter_map(|r| r.get(i)).map(|c| c.width()).max();
    let widths: Vec<usize> = (0..columns).map(|i| widest(i).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width - cell.width() + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Escapes control and invisible characters in text from other users.
pub(crate) fn clean(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let harmless = matches!(c, '"' | '\'' | '\\');
            let escaped = (!harmless).then(|| c.escape_debug());
            escaped.into_iter().flatten().chain(harmless.then_some(c))
        })
        .collect()
}

/// Returns as much of the line as fits into `columns`.
pub(crate) fn cut(line: &str, columns: usize) -> String {
    let mut used = 0;
    let fits = |c: &char| {
        used += c.width().unwrap_or(0);
        used <= columns
    };
    line.chars().take_while(fits).collect()
}

/// Returns a lock's name as an argument of a shell command.
pub(crate) fn quoted(name: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:@%+=,".contains(c);
    if !name.is_empty() && name.chars().all(is_plain) {
        name.to_owned()
    } else {
        format!("'{}'", clean(&name.replace('\'', "'\\''")))
    }
}

/// Returns a duration for people, with at most two units.
pub(crate) fn short(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0 => format!("{}ms", d.as_millis()),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m {}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d {}h", s / 86_400, s % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let row = |cells: &[&str]| cells.iter().map(|&c| c.to_owned()).collect::<Vec<_>>();
        let rows = [row(&["NAME", "HOST"]), row(&["漢字漢字", "a"]), row(&["x", "b"])];
        assert_eq!(aligned(&rows), "NAME      HOST\n漢字漢字  a\nx         b\n");
    }

    // S90
    #[test]
    fn control_characters_in_labels_are_escaped() {
        let evil = "a\x1b[2J\r\n\u{9b}31m\u{202e}\"b\\";
        let shown = clean(evil);
        assert!(!shown.chars().any(|c| c.is_control() || c == '\u{202e}'), "{shown}");
        assert!(shown.starts_with("a\\u{1b}[2J\\r\\n") && shown.ends_with("\"b\\"), "{shown}");
    }

    #[test]
    fn names_in_hints_can_be_pasted_into_a_shell() {
        assert_eq!(quoted("stock:a/1"), "stock:a/1");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }

    #[test]
    fn lines_are_cut_by_width() {
        assert_eq!(cut("漢字漢字", 5), "漢字");
        assert_eq!(cut("abc", 5), "abc");
    }
}
