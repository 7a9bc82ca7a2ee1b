//! Files that users name for what a command will write: looked at before the work, which may be long.

use std::path::Path;

use crate::failure::Failure;

/// Refuses what is there and no file.
pub(super) fn check_kind(output: &Path) -> Result<(), Failure> {
    let shown = output.display();
    match () {
        () if output.is_dir() => Err(Failure::Usage(format!("{shown} is a folder; name a file"))),
        () if output.exists() && !output.is_file() => {
            Err(Failure::Usage(format!("{shown} is a pipe, socket or device; name a file")))
        }
        () => Ok(()),
    }
}

/// Refuses a place where no file can be.
pub(super) fn check_place(output: &Path) -> Result<(), Failure> {
    check_kind(output)?;
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if folder.is_dir() {
        return Ok(());
    }
    let (output, folder) = (output.display(), folder.display());
    Err(Failure::Usage(format!("{output}: there is no folder {folder}; make it first")))
}
