//! Which files a list of paths stands for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// The files behind `paths`, in order of their names. A folder stands for all files below it with one of these extensions
/// (all, if none is given); hidden entries and links inside folders are passed over. A file that is named twice is there
/// twice, which is how a text is given more weight; one that is found in a folder besides is refused as a mistake.
pub(crate) fn list(paths: &[PathBuf], extensions: &[String]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    // Where each file was found first, and whether it was named itself.
    let mut found = BTreeMap::new();
    for path in paths {
        let before = files.len();
        collect(path, extensions, true, &mut files)?;
        for file in &files[before..] {
            let real = file.canonicalize().map_err(DataError::io(file))?;
            let Some((first, was_named)) = found.insert(real, (path, file == path)) else { continue };
            if file != path || !was_named {
                let why = format!(
                    "is named twice, by {} and by {}; take one away, or name the file itself twice to use it twice",
                    first.display(),
                    path.display()
                );
                return Err(DataError::bad_file(file, why));
            }
        }
    }
    files.sort();
    if files.is_empty() {
        let first = paths.first().cloned().unwrap_or_default();
        let why = "holds no file to train on; name files, or a folder and the extensions to read";
        return Err(DataError::bad_file(&first, why));
    }
    Ok(files)
}

/// Patterns with `*`, `?` or `[…]` replaced by what they stand for; a file that has such a name is itself.
pub(crate) fn expand(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for path in paths {
        let text = path.to_string_lossy();
        if !text.contains(['*', '?', '[']) || path.symlink_metadata().is_ok() {
            all.push(path.clone());
            continue;
        }
        let bad = |error: &dyn std::fmt::Display| DataError::bad_file(path, format!("as a pattern: {error}"));
        let found = glob::glob(&text).map_err(|error| bad(&error))?;
        let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| bad(&error))?;
        if found.is_empty() {
            return Err(DataError::bad_file(path, "stands for no file; name files that are there"));
        }
        all.extend(found);
    }
    Ok(all)
}

fn collect(path: &Path, extensions: &[String], named: bool, files: &mut Vec<PathBuf>) -> Result<()> {
    let failed = DataError::io(path);
    let kind =
        if named { std::fs::metadata(path) } else { std::fs::symlink_metadata(path) }.map_err(&failed)?;
    if kind.is_dir() {
        let mut entries: Vec<PathBuf> = std::fs::read_dir(path)
            .map_err(&failed)?
            .map(|entry| entry.map(|e| e.path()))
            .collect::<Result<_, _>>()
            .map_err(&failed)?;
        entries.sort();
        for entry in entries {
            let hidden = entry.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if !hidden {
                collect(&entry, extensions, false, files)?;
            }
        }
        return Ok(());
    }
    let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
    let wanted = named
        || extensions.is_empty()
        || extension.is_some_and(|extension| {
            extensions.iter().any(|known| known.split(' ').any(|known| known == extension))
        });
    if kind.is_file() && wanted {
        files.push(path.to_path_buf());
    } else if named {
        return Err(DataError::bad_file(path, "is neither a file nor a folder"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_there_as_often_as_it_is_named_and_refused_where_a_folder_names_it_again() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        for file in [&a, &b] {
            std::fs::write(file, "x").unwrap();
        }
        let all = folder.path().to_path_buf();
        assert_eq!(list(&[b.clone(), a.clone(), b.clone()], &[]).unwrap(), [a.clone(), b.clone(), b.clone()]);
        for paths in [[a.clone(), all.clone()], [all.clone(), a.clone()], [all.clone(), all.join(".")]] {
            let error = list(&paths, &[]).unwrap_err().to_string();
            assert!(error.contains("a.txt: is named twice, by "), "{error}");
        }
    }
}
