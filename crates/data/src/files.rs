//! Which files a list of paths stands for.

use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// The files behind `paths`, in order of their names, each once. A folder stands for all files below it with one of
/// these extensions (all, if none is given); hidden entries and links inside folders are passed over.
pub(crate) fn list(paths: &[PathBuf], extensions: &[String]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        collect(path, extensions, true, &mut files)?;
    }
    files.sort();
    files.dedup();
    if files.is_empty() {
        let first = paths.first().cloned().unwrap_or_default();
        let why = "holds no file to train on; name files, or a folder and the extensions to read";
        return Err(DataError::bad_file(&first, why));
    }
    Ok(files)
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
    let wanted =
        named || extensions.is_empty() || extension.is_some_and(|extension| extensions.contains(&extension));
    if kind.is_file() && wanted {
        files.push(path.to_path_buf());
    } else if named {
        return Err(DataError::bad_file(path, "is neither a file nor a folder"));
    }
    Ok(())
}
