//! Finds the recorded cases that golden tests compare with.
//!
//! They lie in `tests/golden/` of this repository, or in the folder that `FERROSPEED_GOLDEN` names. In the
//! default folder a known file that is missing or empty fails the test. In an override folder it is named as
//! "not in this set" and the test goes on without it, so that another set of the same schema runs unchanged.
//! [`Golden::count_case_files`] lets one test refuse a set that holds no case at all.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::cases::Cases;

/// The environment variable that names another set of recorded cases.
pub const OVERRIDE_VARIABLE: &str = "FERROSPEED_GOLDEN";

/// One set of recorded cases.
#[derive(Debug, Clone)]
pub struct Golden {
    root: PathBuf,
    overridden: bool,
}

/// The set in use: the override folder if there is one, else the set in this repository.
pub fn golden() -> Golden {
    match std::env::var_os(OVERRIDE_VARIABLE).filter(|value| !value.is_empty()) {
        Some(folder) => Golden::in_override_folder(PathBuf::from(folder)),
        None => Golden { root: repository_root().join("tests/golden"), overridden: false },
    }
}

/// The repository's root folder.
pub fn repository_root() -> PathBuf {
    let testkit = Path::new(env!("CARGO_MANIFEST_DIR"));
    testkit.ancestors().nth(2).expect("testkit lies at crates/testkit").to_path_buf()
}

impl Golden {
    fn in_override_folder(root: PathBuf) -> Self {
        Golden { root, overridden: true }
    }

    /// The folder of this set.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether this is the repository's own set.
    pub fn is_default(&self) -> bool {
        !self.overridden
    }

    /// Compares every case of a known JSON file. `known` is how many the default set holds.
    ///
    /// # Panics
    /// With every case that failed, or when too few were there.
    #[track_caller]
    pub fn each_case(&self, relative: &str, known: usize, compare: impl FnMut(&Value)) {
        self.each_case_of(relative, known, |_| true, compare);
    }

    /// Compares those cases of a known JSON file that are this test's; the others are another one's. `known` is how many
    /// of them the default set holds.
    ///
    /// # Panics
    /// With every case that failed, or when too few were there.
    #[track_caller]
    pub fn each_case_of(
        &self,
        relative: &str,
        known: usize,
        is_ours: impl Fn(&Value) -> bool,
        mut compare: impl FnMut(&Value),
    ) {
        let mut cases = Cases::of(relative);
        for (index, case) in self.cases(relative).iter().enumerate().filter(|(_, case)| is_ours(case)) {
            let name = ["id", "title", "file"].iter().find_map(|key| case.get(key));
            let name = name.map_or_else(|| format!("case {index}"), Value::to_string);
            cases.check(name, || compare(case));
        }
        cases.finish(self, known);
    }

    /// Compares every entry of a known folder whose name ends with `suffix`. `known` is how many the default set holds.
    ///
    /// # Panics
    /// With every entry that failed, or when too few were there.
    #[track_caller]
    pub fn each_entry(&self, folder: &str, suffix: &str, known: usize, compare: impl FnMut(&Path)) {
        self.each_path(folder, self.entries(folder, suffix), known, compare);
    }

    /// Compares files or folders of the set, which `what` names. `known` is how many the default set holds.
    ///
    /// # Panics
    /// With every one that failed, or when too few were there.
    #[track_caller]
    pub fn each_path(
        &self,
        what: &str,
        paths: impl IntoIterator<Item = PathBuf>,
        known: usize,
        mut compare: impl FnMut(&Path),
    ) {
        let mut cases = Cases::of(what);
        for path in paths {
            let name = path.strip_prefix(&self.root).unwrap_or(&path).display().to_string();
            cases.check(name, || compare(&path));
        }
        cases.finish(self, known);
    }

    /// The folders of recorded models that hold a file of this name.
    pub fn models_with(&self, file: &str) -> Vec<PathBuf> {
        let folders = ["models", "transformers"].map(|kind| self.entries(kind, ""));
        folders.into_iter().flatten().filter(|folder| folder.join(file).is_file()).collect()
    }

    /// The path of a known file or folder, or `None` where an override set lacks it.
    ///
    /// # Panics
    /// In the default set, when it is missing.
    pub fn path(&self, relative: &str) -> Option<PathBuf> {
        let path = self.root.join(relative);
        if path.exists() {
            return Some(path);
        }
        assert!(self.overridden, "golden file {} is missing", path.display());
        eprintln!("golden: {relative}: not in this set");
        None
    }

    /// The parsed content of a known JSON file, or `None` where an override set lacks it.
    ///
    /// # Panics
    /// When the file is not JSON, or is missing from the default set.
    pub fn json(&self, relative: &str) -> Option<Value> {
        self.path(relative).map(|path| read_json(&path))
    }

    /// The `cases` array of a known JSON file, or the file's own where it is a list; empty where an override set lacks the
    /// file.
    ///
    /// # Panics
    /// When the file of the default set has no case.
    pub fn cases(&self, relative: &str) -> Vec<Value> {
        let Some(document) = self.json(relative) else { return Vec::new() };
        let cases = document.as_array().or(document["cases"].as_array()).cloned().unwrap_or_default();
        self.expect_some(cases.is_empty(), relative, "cases");
        cases
    }

    /// The rows of a table of a known JSON file; none where that of an override set lacks it.
    ///
    /// # Panics
    /// When the file of the default set lacks it.
    pub fn rows<'a>(&self, relative: &str, document: &'a Value, table: &str) -> &'a [Value] {
        let rows = document[table].as_array().map_or(&[][..], Vec::as_slice);
        self.expect_some(rows.is_empty(), relative, table);
        rows
    }

    /// The same of a table whose rows have names.
    ///
    /// # Panics
    /// When the file of the default set lacks it.
    pub fn named_rows(&self, relative: &str, document: &Value, table: &str) -> Map<String, Value> {
        let rows = document[table].as_object().cloned().unwrap_or_default();
        self.expect_some(rows.is_empty(), relative, table);
        rows
    }

    fn expect_some(&self, is_empty: bool, relative: &str, table: &str) {
        if is_empty {
            assert!(self.overridden, "golden file {relative} has no {table}");
            eprintln!("golden: {relative}: {table}: not in this set");
        }
    }

    /// Every entry of a known folder whose name ends with `suffix`, sorted by name.
    ///
    /// # Panics
    /// In the default set, when there is none.
    pub fn entries(&self, folder: &str, suffix: &str) -> Vec<PathBuf> {
        let Some(path) = self.path(folder) else { return Vec::new() };
        let entries = std::fs::read_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut found: Vec<PathBuf> = entries
            .map(|entry| entry.expect("a readable folder entry").path())
            .filter(|path| path.to_string_lossy().ends_with(suffix))
            .collect();
        found.sort();
        if found.is_empty() {
            assert!(self.overridden, "golden folder {folder} holds no *{suffix}");
            eprintln!("golden: {folder}/*{suffix}: not in this set");
        }
        found
    }

    /// How many case files (JSON or safetensors) the whole set holds.
    pub fn count_case_files(&self) -> usize {
        fn count(folder: &Path) -> usize {
            let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
            entries
                .flatten()
                .map(|entry| {
                    let path = entry.path();
                    if path.is_dir() {
                        return count(&path);
                    }
                    let known = path
                        .extension()
                        .is_some_and(|extension| extension == "json" || extension == "safetensors");
                    usize::from(known)
                })
                .sum()
        }
        count(&self.root)
    }
}

/// Reads a JSON file of the set.
///
/// # Panics
/// When it cannot be read or parsed.
pub fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_set_in_use_holds_cases() {
        let set = golden();
        assert!(set.count_case_files() > 0, "no golden case at all under {}", set.root().display());
    }

    #[test]
    fn a_table_absent_from_a_file_of_an_override_set_is_passed_over() {
        let folder = repository_root().join("crates/testkit/src");
        let other = Golden::in_override_folder(folder.clone());
        let document = serde_json::json!({ "rows": [1], "named": { "a": 1 } });
        assert_eq!(other.rows("x.json", &document, "rows"), [1]);
        assert_eq!(other.named_rows("x.json", &document, "named").len(), 1);
        assert!(other.rows("x.json", &document, "none").is_empty());
        assert!(other.named_rows("x.json", &document, "none").is_empty());
        // And a test that finds none of its cases there says so and goes on.
        Cases::of("golden.rs").finish(&other, 3);
        let own = Golden { root: folder, overridden: false };
        assert!(std::panic::catch_unwind(|| own.rows("x.json", &document, "none").len()).is_err());
        assert!(std::panic::catch_unwind(|| own.named_rows("x.json", &document, "none").len()).is_err());
    }

    #[test]
    fn a_file_absent_from_an_override_set_is_passed_over() {
        let set = Golden::in_override_folder(repository_root().join("crates/testkit/src"));
        assert!(set.json("config/zero.json").is_none());
        assert!(set.cases("config/zero.json").is_empty());
        assert_eq!(set.count_case_files(), 0);
    }

    #[test]
    #[should_panic(expected = "is missing")]
    fn a_file_absent_from_the_default_set_fails() {
        let set = Golden { root: repository_root().join("crates/testkit/src"), overridden: false };
        set.json("config/zero.json");
    }
}
