//! What the documentation says of tests, looked up in the sources.

use std::path::Path;

/// All sources of the workspace's packages, one after the other.
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

/// Whether a function of this name is a test, or is named by what makes tests of it.
pub(crate) fn runs(sources: &str, test: &str) -> bool {
    let (defined, elsewhere): (Vec<usize>, Vec<usize>) =
        named(sources, test).into_iter().partition(|&at| sources[..at].ends_with("fn "));
    // The attribute is between the function and the end of what is before it.
    let is_marked = |&at: &usize| {
        let above = sources[..at].rsplit("\n\n").next().unwrap_or_default();
        above.contains("#[test]") || above.contains("::test")
    };
    // In a list of tests: a comment makes none of it, nor does a call.
    let is_listed = |&at: &usize| {
        let line = sources[..at].rsplit('\n').next().unwrap_or_default();
        let is_call = sources[at + test.len()..].starts_with('(');
        !is_call && !line.trim_start().starts_with("//") && !line.contains('"')
    };
    !defined.is_empty() && (defined.iter().any(is_marked) || elsewhere.iter().any(is_listed))
}

/// Where this word stands, and not a part of a longer one.
pub(crate) fn named(sources: &str, word: &str) -> Vec<usize> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let whole = |at: usize| {
        let (before, after) = (&sources[..at], &sources[at + word.len()..]);
        !before.ends_with(is_part) && !after.starts_with(is_part)
    };
    sources.match_indices(word).map(|(at, _)| at).filter(|&at| whole(at)).collect()
}
