//! Which colours there are. They only help the eye: whatever they tell is told in words as well.

use ratatui::style::{Color, Style};

/// Whether the terminal has colours, and its owner wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Colours(pub(crate) bool);

/// How the names of terminals begin that know the sequence by which colours are set here (`38;5;N`). One that
/// does not might blink.
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
    /// By what the environment says.
    pub(crate) fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let said = |name: &str| variable(name).filter(|text| !text.is_empty());
        let term = said("TERM").unwrap_or_default();
        let is_monochrome = ["dumb", "-mono", "-m"].iter().any(|end| term.ends_with(end));
        let is_known = COLOURED.iter().any(|start| term.starts_with(start))
            || term.contains("color")
            || said("COLORTERM").is_some();
        Self(said("NO_COLOR").is_none() && !is_monochrome && is_known)
    }

    /// Text of this colour.
    pub(crate) fn of_text(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_that_have_them_and_people_who_want_them() {
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
