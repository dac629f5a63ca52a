//! Finds which source file of a package takes names from which other.
//!
//! Every path that begins in the package (`crate::`, `super::`, `self::`, a module of the file's
//! own) is followed to the file that defines the name, through re-exports. Code that only tests use
//! is left out. Names inside macro definitions are left out as well, because they belong to the
//! macro's caller.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Group, TokenStream, TokenTree};
use syn::{Attribute, Item, UseTree, Visibility};

/// The path of a module within its package. Empty for the root.
type Module = Vec<String>;

#[derive(Default)]
struct File {
    at: PathBuf,
    /// The paths that it uses, relative to the package root.
    takes: BTreeSet<Module>,
    /// The names that it re-exports from elsewhere, by their names here.
    passes_on: BTreeMap<String, Module>,
    /// Modules all of whose names are re-exported.
    passes_on_all: Vec<Module>,
}

pub(crate) struct Package {
    files: BTreeMap<Module, File>,
}

/// The names that each file takes from each other file.
type Edges = BTreeMap<Module, BTreeMap<Module, BTreeSet<String>>>;

impl Package {
    /// Reads the files under `src` in this directory.
    pub(crate) fn read(directory: &Path) -> Self {
        let mut files = BTreeMap::new();
        for root in ["src/lib.rs", "src/main.rs"] {
            let root = directory.join(root);
            if root.exists() {
                read(&mut files, Vec::new(), root);
            }
        }
        assert!(!files.is_empty(), "no source in {}", directory.display());
        Self { files }
    }

    /// Returns each import: the importing file, the other file, and the names.
    pub(crate) fn imports(&self) -> Vec<(PathBuf, PathBuf, String)> {
        let path = |module: &Module| self.files[module].at.clone();
        let edges = self.edges();
        let flat = edges.iter().flat_map(|(from, tos)| {
            tos.iter().map(move |(to, names)| {
                (path(from), path(to), names.iter().cloned().collect::<Vec<_>>().join(", "))
            })
        });
        flat.collect()
    }

    /// Returns the cycles, in which each file takes names from the next, and the last one from the
    /// first.
    pub(crate) fn circles(&self) -> Vec<String> {
        let edges = self.edges();
        let reached: BTreeMap<_, _> =
            self.files.keys().map(|module| (module, reachable(&edges, module))).collect();
        let mut reported = BTreeSet::new();
        let mut circles = Vec::new();
        for module in self.files.keys().filter(|module| reached[module].contains(*module)) {
            if !reported.insert(module) {
                continue;
            }
            let circle: BTreeSet<_> =
                reached[module].iter().filter(|other| reached[other].contains(module)).collect();
            reported.extend(circle.iter().copied());
            let lines = circle.iter().flat_map(|from| {
                let tos = edges[*from].iter().filter(|(to, _)| circle.contains(to));
                tos.map(|(to, names)| {
                    format!("{} takes {names:?} from {}", self.name(from), self.name(to))
                })
            });
            circles.push(lines.collect::<Vec<_>>().join("\n    "));
        }
        circles
    }

    fn name(&self, module: &Module) -> String {
        let path = self.files[module].at.to_string_lossy().into_owned();
        path.rsplit_once("/src/").map_or(path.clone(), |(_, rest)| rest.to_owned())
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (module, file) in &self.files {
            let tos = edges.entry(module.clone()).or_default();
            for path in &file.takes {
                let (home, name) = self.home(path, 0);
                if home != *module {
                    tos.entry(home).or_default().insert(name);
                }
            }
        }
        edges
    }

    /// Returns the file that defines the name of this path, and the name.
    fn home(&self, path: &[String], depth: usize) -> (Module, String) {
        let modules = (0..=path.len()).rev().find(|n| self.files.contains_key(&path[..*n]));
        let (module, rest) = path.split_at(modules.unwrap_or(0));
        let here = (module.to_vec(), rest.first().cloned().unwrap_or_else(|| "*".to_owned()));
        let Some(name) = rest.first().filter(|_| depth < 8) else { return here };
        let file = &self.files[module];
        if let Some(further) = file.passes_on.get(name) {
            let further: Vec<_> = further.iter().chain(&rest[1..]).cloned().collect();
            if further != path {
                return self.home(&further, depth + 1);
            }
        }
        for all in &file.passes_on_all {
            let further: Vec<_> = all.iter().chain(rest).cloned().collect();
            let (home, found) = self.home(&further, depth + 1);
            if self.defines(&home, &found) {
                return (home, found);
            }
        }
        here
    }

    fn defines(&self, module: &Module, name: &str) -> bool {
        let text = fs::read_to_string(&self.files[module].at).expect("the file cannot be read");
        ["fn", "struct", "enum", "trait", "type", "const", "static", "mod"]
            .iter()
            .any(|kind| text.contains(&format!("{kind} {name}")))
    }
}

fn reachable(edges: &Edges, from: &Module) -> BTreeSet<Module> {
    let mut found = BTreeSet::new();
    let mut open: Vec<_> = edges[from].keys().collect();
    while let Some(module) = open.pop() {
        if found.insert(module.clone()) {
            open.extend(edges[module].keys());
        }
    }
    found
}

fn read(files: &mut BTreeMap<Module, File>, module: Module, at: PathBuf) {
    let text = fs::read_to_string(&at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
    let mut reader = Reader { file: File { at, ..File::default() }, children: Vec::new() };
    reader.items(&parsed.items, &module);
    let Reader { file, children } = reader;
    for (child, explicit) in children {
        let at = explicit
            .map_or_else(|| beside(&file.at, &module, &child), |to| file.at.with_file_name(to));
        let path = module.iter().cloned().chain([child]).collect();
        read(files, path, at);
    }
    files.insert(module, file);
}

/// Returns the path of a module's file that this file declares.
fn beside(at: &Path, module: &Module, child: &str) -> PathBuf {
    let is_root = module.is_empty() || at.ends_with("mod.rs");
    let folder =
        if is_root { at.parent().expect("a file").to_owned() } else { at.with_extension("") };
    let plain = folder.join(child).with_extension("rs");
    if plain.exists() { plain } else { folder.join(child).join("mod.rs") }
}

struct Reader {
    file: File,
    /// The modules that it declares in files of their own, and the file's path if it is given.
    children: Vec<(String, Option<String>)>,
}

impl Reader {
    fn items(&mut self, items: &[Item], module: &Module) {
        let own: Vec<_> = items
            .iter()
            .filter_map(|item| match item {
                Item::Mod(inner) if !only_for_tests(&inner.attrs) => Some(inner.ident.to_string()),
                _ => None,
            })
            .collect();
        for item in items {
            match item {
                Item::Mod(inner) if only_for_tests(&inner.attrs) => {}
                Item::Mod(inner) => match &inner.content {
                    // A module within the file belongs to the file, so its `super` is this file.
                    Some((_, items)) => self.items(items, module),
                    None => self.children.push((inner.ident.to_string(), says_where(&inner.attrs))),
                },
                Item::Use(used) if !only_for_tests(&used.attrs) => {
                    let public = !matches!(used.vis, Visibility::Inherited);
                    self.used(&used.tree, &mut Vec::new(), module, &own, public);
                }
                Item::Macro(definition) if definition.ident.is_some() => {}
                Item::Fn(item) if only_for_tests(&item.attrs) => {}
                Item::Impl(item) if only_for_tests(&item.attrs) => {}
                other => self.tokens(quote::ToTokens::to_token_stream(other), module, &own),
            }
        }
    }

    fn used(
        &mut self,
        tree: &UseTree,
        path: &mut Vec<String>,
        module: &Module,
        own: &[String],
        public: bool,
    ) {
        match tree {
            UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.used(&step.tree, path, module, own, public);
                path.pop();
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.used(tree, path, module, own, public);
                }
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                let step = (name != "self").then_some(name.clone());
                let as_name = step.clone().or_else(|| path.last().cloned()).unwrap_or(name);
                path.extend(step.clone());
                self.takes(path, module, own, Some(as_name), public);
                if step.is_some() {
                    path.pop();
                }
            }
            UseTree::Rename(renamed) => {
                path.push(renamed.ident.to_string());
                self.takes(path, module, own, Some(renamed.rename.to_string()), public);
                path.pop();
            }
            UseTree::Glob(_) => {
                if let Some(path) = from_the_root(path, module, own) {
                    if public {
                        self.file.passes_on_all.push(path);
                    } else if path != *module {
                        self.file.takes.insert(path);
                    }
                }
            }
        }
    }

    fn takes(
        &mut self,
        path: &[String],
        module: &Module,
        own: &[String],
        name: Option<String>,
        public: bool,
    ) {
        let Some(path) = from_the_root(path, module, own) else { return };
        if let Some(name) = name {
            self.file.passes_on.insert(name, path.clone());
        }
        // A re-export alone does not use the name.
        if !public {
            self.file.takes.insert(path);
        }
    }

    /// Finds paths anywhere in code, including macro arguments.
    fn tokens(&mut self, tokens: TokenStream, module: &Module, own: &[String]) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        let tokens: Vec<_> = tokens.into_iter().collect();
        for token in tokens
            .iter()
            .chain([&TokenTree::Punct(proc_macro2::Punct::new(';', proc_macro2::Spacing::Alone))])
        {
            match token {
                TokenTree::Ident(name) if colons == 2 || path.is_empty() => {
                    if colons != 2 {
                        path.clear();
                    }
                    path.push(name.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(punct)
                    if punct.as_char() == ':' && !path.is_empty() && colons < 2 =>
                {
                    colons += 1;
                    continue;
                }
                _ => {}
            }
            if path.len() > 1 {
                self.takes(&path, module, own, None, false);
            }
            path.clear();
            colons = 0;
            match token {
                TokenTree::Ident(name) => path.push(name.to_string()),
                // `pub(in some::module)` does not use the module.
                TokenTree::Group(group) if is_visibility(group) => {}
                TokenTree::Group(group) => self.tokens(group.stream(), module, own),
                _ => {}
            }
        }
    }
}

/// Returns whether this group after `pub` begins with `in`.
fn is_visibility(group: &Group) -> bool {
    let first = group.stream().into_iter().next();
    matches!(first, Some(TokenTree::Ident(word)) if word == "in")
}

/// Returns the path relative to the package root, if it begins in the package.
fn from_the_root(path: &[String], module: &Module, own: &[String]) -> Option<Module> {
    let (first, mut rest) = path.split_first()?;
    let mut base = match first.as_str() {
        "crate" => Vec::new(),
        "self" => module.clone(),
        "super" => module.split_last().map(|(_, parent)| parent.to_vec())?,
        child if own.iter().any(|own| own == child) => {
            module.iter().cloned().chain([child.to_owned()]).collect()
        }
        _ => return None,
    };
    while rest.first().is_some_and(|step| step == "super") {
        base.pop();
        rest = &rest[1..];
    }
    base.extend(rest.iter().cloned());
    Some(base)
}

fn only_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = quote::ToTokens::to_token_stream(attribute).to_string();
        text.contains("cfg (test)") || text.contains("cfg (all (test")
    })
}

fn says_where(attributes: &[Attribute]) -> Option<String> {
    let path = attributes.iter().find(|attribute| attribute.path().is_ident("path"))?;
    let text = quote::ToTokens::to_token_stream(path).to_string();
    text.split('"').nth(1).map(ToOwned::to_owned)
}
