//! The list of recordings that nothing reads is true.

use std::collections::BTreeSet;
use std::path::Path;

use ferrospeed_testkit::golden::repository_root;

/// The plain strings of all Rust files: names of recordings are among them.
fn literals(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            literals(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let plain = |part: &&str| part.contains('/') && !part.contains(char::is_whitespace);
            found.extend(text.split('"').filter(plain).map(str::to_owned));
        }
    }
}

fn files(folder: &Path, root: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|extension| extension.to_str()) {
            _ if path.is_dir() => files(&path, root, found),
            Some("json" | "safetensors" | "pt" | "bin") => {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
            _ => {}
        }
    }
}

/// Whether a test names the file, or a folder that it lies in. Recorded models are found by their folders.
fn is_read(file: &str, literals: &BTreeSet<String>) -> bool {
    let folders = || file.match_indices('/').skip(1).map(|(at, _)| &file[..at]);
    // `transformer/index.json` names the others of its folder.
    let indexed = ["models/", "transformers/", "transformer/"].iter().any(|folder| file.starts_with(folder));
    indexed || literals.contains(file) || folders().any(|folder| literals.contains(folder))
}

#[test]
fn every_recording_is_read_or_listed_with_the_reason() {
    let root = repository_root();
    let page = std::fs::read_to_string(root.join("docs/recordings.md")).unwrap();
    let (whole, _) = page.split_once("## Cases and fields").unwrap();
    let rows = whole.lines().filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    let listed: BTreeSet<&str> =
        rows.flat_map(|row| row.split('`').filter(|name| name.contains('/'))).collect();
    let (mut literal, mut recorded) = (BTreeSet::new(), Vec::new());
    literals(&root.join("crates"), &mut literal);
    let set = root.join("tests/golden");
    files(&set, &set, &mut recorded);
    let unread: BTreeSet<&str> =
        recorded.iter().filter(|file| !is_read(file, &literal)).map(String::as_str).collect();
    assert_eq!(listed, unread, "docs/recordings.md and what tests name");
}
