//! Checks the structure that docs/internals/design.md describes. The files of a package do not take
//! names from each other in a cycle. Within the core, no layer takes names from a higher one. The
//! compiler already prevents cycles between packages.

mod imports;

use std::fs;
use std::path::{Path, PathBuf};

use imports::Package;

/// The core's layers, the lowest first. Files in no layer, such as [`kit`](leasehold_core::kit) and
/// the root, are above them.
const LAYERS: [&str; 6] = ["util", "types", "queue", "store", "client", "lock"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn packages() -> Vec<PathBuf> {
    let folders = ["crates", "examples"].map(|folder| workspace().join(folder));
    let inside = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let mut all: Vec<_> = inside.map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.join("Cargo.toml").exists());
    all.sort();
    all
}

/// Returns the layer of a file of the core.
fn layer(file: &Path) -> usize {
    let inside = file.strip_prefix(workspace().join("crates/leasehold-core/src")).unwrap();
    let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
    let first = first.strip_suffix(".rs").unwrap_or(first);
    LAYERS.iter().position(|layer| *layer == first).unwrap_or(LAYERS.len())
}

#[test]
fn files_have_no_import_cycles() {
    let packages = packages();
    assert!(packages.len() >= 12, "{packages:?}");
    let circles = packages.iter().flat_map(|path| Package::read(path).circles());
    let circles: Vec<_> = circles.collect();
    assert!(circles.is_empty(), "{}", circles.join("\n\n"));
}

#[test]
fn no_layer_of_the_core_imports_a_higher_one() {
    let imports = Package::read(&workspace().join("crates/leasehold-core")).imports();
    assert!(imports.len() > 100, "{} imports were found", imports.len());
    for (from, to, names) in &imports {
        let (from, to) = (from.as_path(), to.as_path());
        assert!(layer(from) >= layer(to), "{} takes {names} of {}", from.display(), to.display());
    }
    for (each, name) in LAYERS.iter().enumerate() {
        assert!(imports.iter().any(|(from, ..)| layer(from) == each), "{name} is empty");
    }
}

/// Returns the cycles of a package with these files under `src`.
fn package(files: &[(&str, &str)]) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = directory.path().join("src").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    Package::read(directory.path()).circles()
}

#[test]
fn import_cycle_is_detected_in_any_form() {
    let root = ("lib.rs", "mod a; mod b; pub use a::A;");
    let a = ("a.rs", "pub struct A; fn f() { crate::b::g(); }");
    for b in [
        "use crate::a::A; pub fn g() {}",
        "use super::a; pub fn g() {}",
        "use crate::A; pub fn g() {}",
        "use super::{a::{A as Other}}; pub fn g() {}",
        "pub fn g() { let _ = crate::a::A; }",
        "pub fn g() { println!(\"{:?}\", super::a::A); }",
        "pub fn g() {} mod inner { use crate::a::*; }",
    ] {
        let circles = package(&[root, a, ("b.rs", b)]);
        assert!(circles.len() == 1 && circles[0].contains("a.rs takes"), "{b}: {circles:?}");
    }
    let parent = ("lib.rs", "mod a; pub fn root() { a::f(); }");
    assert_eq!(package(&[parent, ("a.rs", "pub fn f() { crate::root(); }")]).len(), 1);
    assert_eq!(
        package(&[
            ("lib.rs", "mod a;"),
            ("a.rs", "mod b; struct A; use b::B;"),
            ("a/b.rs", "pub struct B; use super::A;")
        ])
        .len(),
        1
    );
}

#[test]
fn acyclic_imports_are_not_reported() {
    let root = ("lib.rs", "mod a; mod b; pub use a::A;");
    let a = ("a.rs", "pub struct A; fn f() { crate::b::g(); }");
    for b in [
        "pub fn g() {}",
        "pub fn g() {} #[cfg(test)] mod tests { use crate::a::A; }",
        "pub fn g() {} pub(in crate::a) fn h() {}",
        "/// See [`A`](crate::a::A).\npub fn g() {}",
        "use std::fmt; pub fn g() { let a = fmt::Error; }",
    ] {
        assert_eq!(package(&[root, a, ("b.rs", b)]), [""; 0], "{b}");
    }
}
