//! Texts that all ways of showing share, and how text is cut into lines.

use crate::scene::{Half, Mark};

/// What stands over a half.
pub(super) fn heading(half: &Half) -> String {
    match half.is_naive {
        true => format!("Common recipe: {}", half.recipe),
        false => format!("With leasehold: {}", half.recipe),
    }
}

/// What stands beside the recipe, so that nobody takes it along.
pub(super) const WARNING: &str = "Broken on purpose: do not copy.";

/// What stands before a half's last line.
pub(super) fn outcome(half: &Half) -> &'static str {
    if half.is_kept { "Works." } else { "Fails." }
}

/// What stands before a step that is more than a step.
pub(super) fn sign(mark: Mark) -> &'static str {
    match mark {
        Mark::Plain => "",
        Mark::Bad => "✗ ",
        Mark::Good => "✓ ",
    }
}

/// Text in lines of so many letters at most, where its words allow.
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

/// Text as it stands between tags, and in attributes.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_words_and_loses_none() {
        assert_eq!(lines("one two three", 7), ["one two", "three"]);
        assert_eq!(lines("unbreakable words", 3), ["unbreakable", "words"]);
        assert_eq!(lines("", 3), [""]);
    }

    #[test]
    fn nothing_that_a_server_says_becomes_a_tag() {
        assert_eq!(escaped("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
