//! Looks up the tests that the documentation names in the sources.

use std::path::Path;

/// Returns the concatenated sources of the workspace's packages.
pub(crate) fn all() -> String {
    let mut sources = String::new();
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    for one in std::fs::read_dir(crates).unwrap() {
        for part in ["src", "tests"] {
            read(&one.as_ref().unwrap().path().join(part), &mut sources);
        }
    }
    sources
}

fn read(directory: &Path, all: &mut String) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            read(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            *all += &std::fs::read_to_string(&path).unwrap();
        }
    }
}

/// Returns whether a function of this name is a test, or is listed in a macro that generates tests.
pub(crate) fn runs(sources: &str, test: &str) -> bool {
    let (defined, elsewhere): (Vec<usize>, Vec<usize>) =
        named(sources, test).into_iter().partition(|&at| sources[..at].ends_with("fn "));
    // The attribute is between the function and the end of the item before it.
    let is_marked = |&at: &usize| {
        let above = sources[..at].rsplit("\n\n").next().unwrap_or_default();
        above.contains("#[test]") || above.contains("::test")
    };
    // A name in a list of tests counts. A comment or a call does not.
    let is_listed = |&at: &usize| {
        let line = sources[..at].rsplit('\n').next().unwrap_or_default();
        let is_call = sources[at + test.len()..].starts_with('(');
        !is_call && !line.trim_start().starts_with("//") && !line.contains('"')
    };
    !defined.is_empty() && (defined.iter().any(is_marked) || elsewhere.iter().any(is_listed))
}

/// Returns the positions at which this word occurs as a whole word.
pub(crate) fn named(sources: &str, word: &str) -> Vec<usize> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let whole = |at: usize| {
        let (before, after) = (&sources[..at], &sources[at + word.len()..]);
        !before.ends_with(is_part) && !after.starts_with(is_part)
    };
    sources.match_indices(word).map(|(at, _)| at).filter(|&at| whole(at)).collect()
}
