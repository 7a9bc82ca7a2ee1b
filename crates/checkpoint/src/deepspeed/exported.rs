//! The folder of an exported checkpoint: whole under its name, or not there.

use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Result};

/// Lets `write` fill a new folder `tag` of `dir`, and writes the tag into the file `hint` beside. Returns the folder.
pub(super) fn exported(
    dir: &Path,
    tag: &str,
    hint: &str,
    write: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    crate::directory::check_tag(tag)?;
    let folder = dir.join(tag);
    if folder.exists() {
        let why = format!("{} exists already; export into another folder", folder.display());
        return Err(CheckpointError::Export(why));
    }
    let is_new = !dir.exists();
    ferrospeed_files::unfinished::remove_numbered(dir, tag, std::fs::Metadata::is_dir);
    let partial = dir.join(format!(".{tag}.partial-{}", ferrospeed_files::unfinished::nonce()));
    let written = ferrospeed_files::create_folder(dir)
        .and_then(|()| std::fs::create_dir_all(&partial))
        .map_err(CheckpointError::io("create", &partial))
        .and_then(|()| write(&partial))
        .and_then(|()| std::fs::rename(&partial, &folder).map_err(CheckpointError::io("rename", &partial)));
    if let Err(error) = written {
        // The error of the export is the one to report.
        let _ = std::fs::remove_dir_all(&partial);
        if is_new {
            let _ = std::fs::remove_dir(dir);
        }
        return Err(error);
    }
    let hint = dir.join(hint);
    ferrospeed_files::write(&hint, tag).map_err(CheckpointError::io("write", &hint))?;
    Ok(folder)
}
