//! The pages for people: what they link to is there, the tests that they name are tests, and each page in
//! Chinese has the form of the English one.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

mod sources;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The pages that are in Chinese as well.
const PAIRS: [(&str, &str); 4] = [
    ("README.md", "docs/zh/README.md"),
    ("docs/choosing.md", "docs/zh/choosing.md"),
    ("docs/failures.md", "docs/zh/failures.md"),
    ("docs/recipes.md", "docs/zh/recipes.md"),
];

/// What stands between two headings.
#[derive(Default)]
struct Section {
    /// How deep its heading is; 0 for what stands above the first.
    level: usize,
    title: String,
    /// Code in lines of text, each once.
    code: BTreeSet<String>,
    links: Vec<Link>,
    /// Blocks of code, with the word that says of what language.
    blocks: Vec<String>,
    /// For each line of a table the number of its columns.
    rows: Vec<usize>,
}

struct Link {
    /// The last code of its text: `name` of [`name`](path).
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
        // Lines that belong together: code may go on in the next one.
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
                section.rows.push(line.replace("\\|", "").matches('|').count());
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

    /// What this link leads to, from the top of the repository; `None` for what is elsewhere.
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

    /// The names by which GitHub lets links lead to headings.
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

/// Takes code and links out of text.
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

/// All pages of the repository.
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
    let mut count = 0;
    for page in &pages {
        for (link, (path, anchor)) in page.links().filter_map(|l| Some((l, page.leads(l)?))) {
            let (from, target) = (&page.path, &link.target);
            assert!(Path::new(ROOT).join(&path).exists(), "{from}: {target} is not there");
            if let Some(anchor) = anchor.filter(|_| path.extension().is_some_and(|e| e == "md")) {
                let to = Page::read(path.to_str().unwrap());
                assert!(to.anchors().contains(&anchor), "{from}: {target}: no such heading");
            }
            count += 1;
        }
    }
    assert!(pages.len() > 20 && count > 200, "{count} links in {} pages", pages.len());
}

/// A link that is called `like_a_function` and leads to a source, leads to that test.
#[test]
fn every_test_that_is_linked_is_there() {
    let sources = sources::all();
    let mut count = 0;
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
            assert!(sources::runs(&sources, test), "{}: {test} is no test", page.path);
            count += 1;
        }
    }
    assert!(count > 100, "{count} tests");
}

fn is_function(name: &str) -> bool {
    name.contains('_') && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[test]
fn pages_in_chinese_have_the_form_of_the_english_ones() {
    for (english, chinese) in PAIRS {
        let (ours, theirs) = (Page::read(english), Page::read(chinese));
        let heads = |page: &Page| {
            page.sections.iter().map(|s| (s.level, s.blocks.clone())).collect::<Vec<_>>()
        };
        for (i, (one, other)) in ours.sections.iter().zip(&theirs.sections).enumerate() {
            let at = format!("{chinese}, heading {i}, {:?} for {:?}", other.title, one.title);
            assert_eq!(one.level, other.level, "{at}: the depth");
            assert_eq!(one.blocks, other.blocks, "{at}: blocks of code");
            assert_eq!(one.rows, other.rows, "{at}: lines of tables and their columns");
            assert_eq!(one.code, other.code, "{at}: code in the text");
            assert_eq!(leads(&ours, one), leads(&theirs, other), "{at}: links");
        }
        assert_eq!(heads(&ours).len(), heads(&theirs).len(), "{chinese}: headings");
        // Either says first thing where the other is.
        for (from, to) in [(&ours, chinese), (&theirs, english)] {
            let first = from.sections[..2].iter().flat_map(|section| &section.links).next();
            let first = first.and_then(|link| from.leads(link)).map(|(path, _)| path);
            assert_eq!(first.as_deref(), Some(Path::new(to)), "the first link of {}", from.path);
        }
    }
    let known: BTreeSet<_> = PAIRS.iter().map(|pair| pair.1.to_owned()).collect();
    let all = pages().into_iter().map(|page| page.path).filter(|path| path.starts_with("docs/zh/"));
    assert_eq!(all.collect::<BTreeSet<_>>(), known, "pages in Chinese that are compared with none");
}

/// Where a section's links lead, in one language or the other. Which heading is not compared: it has
/// another name there.
fn leads(page: &Page, section: &Section) -> BTreeSet<String> {
    let leads = section.links.iter().map(|link| match page.leads(link) {
        None => link.target.clone(),
        Some((path, _)) => {
            let path = path.to_str().unwrap();
            let pair = PAIRS.iter().find(|pair| pair.0 == path || pair.1 == path);
            // The pages of a pair link to each other, and to other pages as they are written.
            pair.map_or(path, |pair| pair.0).to_owned()
        }
    });
    leads.collect()
}

/// So short that it is read.
#[test]
fn the_readme_is_under_200_lines() {
    for page in [PAIRS[0].0, PAIRS[0].1] {
        let text = std::fs::read_to_string(format!("{ROOT}/{page}")).unwrap();
        assert!(text.lines().count() < 200, "{page}: {} lines", text.lines().count());
    }
}
