//! Checks that the pages of the stores list the tested server versions: those on this machine, and
//! those that `crates/testbed/newer-servers.sh` installs.

use testbed::{Server, Version};

const STORES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/stores");

/// Returns the rows `| server | oldest | newest |` of all pages.
fn rows() -> Vec<[String; 3]> {
    let pages = std::fs::read_dir(STORES).unwrap().map(|page| page.unwrap().path());
    let texts = pages.map(|page| std::fs::read_to_string(page).unwrap());
    let tables: Vec<String> = texts
        .filter_map(|text| Some(text.split_once("\n## Tested versions\n")?.1.to_owned()))
        .collect();
    let lines = tables.iter().flat_map(|table| {
        table.lines().skip_while(|line| !line.starts_with('|')).take_while(|l| l.starts_with('|'))
    });
    let cells = lines.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    let rows = cells.filter_map(|cells| match cells.as_slice() {
        ["", server, oldest, newest, ""] => Some([server, oldest, newest].map(|s| s.to_string())),
        _ => None,
    });
    rows.collect()
}

#[test]
fn the_pages_name_the_versions_that_are_tested() {
    let rows = rows();
    for server in Server::ALL {
        let Some([_, oldest, newest]) = rows.iter().find(|row| row[0] == server.name()) else {
            panic!("docs/stores has no row for {} under Tested versions", server.name())
        };
        for (version, cell) in [(Version::Oldest, oldest), (Version::Newest, newest)] {
            if !server.exists(version) {
                assert!(version == Version::Newest || cell == "–", "{}: {cell}", server.name());
                continue;
            }
            let runs = server.version(version);
            let same = runs
                .strip_prefix(cell.as_str())
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()));
            assert!(same, "docs/stores: {} {version:?} is {runs}, not {cell}", server.name());
        }
    }
}
