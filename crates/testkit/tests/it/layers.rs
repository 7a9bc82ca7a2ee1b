//! The workspace is what ARCHITECTURE.md says: every crate has a row, and depends on crates further down alone.

use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: PathBuf) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The crates of the map, from the highest to the lowest.
fn rows() -> Vec<String> {
    let text = read(root().join("ARCHITECTURE.md"));
    let map = text.split("## The map").nth(1).expect("there is a map");
    let rows = map.lines().skip_while(|line| !line.starts_with("| ---")).skip(1);
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('`').nth(1).expect("a row names a crate").to_owned()).collect()
}

/// What a crate's manifest lists under `[dependencies]`, of ours.
fn dependencies(name: &str) -> Vec<String> {
    let text = read(root().join("crates").join(name).join("Cargo.toml"));
    let section = text.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let section = section.split("\n[").next().unwrap_or_default();
    let ours = section.lines().filter_map(|line| line.strip_prefix("ferrospeed-"));
    ours.map(|line| line.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect()).collect()
}

#[test]
fn every_crate_has_a_row_and_every_row_a_crate() {
    let mut rows = rows();
    let mut crates: Vec<String> = std::fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    rows.sort();
    crates.sort();
    assert_eq!(rows, crates);
}

#[test]
fn dependencies_point_down() {
    let rows = rows();
    let place = |name: &str| rows.iter().position(|row| row == name).expect("every crate has a row");
    let mut seen = 0;
    let mut wrong = Vec::new();
    for name in &rows {
        for dependency in dependencies(name) {
            seen += 1;
            if place(&dependency) <= place(name) {
                wrong.push(format!("{name} depends on {dependency}, which is further up"));
            }
        }
    }
    assert!(seen > 30, "only {seen} dependencies were found: is the manifests' form another one?");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
