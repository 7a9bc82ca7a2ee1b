//! The page about the library names programs that are there, shows one of them, and links what it names: the documentation of
//! the façade holds the page, and its links are checked as all are.

use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn the_table_of_the_library_names_every_example_and_links_what_it_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/library.md")).unwrap();
    let facade = std::fs::read_to_string(root.join("crates/ferrospeed/src/lib.rs")).unwrap();
    assert!(facade.contains("include_str!(\"../../../docs/library.md\")"));

    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| ---"))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .skip(1)
        .collect();
    assert!(rows.len() >= 40 && rows.iter().all(|row| row.len() >= 3), "{rows:?}");
    // What is ours without a link is a feature's, a key of a configuration, a command, or said in words.
    let unlinked = rows.iter().filter(|row| !row[2].contains("[`"));
    let unlinked: Vec<&str> = unlinked.map(|row| row[2]).collect();
    let is_known = |text: &&str| {
        ["serve::", "nothing:", "not needed", "the same section", "`optimizer.type`"]
            .iter()
            .any(|known| text.contains(known))
    };
    assert!(unlinked.iter().all(is_known), "{unlinked:?}");

    let folder = root.join("crates/ferrospeed/examples");
    let files = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name());
    let files: BTreeSet<String> = files.map(|name| name.into_string().unwrap()).collect();
    let words = rows.iter().flat_map(|row| row[3..].iter().flat_map(|cell| cell.split('`')));
    let named: BTreeSet<String> = words.filter(|word| word.ends_with(".rs")).map(str::to_owned).collect();
    assert_eq!(named, files);
    // Every one of them runs in the executable of cli's tests.
    let run = std::fs::read_to_string(root.join("crates/cli/tests/it/examples.rs")).unwrap();
    let missing: Vec<&String> = files.iter().filter(|file| !run.contains(&format!("/{file}\""))).collect();
    assert!(missing.is_empty(), "{missing:?}");

    let shown = page.split("```rust,no_run\n").nth(1).and_then(|rest| rest.split("\n```").next()).unwrap();
    let program = std::fs::read_to_string(folder.join("two_ways.rs")).unwrap();
    assert!(program.contains(shown), "the page does not show examples/two_ways.rs as it is");
}
