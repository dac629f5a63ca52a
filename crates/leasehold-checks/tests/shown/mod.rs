//! Finds the public methods that no example shows, from the sources.
//!
//! An example shows a method if it is run, calls the method by its name, and is where a reader
//! looks for it. For a method, that is the documentation of the method, of another method of its
//! type, or of the type. For a function, it is the documentation of the function or of its file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quote::ToTokens as _;
use syn::{Attribute, Item, Visibility};

/// The packages whose functions programs call, without the parts that are for implementing stores.
const PACKAGES: [&str; 7] = [
    "leasehold",
    "leasehold-core",
    "leasehold-sql",
    "leasehold-transactions",
    "leasehold-http",
    "leasehold-redis/src/fence.rs",
    "leasehold-cell/src/objects/fence.rs",
];

/// Parts for authors of stores, and parts that only leasehold's own tests use.
const INSIDE: [&str; 10] = [
    "/kit",
    "/queue",
    "/store",
    "/drivers",
    "/world.rs",
    "/answer.rs",
    "/doctor.rs",
    "/bin/",
    "/wire.rs",
    "/codes.rs",
];

/// A method, a function or a type, with its documentation.
struct Documented {
    /// The type, or the file of a function.
    of: String,
    /// The name. `None` for a type itself.
    name: Option<String>,
    doc: String,
}

/// Returns `type::method` of all methods that no example shows.
pub(crate) fn missing() -> BTreeSet<String> {
    let all = documented();
    let mut examples = BTreeMap::<&str, String>::new();
    for one in &all {
        examples.entry(&one.of).or_default().push_str(&run_code(&one.doc));
    }
    let named = all.iter().filter_map(|one| Some((&one.of, one.name.as_deref()?)));
    let missing = named.filter(|(of, name)| !calls(&examples[of.as_str()], name));
    missing.map(|(of, name)| format!("{of}::{name}")).collect()
}

/// Returns how many methods and functions exist.
pub(crate) fn count() -> usize {
    documented().iter().filter(|one| one.name.is_some()).count()
}

fn documented() -> Vec<Documented> {
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let exported = exported();
    let mut all = Vec::new();
    for package in PACKAGES {
        let mut files = Vec::new();
        let at = crates.join(package);
        find(&if at.is_dir() { at.join("src") } else { at }, &mut files);
        for path in files {
            let shown = path.display().to_string();
            if INSIDE.iter().any(|inside| shown.contains(inside)) {
                continue;
            }
            let file = syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap();
            // From the core, only names that `leasehold` re-exports count, and names in a module
            // that it re-exports.
            let all_of_it = package != "leasehold-core"
                || ["/blocking.rs", "/testing"].iter().any(|module| shown.contains(module));
            let wanted = |name: &str| all_of_it || exported.contains(name);
            let prefix = match package.split('/').next().unwrap().strip_prefix("leasehold-") {
                _ if shown.ends_with("/blocking.rs") => "blocking::".to_owned(),
                None | Some("core") => String::new(),
                Some(package) => format!("{package}::"),
            };
            let home = format!("{prefix}{}", path.file_stem().unwrap().display());
            all.push(Documented { of: home.clone(), name: None, doc: doc(&file.attrs) });
            read(&file.items, &prefix, &home, &wanted, &mut all);
        }
    }
    all
}

fn find(at: &Path, files: &mut Vec<PathBuf>) {
    if at.is_dir() {
        for entry in std::fs::read_dir(at).unwrap() {
            find(&entry.unwrap().path(), files);
        }
    } else if at.extension().is_some_and(|ending| ending == "rs") {
        files.push(at.to_owned());
    }
}

/// Returns the names that `leasehold` re-exports from the core.
fn exported() -> BTreeSet<String> {
    let facade = include_str!("../../../leasehold/src/lib.rs");
    let (_, names) = facade.split_once("pub use leasehold_core::{").unwrap();
    let (names, _) = names.split_once('}').unwrap();
    names.split(',').map(|name| name.trim().to_owned()).collect()
}

fn read(
    items: &[Item],
    prefix: &str,
    home: &str,
    wanted: &impl Fn(&str) -> bool,
    all: &mut Vec<Documented>,
) {
    for item in items {
        match item {
            Item::Struct(of) => all.push(of_type(prefix, &of.ident, &of.attrs)),
            Item::Enum(of) => all.push(of_type(prefix, &of.ident, &of.attrs)),
            Item::Trait(of) => all.push(of_type(prefix, &of.ident, &of.attrs)),
            Item::Mod(inner) if is_public(&inner.vis) => {
                let prefix = format!("{prefix}{}::", inner.ident);
                let home = format!("{home}::{}", inner.ident);
                let items = inner.content.as_ref().map(|(_, items)| items.as_slice());
                all.push(Documented { of: home.clone(), name: None, doc: doc(&inner.attrs) });
                read(items.unwrap_or_default(), &prefix, &home, wanted, all);
            }
            Item::Fn(function) if is_public(&function.vis) && !is_hidden(&function.attrs) => {
                let (name, doc) = (function.sig.ident.to_string(), doc(&function.attrs));
                if wanted(&name) {
                    all.push(Documented { of: home.to_owned(), name: Some(name), doc });
                }
            }
            Item::Impl(block) if block.trait_.is_none() => {
                let of = block.self_ty.to_token_stream().to_string();
                let of = of.split('<').next().unwrap().rsplit(' ').find(|part| !part.is_empty());
                let of = of.unwrap_or_default();
                for item in block.items.iter().filter(|_| wanted(of)) {
                    let syn::ImplItem::Fn(method) = item else { continue };
                    if is_public(&method.vis) && !is_hidden(&method.attrs) {
                        all.push(Documented {
                            of: format!("{prefix}{of}"),
                            name: Some(method.sig.ident.to_string()),
                            doc: doc(&method.attrs),
                        });
                    }
                }
            }
            _ => {}
        }
    }
}

fn of_type(prefix: &str, name: &syn::Ident, attributes: &[Attribute]) -> Documented {
    Documented { of: format!("{prefix}{name}"), name: None, doc: doc(attributes) }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|one| one.to_token_stream().to_string().contains("doc (hidden)"))
}

/// Returns the documentation in these attributes, line by line.
fn doc(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes {
        let syn::Meta::NameValue(pair) = &attribute.meta else { continue };
        let syn::Expr::Lit(literal) = &pair.value else { continue };
        if let (true, syn::Lit::Str(line)) = (pair.path.is_ident("doc"), &literal.lit) {
            text.push_str(&line.value());
            text.push('\n');
        }
    }
    text
}

/// Returns the code of the examples that are run.
fn run_code(doc: &str) -> String {
    let mut code = String::new();
    let mut fence = None;
    for line in doc.lines().map(str::trim_start) {
        match (line.strip_prefix("```"), fence) {
            (Some(info), None) => fence = Some(["", "rust", "should_panic"].contains(&info.trim())),
            (Some(_), Some(_)) => fence = None,
            (None, Some(true)) => {
                code.push_str(line);
                code.push('\n');
            }
            (None, _) => {}
        }
    }
    code
}

/// Returns whether the code calls a function of this name, or passes it on.
fn calls(code: &str, name: &str) -> bool {
    super::sources::named(code, name).into_iter().any(|at| {
        let (before, after) = (&code[..at], &code[at + name.len()..]);
        let handed_on = before.ends_with("::") && !after.starts_with("::");
        after.starts_with('(')
            || after.starts_with("::<")
            || (handed_on && !after.starts_with([';', '}', ',']))
    })
}

#[test]
fn only_calls_in_examples_that_run_count() {
    let doc = "A lock.\n\n```\nlocks.mutex(\"a\").map(MutexGuard::token);\n```\n```no_run\na.lost();\n```\n";
    let code = run_code(doc);
    assert!(calls(&code, "mutex") && calls(&code, "token"), "{code}");
    assert!(!calls(&code, "lost") && !calls(&code, "locks") && !calls(&code, "a"), "{code}");
    assert!(!calls("use leasehold::store::{self, Evict};", "store"));
    assert!(!calls("use leasehold::once;", "once"));
}
