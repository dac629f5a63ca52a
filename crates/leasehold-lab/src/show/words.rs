//! Texts that all output formats share, and line breaking.

use crate::scene::{Half, Mark};

/// Returns the heading of a half.
pub(super) fn heading(half: &Half) -> String {
    match half.is_naive {
        true => format!("Common recipe: {}", half.recipe),
        false => format!("With leasehold: {}", half.recipe),
    }
}

/// Warning next to a recipe, so that no reader copies it.
pub(super) const WARNING: &str = "Broken on purpose: do not copy.";

/// Returns the word before the verdict of a half.
pub(super) fn outcome(half: &Half) -> &'static str {
    if half.is_kept { "Works." } else { "Fails." }
}

/// Returns the sign before a marked step.
pub(super) fn sign(mark: Mark) -> &'static str {
    match mark {
        Mark::Plain => "",
        Mark::Bad => "✗ ",
        Mark::Good => "✓ ",
    }
}

/// Breaks text into lines of at most `width` characters, where its words allow.
pub(super) fn lines(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let length = lines[last].chars().count();
        if length > 0 && length + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            let space = if length > 0 { " " } else { "" };
            lines[last] += &format!("{space}{word}");
        }
    }
    lines
}

/// Escapes text for use between tags and in attributes.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_wraps_between_words_and_loses_none() {
        assert_eq!(lines("one two three", 7), ["one two", "three"]);
        assert_eq!(lines("unbreakable words", 3), ["unbreakable", "words"]);
        assert_eq!(lines("", 3), [""]);
    }

    #[test]
    fn server_output_is_escaped_in_html() {
        assert_eq!(escaped("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
