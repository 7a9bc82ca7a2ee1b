//! The table of faults names tests that are there.

use std::path::Path;

#[test]
fn every_row_of_the_table_of_faults_names_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let table = std::fs::read_to_string(root.join("docs/faults.md")).unwrap();
    let mut missing = Vec::new();
    let mut rows = 0;
    for line in table.lines().filter(|line| line.starts_with("| ") && line.contains("::")) {
        rows += 1;
        let name = line.rsplit('`').nth(1).unwrap_or_default();
        let found = (|| {
            let (place, test) = name.split_once("::")?;
            let (package, file) = place.split_once(':')?;
            let folder = if file.starts_with("src/") { "" } else { "tests/it/" };
            let source =
                std::fs::read_to_string(root.join(format!("crates/{package}/{folder}{file}.rs"))).ok()?;
            source.contains(&format!("fn {test}(")).then_some(())
        })();
        if found.is_none() {
            missing.push(name.to_owned());
        }
    }
    assert!(rows >= 40, "{rows} rows");
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
}
