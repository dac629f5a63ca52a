//! Checks the pages for users: all links are valid, linked tests exist, each Chinese page has the
//! structure of the English one, and the README is short.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

mod sources;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Each English page that has a Chinese translation, with that translation. To add a translation,
/// add a line. The test then compares headings, code and links.
const PAIRS: &[(&str, &str)] = &[
    ("README.md", "docs/zh/README.md"),
    ("docs/tutorial.md", "docs/zh/tutorial.md"),
    ("docs/guide/safety.md", "docs/zh/safety.md"),
    ("docs/guide/choosing-a-store.md", "docs/zh/choosing-a-store.md"),
    ("docs/guide/how-locks-fail.md", "docs/zh/how-locks-fail.md"),
    ("docs/guide/migrating/README.md", "docs/zh/migrating/README.md"),
    ("docs/guide/migrating/redis-setnx.md", "docs/zh/migrating/redis-setnx.md"),
    ("docs/guide/migrating/redisson.md", "docs/zh/migrating/redisson.md"),
    ("docs/guide/migrating/curator.md", "docs/zh/migrating/curator.md"),
    ("docs/guide/migrating/sql-row-locks.md", "docs/zh/migrating/sql-row-locks.md"),
    ("docs/guide/migrating/flock.md", "docs/zh/migrating/flock.md"),
    ("docs/guide/migrating/shedlock.md", "docs/zh/migrating/shedlock.md"),
    ("docs/guide/migrating/etcdctl.md", "docs/zh/migrating/etcdctl.md"),
];

/// Maximum number of words in the README, as `wc -w` counts them.
const README_WORDS: usize = 1_000;
/// Maximum number of words in a sentence of the README.
const SENTENCE_WORDS: usize = 25;

/// The contents between two headings.
#[derive(Default)]
struct Section {
    /// Level of its heading, or 0 for the contents above the first heading.
    level: usize,
    title: String,
    /// Inline code, without duplicates.
    code: BTreeSet<String>,
    links: Vec<Link>,
    /// Code blocks, each with its language.
    blocks: Vec<String>,
}

struct Link {
    /// The last inline code of its text, such as `name` of [`name`](path).
    code: Option<String>,
    target: String,
}

struct Page {
    path: String,
    sections: Vec<Section>,
}

impl Page {
    fn read(path: &str) -> Self {
        let text = std::fs::read_to_string(format!("{ROOT}/{path}"));
        let text = text.unwrap_or_else(|e| panic!("{path}: {e}"));
        let mut sections = vec![Section::default()];
        // The lines of a paragraph, because inline code may continue on the next line.
        let mut paragraph = String::new();
        let mut block: Option<String> = None;
        for line in text.lines() {
            let section = sections.last_mut().unwrap();
            let (is_fence, is_row) =
                (line.trim_start().starts_with("```"), line.trim_start().starts_with('|'));
            let level = level_of(line).filter(|_| block.is_none());
            if is_fence || is_row || level.is_some() || line.trim().is_empty() {
                read_paragraph(&std::mem::take(&mut paragraph), section);
            }
            if let Some(open) = &mut block {
                open.push_str(line);
                open.push('\n');
                if is_fence {
                    section.blocks.extend(block.take());
                }
            } else if is_fence {
                block = Some(format!("{line}\n"));
            } else if let Some(level) = level {
                let title = line[level..].trim().to_owned();
                let mut section = Section { level, title, ..Section::default() };
                read_paragraph(line, &mut section);
                sections.push(section);
            } else if is_row {
                read_paragraph(line, section);
            } else {
                paragraph.push_str(line);
                paragraph.push(' ');
            }
        }
        read_paragraph(&paragraph, sections.last_mut().unwrap());
        assert!(block.is_none(), "{path}: a block of code has no end");
        Self { path: path.to_owned(), sections }
    }

    fn links(&self) -> impl Iterator<Item = &Link> {
        self.sections.iter().flat_map(|section| &section.links)
    }

    /// Returns the target of this link, relative to the top of the repository. `None` for external
    /// links.
    fn leads(&self, link: &Link) -> Option<(PathBuf, Option<String>)> {
        if link.target.contains("://") || link.target.starts_with("mailto:") {
            return None;
        }
        let (path, anchor) = match link.target.split_once('#') {
            Some((path, anchor)) => (path, Some(anchor.to_owned())),
            None => (link.target.as_str(), None),
        };
        let here = Path::new(&self.path);
        if path.is_empty() {
            return Some((here.to_owned(), anchor));
        }
        let mut whole = PathBuf::new();
        for part in here.parent().unwrap().join(path).components() {
            match part {
                Component::ParentDir => assert!(whole.pop(), "{}: {path}", self.path),
                Component::CurDir => {}
                part => whole.push(part),
            }
        }
        Some((whole, anchor))
    }

    /// Returns the anchors that GitHub generates for headings.
    fn anchors(&self) -> BTreeSet<String> {
        let mut anchors = BTreeSet::new();
        for section in &self.sections {
            let plain = section.title.to_lowercase();
            let kept = plain.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            let anchor = kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>();
            let again = (1..).map(|n| format!("{anchor}-{n}"));
            let mut names = std::iter::once(anchor.clone()).chain(again);
            anchors.insert(names.find(|name| !anchors.contains(name)).unwrap());
        }
        anchors
    }
}

fn level_of(line: &str) -> Option<usize> {
    let level = line.chars().take_while(|&c| c == '#').count();
    ((1..=6).contains(&level) && line[level..].starts_with(' ')).then_some(level)
}

/// Extracts inline code and links from text.
fn read_paragraph(text: &str, section: &mut Section) {
    let mut rest = text;
    let mut last = None;
    while let Some(at) = rest.find(['`', ']', '[']) {
        let found = &rest[at..];
        if found.starts_with('`') {
            let fence = &found[..found.len() - found.trim_start_matches('`').len()];
            let code = found[fence.len()..].split_once(fence);
            let (code, after) = code.unwrap_or_else(|| panic!("code without an end: {text}"));
            let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
            section.code.insert(code.clone());
            last = Some(code);
            rest = after;
        } else if let Some(link) = found.strip_prefix("](") {
            let (target, after) = link.split_once(')').expect("a link without an end");
            section.links.push(Link { code: last.take(), target: target.to_owned() });
            rest = after;
        } else {
            last = None;
            rest = &found[1..];
        }
    }
}

/// Returns all pages of the repository.
fn pages() -> Vec<Page> {
    let mut pages = vec![Page::read("README.md"), Page::read("CHANGELOG.md")];
    let mut folders = ["docs", "clients", "examples"].map(PathBuf::from).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(Path::new(ROOT).join(&folder)).unwrap() {
            let name = entry.as_ref().unwrap().file_name();
            let path = folder.join(&name);
            let is_ours = !["node_modules", "target"].contains(&name.to_str().unwrap());
            if entry.unwrap().path().is_dir() {
                folders.extend(is_ours.then_some(path));
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(Page::read(path.to_str().unwrap()));
            }
        }
    }
    pages
}

#[test]
fn every_link_leads_somewhere() {
    let pages = pages();
    let (mut count, mut dead) = (0, Vec::new());
    for page in &pages {
        for (link, (path, anchor)) in page.links().filter_map(|l| Some((l, page.leads(l)?))) {
            let (from, target) = (&page.path, &link.target);
            if !Path::new(ROOT).join(&path).exists() {
                dead.push(format!("{from}: {target} does not exist"));
            } else if let Some(anchor) =
                anchor.filter(|_| path.extension().is_some_and(|e| e == "md"))
            {
                let to = Page::read(path.to_str().unwrap());
                if !to.anchors().contains(&anchor) {
                    dead.push(format!("{from}: {target} has no such heading"));
                }
            }
            count += 1;
        }
    }
    assert!(dead.is_empty(), "dead links:\n{}", dead.join("\n"));
    assert!(pages.len() > 20 && count > 200, "{count} links in {} pages", pages.len());
}

/// If a link is named like a function and leads to a source file, that file contains a test of that
/// name.
#[test]
fn every_linked_test_exists() {
    let sources = sources::all();
    for page in pages() {
        for link in page.links() {
            let Some((path, _)) = page.leads(link) else { continue };
            let is_source = path.extension().is_some_and(|extension| extension == "rs");
            let Some(test) = link.code.as_ref().filter(|name| is_source && is_function(name))
            else {
                continue;
            };
            let text = std::fs::read_to_string(Path::new(ROOT).join(&path)).unwrap();
            let places = sources::named(&text, test);
            let is_here = places.into_iter().any(|at| text[..at].ends_with("fn "));
            assert!(is_here, "{}: {} has no function {test}", page.path, path.display());
            assert!(sources::runs(&sources, test), "{}: {test} is not a test", page.path);
        }
    }
}

fn is_function(name: &str) -> bool {
    name.contains('_') && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[test]
fn chinese_pages_have_the_structure_of_the_english_ones() {
    for &(english, chinese) in PAIRS {
        let (ours, theirs) = (Page::read(english), Page::read(chinese));
        for (i, (one, other)) in ours.sections.iter().zip(&theirs.sections).enumerate() {
            let at = format!("{chinese}, heading {i}, {:?} for {:?}", other.title, one.title);
            assert_eq!(one.level, other.level, "{at}: the level");
            assert_eq!(one.commands(), other.commands(), "{at}: blocks of code");
            assert_eq!(one.code, other.code, "{at}: code in the text");
            assert_eq!(leads(&ours, one), leads(&theirs, other), "{at}: links");
        }
        assert_eq!(ours.sections.len(), theirs.sections.len(), "{chinese}: headings");
    }
    let chinese: BTreeSet<_> = PAIRS.iter().map(|pair| pair.1).collect();
    let all: Vec<String> = pages().into_iter().map(|page| page.path).collect();
    let there = all.iter().map(String::as_str).filter(|path| path.starts_with("docs/zh/"));
    assert_eq!(there.collect::<BTreeSet<_>>(), chinese, "docs/zh, and the lists in this file");
}

impl Section {
    /// Returns the code blocks without their comments, which are translated.
    fn commands(&self) -> Vec<String> {
        let without = |line: &str| {
            let ends = ["# ", "// "].iter().filter_map(|mark| line.find(mark));
            line[..ends.min().unwrap_or(line.len())].trim_end().to_owned()
        };
        let block = |block: &String| block.lines().map(without).collect::<Vec<_>>().join("\n");
        self.blocks.iter().map(block).collect()
    }
}

/// Returns where a section's links lead, in a form that is the same in both languages. Anchors are
/// not compared, because headings have other names in the translation.
fn leads(page: &Page, section: &Section) -> BTreeSet<String> {
    let leads = section.links.iter().map(|link| match page.leads(link) {
        None => link.target.clone(),
        Some((path, _)) => {
            let path = path.to_str().unwrap();
            let pair = PAIRS.iter().find(|pair| pair.0 == path || pair.1 == path);
            // The pages of a pair link to each other. Links to other pages are the same in both.
            pair.map_or(path, |pair| pair.0).to_owned()
        }
    });
    leads.collect()
}

/// The README is short enough to be read.
#[test]
fn the_readme_is_short() {
    let text = std::fs::read_to_string(format!("{ROOT}/README.md")).unwrap();
    let words = text.split_whitespace().count();
    assert!(words <= README_WORDS, "README.md has {words} words, more than {README_WORDS}");
    for sentence in sentences(&text) {
        let words = sentence
            .split_whitespace()
            .filter(|word| word.chars().any(char::is_alphanumeric))
            .count();
        assert!(
            words <= SENTENCE_WORDS,
            "README.md: {words} words, more than {SENTENCE_WORDS}: {sentence}"
        );
    }
}

/// Returns the sentences of the text, without headings, tables and code blocks.
fn sentences(text: &str) -> Vec<String> {
    let (mut paragraphs, mut is_code) = (vec![String::new()], false);
    for line in text.lines().map(str::trim_start) {
        is_code ^= line.starts_with("```");
        let ends =
            line.is_empty() || ["|", "#", "<", "```"].iter().any(|start| line.starts_with(start));
        if ends || line.starts_with("- ") {
            paragraphs.push(String::new());
        }
        if !ends && !is_code {
            let paragraph = paragraphs.last_mut().unwrap();
            paragraph.push_str(line);
            paragraph.push(' ');
        }
    }
    let marked =
        paragraphs.iter().map(|paragraph| paragraph.replace("**", "").replace(['?', '!'], "."));
    marked
        .flat_map(|paragraph| paragraph.split(". ").map(str::to_owned).collect::<Vec<_>>())
        .collect()
}
