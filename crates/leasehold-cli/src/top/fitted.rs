//! Tables that fit into a terminal.

use unicode_width::UnicodeWidthStr;

use crate::table::{aligned, cut};

/// Aligns the rows like [`aligned`], in at most `columns` columns of the terminal. The widest cells
/// are cut first. If even narrow cells do not fit, the last ones are not shown.
pub(crate) fn fitted(rows: &[Vec<String>], columns: usize) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |i: usize| rows.iter().filter_map(|r| r.get(i)).map(|c| c.width()).max();
    let mut widths: Vec<usize> = (0..count).map(|i| widest(i).unwrap_or(0)).collect();
    let gaps = 2 * count.saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > columns {
        let Some(widest) = widths.iter_mut().max().filter(|w| **w > NARROW) else { break };
        *widest -= 1;
    }
    let cells = |row: &Vec<String>| row.iter().zip(&widths).map(|(c, &w)| ended(c, w)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    aligned(&rows).lines().map(|line| cut(line, columns)).collect()
}

/// Minimum width to which a column is cut.
const NARROW: usize = 8;

/// Returns as much of the text as fits, with an ellipsis if something was cut.
fn ended(text: &str, columns: usize) -> String {
    match text.width() > columns {
        true => cut(text, columns.saturating_sub(1)) + "…",
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widest_column_is_shortened_first() {
        let row = |cells: &[&str]| cells.iter().map(|&c| c.to_owned()).collect::<Vec<_>>();
        let rows =
            [row(&["NAME", "N", "BY"]), row(&["漢字漢字漢字", "7", "a host with a long name"])];
        let wide = fitted(&rows, 80);
        assert_eq!(wide, aligned(&rows).lines().collect::<Vec<_>>());
        assert_eq!(fitted(&rows, 26)[1], "漢字漢字漢…  7  a host wi…".to_owned());
        for columns in 0..40 {
            let lines = fitted(&rows, columns);
            assert!(lines.iter().all(|line| line.width() <= columns), "{columns}: {lines:?}");
        }
        assert!(fitted(&[], 10).is_empty());
    }
}
