//! The colors of `leasehold top`. They only help the eye. The text alone contains all information.

use ratatui::style::{Color, Style};

/// Whether to use colors: the terminal supports them and the user has not disabled them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Colours(pub(crate) bool);

/// Prefixes of the names of terminals that support the color sequence used here (`38;5;N`). Other
/// terminals may show it as blinking text.
const COLOURED: [&str; 14] = [
    "xterm",
    "screen",
    "tmux",
    "rxvt",
    "linux",
    "alacritty",
    "foot",
    "kitty",
    "wezterm",
    "vte",
    "gnome",
    "konsole",
    "putty",
    "st-",
];

impl Colours {
    /// Decides from environment variables whether to use colors.
    pub(crate) fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let value_of = |name: &str| variable(name).filter(|text| !text.is_empty());
        let term = value_of("TERM").unwrap_or_default();
        let is_monochrome = ["dumb", "-mono", "-m"].iter().any(|end| term.ends_with(end));
        let is_known = COLOURED.iter().any(|start| term.starts_with(start))
            || term.contains("color")
            || value_of("COLORTERM").is_some();
        Self(value_of("NO_COLOR").is_none() && !is_monochrome && is_known)
    }

    /// Returns the style for text of this color.
    pub(crate) fn of_text(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colors_are_used_only_if_supported_and_not_disabled() {
        let of = |set: &[(&str, &str)]| {
            let find =
                |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
            Colours::of(find).0
        };
        assert!(of(&[("TERM", "xterm-256color")]));
        assert!(of(&[("TERM", "linux"), ("NO_COLOR", "")]));
        assert!(of(&[("TERM", "brand-new"), ("COLORTERM", "truecolor")]));
        assert!(!of(&[("TERM", "xterm-256color"), ("NO_COLOR", "1")]));
        assert!(!of(&[("TERM", "dumb"), ("COLORTERM", "truecolor")]));
        assert!(!of(&[("TERM", "xterm-mono")]));
        assert!(!of(&[("TERM", "vt220")]));
        assert!(!of(&[]));
        assert_eq!(Colours(false).of_text(Color::Red), Style::new());
    }
}
